# SPDX-License-Identifier: BSD-3-Clause
"""Values whose head dimension differs from that of queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import flash_dmattn
from flash_dmattn import IntervalMask, explain, flash_dmattn_func, flash_dmattn_varlen_func, loader
from flash_dmattn.record import ATTENTION, AttentionInputs
from good_arguments import dense, on_device, varlen
from listed_keys import ListedCall, expected, leaves_of
from support import (
    LargestStorage,
    Target,
    assert_accurate,
    assert_forward_is_accurate,
    check,
    gathered,
    rand_bool,
    randn,
    simple_problem,
)

# Key and value widths: those of models with two widths, pairs that pad either one, and odd sizes.
WIDTHS = [(24, 16), (16, 24), (17, 5), (192, 128), (96, 64)]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softcap": 2.0},
    "rows": {"mask": rand_bool(2, 4, 17, 23), "bias": randn(1, 2, 17, 23)},
    "keys": {"mask": rand_bool(2, 23), "bias": randn(2, 2, 1, 23), "scale": 0.3},
    "intervals": {"mask": IntervalMask.sliding_window(4, 0, 17, 23)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths_and_forms(target: Target, widths: tuple[int, int], form: str) -> None:
    settings = dict(FORMS[form])
    for dtype in target.dtypes:
        if isinstance(settings.get("bias"), torch.Tensor):
            settings["bias"] = settings["bias"].to(dtype)
        problem = simple_problem(dtype, head_dim=widths[0], value_dim=widths[1], **settings)
        check(problem, target)


# 140 queries. Kernels for narrow values serve some calls in one pass, some in both.
NARROW: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "bias": randn(2, 2, 1, 150)},
    "keys": {"mask": rand_bool(2, 150), "bias": randn(2, 1, 1, 150), "scale": 0.2},
    "own": {"mask": rand_bool(2, 4, 1, 150), "bias": randn(2, 4, 1, 150)},
    "intervals": {
        "mask": IntervalMask.sliding_window(20, 3, 140, 150),
        "bias": randn(2, 2, 1, 150),
    },
    "rows": {"mask": rand_bool(2, 2, 140, 150)},
    "row bias": {"bias": randn(1, 2, 140, 150)},
    "softcap": {"softcap": 3.0, "causal": True},
}


@pytest.mark.parametrize("form", NARROW)
@pytest.mark.parametrize("widths", [(192, 128), (136, 72)], ids=str)
def test_narrow_values(kernel_target: Target, widths: tuple[int, int], form: str) -> None:
    if kernel_target.most_head_dim < 192:
        pytest.skip("the pack was built for smaller heads")
    settings, dtype = dict(NARROW[form]), kernel_target.dtypes[-1]
    if isinstance(settings.get("bias"), torch.Tensor):
        settings["bias"] = settings["bias"].to(dtype)
    sizes = {"queries": 140, "keys": 150, "head_dim": widths[0], "value_dim": widths[1]}
    check(simple_problem(dtype, **sizes, **settings), kernel_target)


def narrow_problem(target: Target, queries: int = 140, spare: int = 0) -> dict[str, Any]:
    """Return causal arguments with keys of 192 and values of 128; rows have spare elements."""
    dtype, shapes = target.dtypes[-1], {"query": (4, 192), "key": (2, 192), "value": (2, 128)}
    rows = {
        name: randn(1, queries, heads, width + spare, dtype=dtype, seed=heads + width)[..., spare:]
        for name, (heads, width) in shapes.items()
    }
    return on_device(target, {**rows, "is_causal": True, "backend": target.backend})


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",), ("query", "key", "value")])
def test_wanted_gradients_of_narrow_values(kernel_target: Target, wanted: tuple[str, ...]) -> None:
    given, gradients = narrow_problem(kernel_target), []
    for value in (given["value"], torch.nn.functional.pad(given["value"], (0, 64))):
        call = {**given, "value": value}
        leaves = {name: call[name].clone().requires_grad_() for name in wanted}
        out = flash_dmattn_func(**{**call, **leaves})[..., :128]
        found = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
        gradients.append([t[..., :128] for t in found])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("queries", [128, 129])
@pytest.mark.parametrize("spare", [1, 8])
def test_rows_of_narrow_values(kernel_target: Target, queries: int, spare: int) -> None:
    """Rows that are not aligned, including those of dout, give the results of contiguous ones."""
    given, results = narrow_problem(kernel_target, queries, spare), []
    states = [given[name] for name in ("query", "key", "value")]
    dout = randn(1, queries, 4, 129, dtype=states[0].dtype).to(states[0].device)[..., 1:]
    plain = [tensor.contiguous() for tensor in (*states, dout)]
    for rows in ((*states, dout), (*states, plain[-1]), plain):
        *leaves, dout = (tensor.detach().requires_grad_() for tensor in rows)
        out = flash_dmattn_func(*leaves, is_causal=True, backend=kernel_target.backend)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for *others, plain_result in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, plain_result, atol=2e-2, rtol=2e-2)


def test_narrow_values_are_not_padded(kernel_target: Target) -> None:
    if not kernel_target.is_pack or 0 in loader.pack_for(kernel_target.device).narrow_widths:
        pytest.skip("the pack has no kernels for narrow values")
    given = narrow_problem(kernel_target)
    query = given.pop("query").requires_grad_()
    with LargestStorage() as largest:
        flash_dmattn_func(query, **given).sum().backward()
    assert largest.bytes <= query.nbytes


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_one_query(target: Target, widths: tuple[int, int]) -> None:
    problem = simple_problem(
        target.dtypes[0], queries=1, keys=300, head_dim=widths[0], value_dim=widths[1]
    )
    assert_forward_is_accurate(problem, target)


def problem_of(target: Target, *, packed: bool = False) -> dict[str, Any]:
    """Return arguments with keys of 24 and values of 16."""
    make = varlen if packed else dense
    front = (10,) if packed else (2, 7)
    query = randn(10, 4, 24) if packed else randn(2, 5, 4, 24)
    states = {"key": randn(*front, 2, 24, seed=1), "value": randn(*front, 2, 16, seed=2)}
    return on_device(target, make(target, query=query, **states))


def padded(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the same call with values padded to 24."""
    value = torch.nn.functional.pad(arguments["value"], (0, 8))
    return {**arguments, "value": value}


