# SPDX-License-Identifier: BSD-3-Clause
"""Forget gates by the kernels of packs, against the formula in PyTorch operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import flash_dmattn
from direct import HAS_DIRECT_CALLS
from flash_dmattn import _core, forgetting, forgetting_bias, forgetting_ops, loader
from flash_dmattn.backends.torch_memory import to_core
from flash_dmattn.forgetting_formula import plain_gradient, plain_results
from flash_dmattn.integrations import parallel_forgetting_attn
from support import Target, core_without_allocator, randn

CHUNK = 1024  # gates per thread block of the CUDA kernels
PRUNE = -6.0
Gates = tuple[Tensor, Tensor | None, Tensor | None]


class Found(NamedTuple):
    """Results on the CPU."""

    bias: Tensor
    start: Tensor | None
    end: Tensor | None
    gradient: Tensor


def exact_gates(*shape: int, seed: int = 0, most: int = 8) -> Tensor:
    """Return multiples of 1/64: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, 1, shape, generator=generator) / 64


def exact_gradient(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(-16, 17, shape, generator=generator) / 8


def bounds(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dbias_of(log_forget: Tensor) -> Tensor:
    *front, length = log_forget.shape
    return exact_gradient(*front, 1, length)


def by_pack(target: Target, gates: Gates, prune: float | None, dbias: Tensor) -> Found:
    log_forget, padding, cu_seqlens = (None if t is None else t.to(target.device) for t in gates)
    assert log_forget is not None
    leaf = log_forget.detach().requires_grad_()
    bias, mask = forgetting_bias(leaf, prune, cu_seqlens, padding=padding)
    (gradient,) = torch.autograd.grad(bias, leaf, dbias.to(bias.device, bias.dtype))
    start, end = (None, None) if mask is None else (mask.start.cpu(), mask.end.cpu())
    return Found(bias.detach().cpu().double(), start, end, gradient.cpu())


def by_formula(target: Target, gates: Gates, prune: float | None, dbias: Tensor) -> Found:
    leaf = gates[0].detach().requires_grad_()
    bias, start, end = plain_results(leaf, *gates[1:], prune)
    (gradient,) = torch.autograd.grad(bias, leaf, dbias.to(bias.dtype))
    return Found(bias.detach(), *((None, None) if prune is None else (start, end)), gradient)


def check(target: Target, gates: Gates, prune: float | None = PRUNE) -> Found:
    """Compare all results, which must be exact."""
    dbias = dbias_of(gates[0])
    got, wanted = by_pack(target, gates, prune, dbias), by_formula(target, gates, prune, dbias)
    for name, one, other in zip(Found._fields, got, wanted, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True, msg=name)
    return got


@pytest.mark.parametrize("prune", [None, PRUNE])
@pytest.mark.parametrize(
    "length", [0, 1, 31, 33, 511, 513, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 70]
)
def test_lengths(pack_target: Target, length: int, prune: float | None) -> None:
    check(pack_target, (exact_gates(1, 2, length, seed=length), None, None), prune)


@pytest.mark.parametrize("prune", [None, PRUNE])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("form", ["dense", "padded", "packed"])
def test_forms(pack_target: Target, form: str, dtype: torch.dtype, prune: float | None) -> None:
    length = CHUNK + 300
    log_forget = exact_gates(2, 3, length).to(dtype)
    log_forget[0, 1, 5] = log_forget[1, 2, CHUNK] = -math.inf
    if form == "packed":
        cu_seqlens = bounds(0, 0, 1, 700, CHUNK, CHUNK, length)
        check(pack_target, (log_forget[0], None, cu_seqlens), prune)
        return
    padding = None
    if form == "padded":
        padding = torch.ones(2, length, dtype=torch.bool)
        padding[0, :400] = padding[1, 900:1000] = padding[1, -1] = False
    check(pack_target, (log_forget, padding, None), prune)


LAYOUTS: dict[str, Any] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda t: torch.stack([t, t + 1], -1)[..., 0],
    "one for all heads": lambda t: t[:, :1].expand_as(t),
    "one for all tokens": lambda t: t[..., :1].expand_as(t),
    "backwards": lambda t: t.flip(-1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(pack_target: Target, layout: str) -> None:
    gates = LAYOUTS[layout](exact_gates(2, 3, 600))
    check(pack_target, (gates, None, None))
    padding = torch.ones(600, 4, dtype=torch.bool)
    padding[::7, 1] = False
    check(pack_target, (gates, padding.T[::2], None))
    cu_seqlens = bounds(0, -1, 250, -1, 600, -1)[::2]
    check(pack_target, (gates[1], None, cu_seqlens))


def steep_then_flat(length: int) -> Tensor:
    """Return gates that make the keys of one chunk decay in all later chunks."""
    gates = torch.full((1, 1, length), -1 / 1024)
    gates[..., : CHUNK // 2] = -1 / 64
    return gates


@pytest.mark.parametrize(
    ("gates", "prune"),
    [
        (steep_then_flat(6 * CHUNK + 9), -8.0),
        (torch.zeros(1, 1, 4 * CHUNK), -1.0),
        (torch.zeros(1, 2, 3 * CHUNK + 1), 0.0),
        (torch.full((1, 1, 3 * CHUNK), -1.0), -CHUNK + 0.5),
        (torch.full((1, 1, 3 * CHUNK), -1.0), -CHUNK - 0.5),
        (torch.full((1, 1, 600), -1.0), 0.0),
    ],
    ids=["spread", "none", "none at 0", "in one chunk", "in the next", "at once"],
)
def test_where_keys_decay(pack_target: Target, gates: Tensor, prune: float) -> None:
    check(pack_target, (gates, None, None), prune)


@pytest.mark.parametrize(
    "cuts",
    [
        (CHUNK,),
        (CHUNK - 1, CHUNK + 1, 2 * CHUNK),
        (5, 3 * CHUNK - 1),
        (3 * CHUNK,),
        tuple(range(0, 4 * CHUNK, 37)),
    ],
    ids=lambda cuts: f"{len(cuts)} from {cuts[0]}",
)
@pytest.mark.parametrize("most", [0, 1, 8])
def test_sequences_across_chunks(pack_target: Target, cuts: Sequence[int], most: int) -> None:
    length = 4 * CHUNK + 100
    gates = exact_gates(2, length, most=most)
    check(pack_target, (gates, None, bounds(0, *cuts, length)))


def test_sequences_are_computed_apart(pack_target: Target) -> None:
    """The content of a sequence, NaN included, does not affect other sequences."""
    length = CHUNK + 200
    gates, dbias = exact_gates(1, length), exact_gradient(1, 1, length)
    cu_seqlens = bounds(0, 100, 300, CHUNK - 10, CHUNK + 50, length)
    wanted = by_pack(pack_target, (gates, None, cu_seqlens), PRUNE, dbias)
    for begin, end in ((100, 300), (CHUNK - 10, CHUNK + 50)):
        gates[:, begin:end] = dbias[..., begin:end] = math.nan
    got = by_pack(pack_target, (gates, None, cu_seqlens), PRUNE, dbias)
    for begin, end in ((0, 100), (300, CHUNK - 10), (CHUNK + 50, length)):
        for one, other in zip(got, wanted, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one[..., begin:end], other[..., begin:end])
    assert got.bias[..., 100:300].isnan().all()


def test_many_rows(pack_target: Target) -> None:
    is_emulated = pack_target.device == "cpu" and pack_target.has_kernels_of_gpu
    heads = 5 if is_emulated else 200
    check(pack_target, (exact_gates(30, heads, 70, most=64), None, None))


def test_more_chunks_than_a_block_sums_at_a_time(pack_target: Target) -> None:
    """The chunks' totals are summed in groups of as many as a chunk has gates."""
    length = CHUNK * (CHUNK + 3) + 5
    gates = torch.zeros(1, 1, length)
    gates[..., 7] = gates[..., CHUNK * CHUNK + 9] = gates[..., -2] = -5.0
    found = check(pack_target, (gates, None, None))
    assert found.end is not None
    assert found.end[0, 0, 3] == CHUNK * CHUNK + 9
    assert found.end[0, 0, CHUNK] == length - 2


def test_random_gates(pack_target: Target) -> None:
    """Sums have float64 precision, ends are right up to rounding, and both are reproducible."""
    length, prune = 3 * CHUNK + 11, -16.0
    gates = logsigmoid(3 * randn(2, 2, length) + 3)
    dbias = randn(2, 2, 1, length, seed=1)
    got = by_pack(pack_target, (gates, None, None), prune, dbias)
    sums = gates.double().clamp(min=prune - 1).cumsum(-1)
    rounding = torch.finfo(got.bias.dtype).eps
    torch.testing.assert_close(got.bias.double(), -sums.unsqueeze(-2), atol=0, rtol=8 * rounding)
    assert got.end is not None
    end = got.end.long()
    last = (sums.gather(-1, end - 1) - sums).min()
    assert last >= prune - 1e-9
    dropped = sums.gather(-1, end.clamp(max=length - 1)) - sums
    assert ((dropped < prune + 1e-9) | (end == length)).all()
    wanted = plain_gradient(dbias, gates.double(), None, None, prune)
    torch.testing.assert_close(got.gradient.double(), wanted, atol=1e-4, rtol=1e-6)
    for _ in range(3):
        again = by_pack(pack_target, (gates, None, None), prune, dbias)
        for one, other in zip(got, again, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_what_gets_no_gradient(pack_target: Target) -> None:
    """Gates below prune - 1 and padding get no gradient for any gradient of their bias."""
    gates = exact_gates(1, 1, 40)
    gates[..., 10], gates[..., 20], gates[..., 30] = -math.inf, PRUNE - 1, PRUNE - 1.25
    padding = torch.ones(1, 40, dtype=torch.bool)
    padding[:, 15:18] = False
    gates[..., 16] = math.nan
    dbias = torch.ones(1, 1, 1, 40)
    dbias[..., 15:18] = math.nan
    for prune, counted in ((PRUNE, {20}), (None, {20, 30})):
        got = by_pack(pack_target, (gates, padding, None), prune, dbias)
        zero = set(got.gradient[0, 0].eq(0).nonzero().flatten().tolist())
        assert zero == {10, 15, 16, 17, 30} - counted
        assert got.gradient.isfinite().all()
        assert got.gradient[0, 0, 20] == -20


def test_bounds_that_nobody_reads(pack_target: Target) -> None:
    """On a GPU, wrong bounds give any finite result from within the tensors."""
    gates = exact_gates(2, CHUNK + 100).to(pack_target.device)
    for wrong in ((0, 5000), (-7, 50, CHUNK), (0, 900, 30, CHUNK + 100), (4, 2, 1), (0, 20), (3,)):
        cu_seqlens = bounds(*wrong).to(pack_target.device)
        if pack_target.device == "cpu":
            with pytest.raises(ValueError, match="cu_seqlens"):
                forgetting_bias(gates, PRUNE, cu_seqlens)
            continue
        leaf = gates.detach().requires_grad_()
        bias, _ = forgetting_bias(leaf, PRUNE, cu_seqlens)
        bias.sum().backward()
        assert bias.isfinite().all()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


def test_packs_compute_them(pack_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        pytest.fail("the formula was asked for")

    for module in (forgetting, forgetting_ops):
        monkeypatch.setattr(module, "plain_results", refuse)
    gates = exact_gates(1, 2, 50).to(pack_target.device).requires_grad_()
    forgetting_bias(gates, PRUNE)[0].sum().backward()
    with torch.no_grad():
        assert not forgetting_bias(gates)[0].requires_grad


def test_one_operator_forward_and_one_backward(pack_target: Target) -> None:
    gates = exact_gates(1, 50, 2).to(pack_target.device).requires_grad_()
    q, k, v = (randn(1, 50, 2, 16, dtype=torch.float16).to(pack_target.device) for _ in range(3))
    parallel_forgetting_attn(q, k, v, gates, prune=PRUNE).sum().backward()  # loads the kernels
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        parallel_forgetting_attn(q, k, v, gates, prune=PRUNE).sum().backward()
    names = [event.name for event in profile.events()]
    for name in ("forget", "forget_backward", "attention_forward", "attention_backward"):
        assert names.count(f"flash_dmattn::{name}") == 1
    formula = {"aten::cumsum", "aten::searchsorted", "aten::arange", "aten::clamp", "aten::flip"}
    assert not formula & set(names)


@pytest.mark.parametrize("prune", [None, PRUNE])
def test_operators(pack_target: Target, prune: float | None) -> None:
    operators = torch.ops.flash_dmattn
    device = pack_target.device
    gates = exact_gates(2, 40, 2).to(device).transpose(1, 2)
    padding = torch.ones(2, 40).bool().to(device)
    given = (gates.requires_grad_(), padding, None, prune)
    torch.library.opcheck(operators.forget.default, given)
    packed = (exact_gates(2, 40).to(device), None, bounds(0, 7, 40).to(device), prune)
    torch.library.opcheck(operators.forget.default, packed)
    bias = operators.forget.default(*given)[0].detach()
    torch.library.opcheck(operators.forget_backward.default, (bias, gates.detach(), *given[1:]))


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(pack_target: Target, packed: bool, compiler: str) -> None:
    gates = exact_gates(3, 300).to(pack_target.device)
    cu_seqlens = bounds(0, 50, 300).to(pack_target.device) if packed else None

    def both(log_forget: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = log_forget if packed else log_forget.unsqueeze(0)
        bias, mask = forgetting_bias(given * 2, PRUNE, cu_seqlens)
        assert mask is not None
        return bias, mask.start, mask.end

    compiled = torch.compile(both, fullgraph=True, backend=compiler)
    leaves = [gates.clone().requires_grad_() for _ in range(2)]
    for one, other in zip(both(leaves[0]), compiled(leaves[1]), strict=True):
        assert torch.equal(one, other)
    for leaf, compute in zip(leaves, (both, compiled), strict=True):
        (compute(leaf)[0] ** 2).sum().backward()
    assert torch.equal(*(leaf.grad for leaf in leaves if leaf.grad is not None))


@pytest.mark.parametrize("form", ["dense", "padded", "packed"])
def test_gradients_of_gradients(pack_target: Target, form: str) -> None:
    gates = logsigmoid(randn(2, 2, 9)).double().to(pack_target.device)
    padding = torch.ones(2, 9, dtype=torch.bool, device=pack_target.device)
    padding[0, :3] = padding[1, 5] = False
    options: dict[str, Any] = {}
    if form == "padded":
        options["padding"] = padding
    if form == "packed":
        gates, options["cu_seqlens"] = gates[0], bounds(0, 4, 9).to(pack_target.device)

    def finite_bias(log_forget: Tensor) -> Tensor:
        bias, _ = forgetting_bias(log_forget, -50.0, **options)
        return bias[bias.isfinite()].double()

    leaf = gates.requires_grad_()
    assert torch.autograd.gradcheck(finite_bias, (leaf,))
    (first,) = torch.autograd.grad((finite_bias(leaf) ** 2).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), leaf)
    plain = plain_results(leaf, options.get("padding"), options.get("cu_seqlens"), -50.0)[0]
    plain = plain[plain.isfinite()].double()
    (plain_first,) = torch.autograd.grad((plain**2).sum(), leaf, create_graph=True)
    (plain_second,) = torch.autograd.grad((plain_first**2).sum(), leaf)
    torch.testing.assert_close(first, plain_first, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(second, plain_second, atol=1e-4, rtol=1e-5)


def test_functional_transforms_take_the_formula(pack_target: Target) -> None:
    gates = exact_gates(2, 3, 20).to(pack_target.device)

    def total(log_forget: Tensor) -> Tensor:
        return (forgetting_bias(log_forget, PRUNE)[0] ** 2).sum()

    leaf = gates.clone().requires_grad_()
    total(leaf).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(torch.func.grad(total)(gates), leaf.grad, atol=0, rtol=1e-6)
    each = torch.vmap(lambda log_forget: forgetting_bias(log_forget[None], None)[0][0])(gates)
    assert torch.equal(each, forgetting_bias(gates)[0])


def test_batched_gradients(pack_target: Target) -> None:
    leaf = exact_gates(2, 3, 20).to(pack_target.device).requires_grad_()
    bias, _ = forgetting_bias(leaf, PRUNE)
    given = exact_gradient(4, *bias.shape).to(bias)
    (batched,) = torch.autograd.grad(bias, leaf, given, is_grads_batched=True, retain_graph=True)
    for one, dbias in zip(batched, given, strict=True):
        assert torch.equal(one, torch.autograd.grad(bias, leaf, dbias, retain_graph=True)[0])


def test_operators_without_a_pack(pack_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are those of compiled code."""
    gates = exact_gates(3, 40).to(pack_target.device).requires_grad_()
    packed = (gates, None, bounds(0, 7, 40).to(pack_target.device), PRUNE)
    wanted = torch.ops.flash_dmattn.forget.default(*packed)
    dbias = exact_gradient(3, 1, 40).to(wanted[0])
    (wanted_gradient,) = torch.autograd.grad(wanted[0], gates, dbias)
    monkeypatch.setattr(forgetting_ops, "_serving_pack", lambda _device: None)
    assert not forgetting_ops.serves(gates)
    got = torch.ops.flash_dmattn.forget.default(*packed)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.autograd.grad(got[0], gates, dbias)[0], wanted_gradient)


def test_threads_of_a_cpu_give_equal_bits() -> None:
    gates = logsigmoid(randn(4, 8, 3000))
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(forgetting_bias(gates, PRUNE))
    torch.set_num_threads(threads)
    (one, one_mask), (other, other_mask) = found
    assert one_mask is not None
    assert other_mask is not None
    assert torch.equal(one, other)
    assert torch.equal(one_mask.end, other_mask.end)


def test_wrong_calls_of_the_core() -> None:
    pack, gates = loader.pack_for("cpu"), torch.zeros(2, 3, CHUNK + 7)
    bias = torch.zeros(2, 3, 1, CHUNK + 7)
    rows = torch.zeros(2, 3, CHUNK + 7, dtype=torch.int32)
    call = _core.Forgetting(pack, to_core(gates), None, None, -1.0)
    work = torch.zeros(call.workspace_bytes, dtype=torch.uint8)
    for wrong, kind, text in (
        ((bias.half(), rows, rows, -1.0, work), TypeError, "bias has dtype float16"),
        ((bias[..., 1:], rows, rows, -1.0, work), ValueError, "bias has in 4 dimensions the shape"),
        ((bias[0], rows, rows, -1.0, work), ValueError, "bias has shape"),
        ((bias, rows, None, -1.0, work), ValueError, "start and end must both"),
        ((bias, rows.long(), rows, -1.0, work), TypeError, "start has dtype int64"),
        ((bias, rows, rows[:, :1].expand(rows.shape), -1.0, work), ValueError, "end has sizes"),
        ((bias, rows, rows, 1.0, work), ValueError, "prune 1 or threads"),
        ((bias, rows, rows, -1.0, work[:-1]), ValueError, "workspace has shape"),
    ):
        with pytest.raises(kind, match=text):
            call.forget(*map(to_core, wrong))  # type: ignore[arg-type]
    assert not bias.any()
    with pytest.raises(TypeError, match="dlog_forget has dtype float64"):
        call.forget_backward(*map(to_core, (bias, gates.double(), work)))
    with pytest.raises(TypeError, match="log_forget has dtype int32"):
        _core.Forgetting(pack, to_core(rows), None, None, -1.0)
    with pytest.raises(ValueError, match=r"padding has shape \(2, 6\)"):
        _core.Forgetting(pack, *map(to_core, (gates, torch.ones(2, 6).bool())), None, -1.0)
    for ends, text in (
        (bounds(0, 9, 7), "falls from 9 to 7 at index 2"),
        (bounds(0, 6), "ends with 6, but must end with"),
    ):
        with pytest.raises(ValueError, match=f"cu_seqlens {text}"):
            _core.Forgetting(pack, to_core(gates[0]), None, to_core(ends), -1.0)
    assert flash_dmattn.forgetting_bias(gates)[0].shape == bias.shape


def attended_apart(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, prune: float | None) -> Tensor:
    bias, mask = forgetting_bias(gates, prune)
    out = flash_dmattn.flash_dmattn_func(q, k, v, mask, bias, is_causal=True)
    assert isinstance(out, Tensor)
    return out


def attention_inputs(target: Target, *, value_dim: int = 16) -> list[Tensor]:
    shapes = (1, 50, 4, 16), (1, 50, 2, 16), (1, 50, 2, value_dim)
    dtype = target.dtypes[-1]
    tensors = [randn(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]
    return [t.to(target.device) for t in (*tensors, exact_gates(1, 4, 50))]


@pytest.mark.parametrize("prune", [None, PRUNE])
@pytest.mark.parametrize("wanted", ["1111", "0001", "1110", "0100"])
def test_one_function_gives_what_two_give(
    pack_target: Target, wanted: str, prune: float | None
) -> None:
    tensors = attention_inputs(pack_target)
    for tensor, flag in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(flag == "1")
    leaves = [t for t in tensors if t.requires_grad]
    out = forgetting.forgetting_attention(*tensors, prune)
    assert out.grad_fn is not None
    assert ("Forgetting" in out.grad_fn.name()) == HAS_DIRECT_CALLS
    want = attended_apart(*tensors, prune)
    dout = randn(*out.shape, seed=7, dtype=out.dtype).to(out.device)
    assert torch.equal(out, want)
    for got, expected in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True
    ):
        assert torch.equal(got, expected)
    with torch.no_grad():
        assert torch.equal(forgetting.forgetting_attention(*tensors, prune), want)


def test_one_function_takes_other_values_and_saved_tensors(pack_target: Target) -> None:
    tensors = [t.requires_grad_() for t in attention_inputs(pack_target)]
    want = torch.autograd.grad(attended_apart(*tensors, PRUNE).sum(), tensors)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = forgetting.forgetting_attention(*tensors, PRUNE)
    for got, expected in zip(torch.autograd.grad(out.sum(), tensors), want, strict=True):
        assert torch.equal(got, expected)
    with core_without_allocator() as refused:
        out = forgetting.forgetting_attention(*tensors, PRUNE)
        found = torch.autograd.grad(out.sum(), tensors)
    assert refused.call_count == (4 if HAS_DIRECT_CALLS else 3)
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got, expected)
    profiled = forgetting.forgetting_attention(*tensors, PRUNE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found = torch.autograd.grad(profiled.sum(), tensors)
    for got, expected in zip(found, want, strict=True):
        assert torch.equal(got, expected)
    other = [t.requires_grad_() for t in attention_inputs(pack_target, value_dim=8)]
    assert torch.equal(
        forgetting.forgetting_attention(*other, PRUNE), attended_apart(*other, PRUNE)
    )


def test_autocast_casts_what_differs(pack_target: Target) -> None:
    query, *others = attention_inputs(pack_target)
    with torch.autocast(pack_target.device, torch.bfloat16):
        out = forgetting.forgetting_attention(query.float(), *others, PRUNE)
        want = attended_apart(query.float(), *others, PRUNE)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)


def test_changed_gates_are_seen(pack_target: Target) -> None:
    tensors = attention_inputs(pack_target)
    tensors[3].requires_grad_()
    gates = tensors[3] * 1.0
    out = forgetting.forgetting_attention(*tensors[:3], gates, PRUNE)
    gates.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_gradients_are_refused(pack_target: Target) -> None:
    tensors = [t.requires_grad_() for t in attention_inputs(pack_target)]
    out = forgetting.forgetting_attention(*tensors, PRUNE)
    found = torch.autograd.grad(out.sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        found[0].sum().backward()


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_backend_without_kernels_for_gates(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    gates = exact_gates(1, 2, 50)
    want, mask = forgetting_bias(gates, PRUNE)
    monkeypatch.setenv("FLASH_DMATTN_BACKEND", backend)
    bias, other = forgetting_bias(gates, PRUNE)
    assert torch.equal(bias, want)
    assert mask is not None
    assert other is not None
    assert torch.equal(other.end, mask.end)