SELECTING = {"window_size": 2, "keep_last": 1, "is_causal": True}


@pytest.mark.parametrize("options", [{}, SELECTING, {"sink": randn(4)}], ids=["", "window", "sink"])
@pytest.mark.parametrize("packed", [False, True])
def test_padded_values_give_the_same(target: Target, packed: bool, options: dict[str, Any]) -> None:
    arguments, results = problem_of(target, packed=packed), []
    function = flash_dmattn_varlen_func if packed else flash_dmattn_func
    if "window_size" in options:
        options = {**options, "attn_bias": randn(1, 1, 10) if packed else randn(2, 1, 1, 7)}
    options = on_device(target, options)
    for call in (arguments, padded(arguments)):
        leaves = {n: call[n].clone().requires_grad_() for n in ("query", "key", "value")}
        out, lse, mass = function(
            **{**call, **leaves, **options}, return_lse=True, return_key_mass=True
        )
        width = min(out.shape[-1], 16)
        (out[..., :width].float().square().sum() + lse.sum()).backward()
        gradients = [leaf.grad for leaf in leaves.values()]
        results.append([out[..., :16], lse, mass, *gradients[:2], gradients[2][..., :16]])
        assert out.shape == (*call["query"].shape[:-1], call["value"].shape[-1])
        assert out.is_contiguous()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


def test_default_scale_is_of_the_query(target: Target) -> None:
    arguments = problem_of(target)
    out = flash_dmattn_func(**arguments)
    assert torch.equal(out, flash_dmattn_func(**arguments, softmax_scale=24**-0.5))


def test_views_of_one_latent_tensor(target: Target) -> None:
    """Keys and values share memory, whose gradient is the sum of both."""
    dtype = target.dtypes[0]
    query, latent = randn(2, 5, 4, 24, dtype=dtype), randn(2, 7, 1, 24, dtype=dtype)
    dout = randn(2, 5, 4, 16, dtype=dtype)
    leaf = latent.to(target.device).requires_grad_()
    out = flash_dmattn_func(query.to(target.device), leaf, leaf[..., :16], backend=target.backend)
    (got,) = torch.autograd.grad(out, leaf, dout.to(target.device))
    truth = latent.double().requires_grad_()
    out, _ = flash_dmattn.attention_reference(query.double(), truth, truth[..., :16])
    (want,) = torch.autograd.grad(out, truth, dout.double())
    torch.testing.assert_close(got.cpu().double(), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("masked", [False, True])
def test_plans(target: Target, masked: bool) -> None:
    arguments = problem_of(target)
    mask = rand_bool(2, 1, 5, 7).to(target.device) if masked else None
    query, key = arguments["query"], arguments["key"]
    plan = flash_dmattn.make_plan(query, key, mask, backend=target.backend)
    want = flash_dmattn_func(**arguments, attn_mask=mask, return_key_mass=True)
    got = flash_dmattn_func(**arguments, plan=plan, return_key_mass=True)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_probabilities(target: Target) -> None:
    arguments = problem_of(target)
    out, _, probabilities = flash_dmattn_func(**arguments, return_attn_probs=True)
    value = arguments["value"].repeat_interleave(2, 2).transpose(1, 2).float()
    want = (probabilities.float() @ value).transpose(1, 2)
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)


# --- pages


def paged(target: Target, spare: int = 0, columns: int = 0) -> dict[str, Any]:
    """Return sequences of 7 and 5 keys in pages of 4 with NaN in unused rows, more pages that no
    sequence has, and a table with unused columns.
    """
    arguments = varlen(target, query=randn(10, 4, 24))
    numbers = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    lengths = torch.tensor([7, 5])
    for name, width in (("key", 24), ("value", 16)):
        pages = torch.full((4 + spare, 4, 2, width), torch.nan)
        for sequence, length in enumerate(lengths.tolist()):
            for first in range(0, length, 4):
                count = min(4, length - first)
                pages[numbers[sequence, first // 4], :count] = randn(count, 2, width, seed=first)
        arguments[name] = pages
    behind = torch.full((2, columns), -(2**31), dtype=torch.int32)
    arguments["block_table"] = torch.cat([numbers, behind], 1)
    arguments["cu_seqlens_k"] = torch.tensor([0, 7, 12], dtype=torch.int32)
    arguments["max_seqlen_k"] = 7
    return on_device(target, arguments)


def packed_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the keys and values of `paged` in packed form."""
    own = dict(arguments)
    table = own.pop("block_table")[:, :2].long()
    for name in ("key", "value"):
        rows = own[name][table].flatten(1, 2)
        own[name] = torch.cat([rows[0, :7], rows[1, :5]])
    return own


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("columns", [0, 3])
def test_pages(target: Target, columns: int, planned: bool) -> None:
    arguments = paged(target, columns=columns)
    want = flash_dmattn_varlen_func(**packed_of(arguments), is_causal=True, return_lse=True)
    options: dict[str, Any] = {"is_causal": True}
    if planned:
        names = ("query", "key", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        given = {name: arguments[name] for name in (*names, "block_table", "backend")}
        options = {"plan": flash_dmattn.make_plan(**given, is_causal=True)}
    with torch.no_grad():
        got = flash_dmattn_varlen_func(**arguments, **options, return_lse=True)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_pages_of_no_sequence_are_not_copied(kernel_target: Target) -> None:
    arguments = paged(kernel_target, spare=5000)
    with LargestStorage() as largest:
        flash_dmattn_varlen_func(**arguments)
    assert 0 < largest.bytes < 2**20 < arguments["value"].nbytes


@pytest.mark.parametrize("backend", ["cpu", "reference", "flex"])
def test_page_numbers_are_checked_on_cpus(backend: str) -> None:
    arguments = paged(Target("cpu", backend))
    arguments["block_table"][1, 1] = 4
    with pytest.raises(ValueError, match=r"block_table has the value 4 at"):
        flash_dmattn_varlen_func(**arguments)


# --- other ways to run a call


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(target: Target, packed: bool, dynamic: bool) -> None:
    torch.compiler.reset()
    arguments = problem_of(target, packed=packed)
    function = flash_dmattn_varlen_func if packed else flash_dmattn_func

    def run(value: torch.Tensor) -> Any:
        return function(**{**arguments, "value": value}, return_key_mass=True)

    value = arguments["value"].requires_grad_()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    gradients = []
    for call in (run, compiled):
        out, mass = call(value)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), value)
        gradients.append((out, mass, gradient))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_exported_programs(tmp_path: Path) -> None:
    arguments = problem_of(Target("cpu", "cpu"))
    del arguments["backend"]

    class Model(torch.nn.Module):
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            return flash_dmattn_func(query, key, value, is_causal=True)

    given = tuple(arguments.values())
    torch.export.save(torch.export.export(Model(), given), tmp_path / "model.pt2")
    got = torch.export.load(tmp_path / "model.pt2").module()(*given)
    assert torch.equal(got, Model()(*given))


def test_opcheck_of_the_reference() -> None:
    """The operators of other backends get tensors of one width."""
    given = problem_of(Target("cpu", "reference"))
    leaves = [given[name].requires_grad_() for name in ("query", "key", "value")]
    inputs = AttentionInputs(*leaves, scale=0.3)
    operators = torch.ops.flash_dmattn
    torch.library.opcheck(operators.attention_forward.default, (*inputs, "reference", True))
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]
    results = operators.attention_forward.default(*plain, "reference", True)
    wanted = [True] * 3 + [False] * (len(ATTENTION.differentiable) - 3)
    torch.library.opcheck(
        operators.attention_backward.default,
        (torch.ones_like(results[0]), None, *results, *plain, "reference", *wanted),
    )


@pytest.mark.parametrize("backend", ["cpu", "flex"])
def test_operators_of_kernels_refuse_two_widths(backend: str) -> None:
    inputs = AttentionInputs(randn(2, 5, 4, 24), randn(2, 7, 2, 24), randn(2, 7, 2, 16))
    with pytest.raises(ValueError, match=r"value has shape \(2, 7, 2, 16\)"):
        torch.ops.flash_dmattn.attention_forward.default(*inputs, backend, True)


def test_fake_tensors(target: Target) -> None:
    arguments = problem_of(target)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out = flash_dmattn_func(**arguments)
    assert tuple(out.shape) == (2, 5, 4, 16)


def test_autocast_and_checkpointing(target: Target) -> None:
    arguments = problem_of(target)
    if target.device == "cpu":
        arguments |= {n: arguments[n].float() for n in ("query", "key", "value")}

    def run(value: torch.Tensor) -> Any:
        return flash_dmattn_func(**{**arguments, "value": value})

    value = arguments["value"].requires_grad_()
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out = run(value)
        again = torch.utils.checkpoint.checkpoint(run, value, use_reentrant=False)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, again)
    first, second = (torch.autograd.grad(t.float().sum(), value)[0] for t in (out, again))
    torch.testing.assert_close(first, second)
    assert first.dtype == value.dtype


def test_second_derivatives_of_the_reference() -> None:
    shapes = (1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 3)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def run(*tensors: torch.Tensor) -> Any:
        return flash_dmattn_func(*tensors, backend="reference")

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_func_grad(target: Target) -> None:
    arguments = problem_of(target)

    def total(value: torch.Tensor) -> torch.Tensor:
        return flash_dmattn_func(**{**arguments, "value": value}).float().square().sum()

    value = arguments["value"].clone().requires_grad_()
    (want,) = torch.autograd.grad(total(value), value)
    torch.testing.assert_close(torch.func.grad(total)(arguments["value"]), want)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"value": randn(2, 7, 2, 257)}, r"value has shape \(2, 7, 2, 257\), .* from 1 to 256"),
    ({"value": randn(2, 7, 2, 0)}, r"value has shape \(2, 7, 2, 0\), .* from 1 to 256"),
    (
        {"query": randn(2, 5, 4, 0), "key": randn(2, 7, 2, 0)},
        r"query has shape \(2, 5, 4, 0\), .* from 1 to 256",
    ),
    ({"value": randn(2, 6, 2, 16)}, r"value has shape \(2, 6, 2, 16\), but must have"),
    ({"key": randn(2, 7, 2, 32)}, r"key has shape \(2, 7, 2, 32\), .* 24 like query"),
    ({"key": randn(2, 7, 2, 16)}, r"key has shape \(2, 7, 2, 16\), .* 24 like query"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_wrong_widths(target: Target, wrong: dict[str, Any], text: str) -> None:
    given = problem_of(target) | on_device(target, wrong)
    with pytest.raises(ValueError, match=text):
        flash_dmattn_func(**given)


def test_explanation_tells_what_is_padded() -> None:
    target = Target("cpu", "cpu")
    told = explain(**problem_of(target))
    assert told.backend == "cpu"
    assert any(
        "key has head dimension 24 and value 16, so value is padded" in obstacle.reason
        for obstacle in told.obstacles
    )
    given = problem_of(target)
    given["value"] = randn(2, 7, 2, 32)
    assert "so query and key are padded" in str(explain(**given))
    assert "pages of block_table are copied" in str(explain(**paged(target, columns=2)))
    assert "padded" not in str(explain(**problem_of(Target("cpu", "reference"))))


# --- lists


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (20, 7)], ids=str)
def test_lists(target: Target, widths: tuple[int, int], packed: bool) -> None:
    sizes = {"length": 5, "kv_heads": 2, "group": 3, "sizes": [(4, 9)], "sink": True}
    call = ListedCall(5, target, packed=packed, head_dim=widths[0], value_dim=widths[1], **sizes)
    assert_accurate(call.got(), call.want(torch.float64), call.want(None))


def test_lists_of_one_latent_head(target: Target) -> None:
    """Multi-head latent attention with absorbed projections: 576 columns, 512 of them values."""
    dtype = target.dtypes[0]
    query, latent = randn(2, 3, 16, 576, dtype=dtype), randn(2, 20, 1, 576, dtype=dtype)
    indices = torch.randint(-1, 21, (2, 1, 3, 6), dtype=torch.int32)
    dout = randn(2, 3, 16, 512, dtype=dtype) * 512**-0.5

    def run(compute: Any, device: str, to: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = {
            n: t.to(device, to).requires_grad_() for n, t in {"query": query, "key": latent}.items()
        }
        out, lse = compute({**leaves, "value": leaves["key"][..., :512]})
        return gathered(out, lse, leaves, dout, None)

    def own(leaves: dict[str, torch.Tensor]) -> Any:
        return flash_dmattn_func(
            **leaves,
            key_indices=indices.to(target.device),
            is_causal=True,
            return_lse=True,
            backend=target.backend,
        )

    def plain(leaves: dict[str, torch.Tensor]) -> Any:
        return expected(leaves, indices, is_causal=True)

    got = run(own, target.device, dtype)
    assert_accurate(got, run(plain, "cpu", torch.float64), run(plain, "cpu", dtype))


def test_widest_lists(target: Target) -> None:
    indices = torch.zeros(1, 1, 3, 2, dtype=torch.int32)
    for width, name in ((577, "query"), (300, "key"), (300, "value")):
        shapes = {"query": (1, 3, 2, 256), "key": (1, 4, 1, 256), "value": (1, 4, 1, 256)}
        if width == 577:
            shapes = {n: (*s[:-1], width) for n, s in shapes.items()}
        else:
            shapes[name] = (*shapes[name][:-1], width)
        given = on_device(target, {n: randn(*s) for n, s in shapes.items()})
        given["key_indices"] = indices.to(target.device)
        if name == "value":  # up to 576
            assert flash_dmattn_func(**given, backend=target.backend).shape[-1] == width
            continue
        with pytest.raises(ValueError, match=rf"{name} has shape .*{width}"):
            flash_dmattn_func(**given, backend=target.backend)


def test_listed_pages(target: Target) -> None:
    arguments = paged(target, columns=1)
    indices = torch.tensor([6, 0, 3, -1], dtype=torch.int32).expand(1, 10, 4)
    arguments["key_indices"] = indices.contiguous().to(target.device)
    want = flash_dmattn_varlen_func(**packed_of(arguments), return_lse=True)
    got = flash_dmattn_varlen_func(**arguments, return_lse=True)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_lists_take_no_copy_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PyTorch formula supports two widths."""
    call = ListedCall(4, Target("cpu", "cpu"), head_dim=16, value_dim=8, sizes=[(4, 9)], length=5)
    monkeypatch.setattr(torch.nn.functional, "pad", None)
    out, _ = call.call(leaves_of(call.tensors))
    assert out.shape[-1] == 8
