# SPDX-License-Identifier: BSD-3-Clause
"""Keys selected per query: `key_indices` and `index_bias`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import flash_dmattn
from flash_dmattn import loader
from flash_dmattn.backends.pack import PackBackend
from flash_dmattn.key_lists import formula
from flash_dmattn.record import KEY_LISTS, KeyListInputs
from good_arguments import dense, on_device, varlen, zeros
from listed_keys import ListedCall, leaves_of
from support import LargestStorage, Target, assert_accurate, gathered, randn

SMALL = {"length": 5, "head_dim": 8, "kv_heads": 2, "group": 3, "dlse": True}


def check_listed(call: ListedCall, **options: object) -> None:
    assert_accurate(call.got(**options), call.want(torch.float64), call.want(None))


@pytest.mark.parametrize("seed", range(60))
def test_drawn_lists(target: Target, seed: int) -> None:
    check_listed(ListedCall(seed, target))


# Of the pack's kernels, 16, 32, 64 or 128 rows are a tile, and 32 or 64 columns a step.
@pytest.mark.parametrize(
    ("group", "length"),
    [
        *((1, 4096), (16, 64), (17, 1), (24, 200), (32, 65), (33, 129), (48, 96), (64, 2)),
        *((65, 33), (100, 128), (128, 191), (129, 64)),
    ],
)
def test_groups_that_share_a_list(target: Target, group: int, length: int) -> None:
    fixed = {"group": group, "length": length, "head_dim": 64, "bias_heads": 1, "index_heads": 1}
    sizes = [(2, 300), (1, 100)]
    check_listed(ListedCall(group, target, kv_heads=1, list_heads=1, sizes=sizes, **fixed))


@pytest.mark.parametrize(
    "form",
    [
        {"bias_heads": None, "index_heads": None, "causal": False, "softcap": 0.0},
        {"bias_heads": 1, "index_heads": None, "causal": True, "sink": True, "dropped": 0.3},
        {"bias_heads": None, "index_heads": 2, "softcap": 2.0, "sink": True, "packed": True},
        {"bias_heads": 2, "index_heads": 1, "softcap": 0.0, "packed": True, "scale": 0.3},
    ],
    ids=["plain", "bias", "softcap", "both"],
)
@pytest.mark.parametrize(("group", "head_dim"), [(24, 128), (40, 64), (64, 128), (129, 64)])
def test_groups_of_many_heads(
    target: Target, group: int, head_dim: int, form: dict[str, Any]
) -> None:
    """Of more heads than a tile of few has; the lists have holes, and some queries see no key."""
    fixed = {"group": group, "kv_heads": 2, "list_heads": 2, "length": 300}
    fixed |= {"head_dim": head_dim, "value_dim": head_dim}
    sizes = [(3, 2), (0, 4), (2, 90)] if "packed" in form else [(4, 3), (4, 3)]
    call = ListedCall(group, target, **{"packed": False, "sizes": sizes, **fixed, **form})
    # A list of one key, one that begins with holes, and one whose scores grow.
    call.indices[..., 0, 1:] = -1
    call.indices[..., 1, :200] = -1
    call.tensors["query"][..., -1, :, :] *= 8
    forward = "ListedColumns" if group > 32 else "list_forward_kernel"
    kernels = (forward, "list_backward_kernel_sm90")
    before = [launched(target, kernel) for kernel in kernels]
    check_listed(call)
    if is_on_gpu_with_wgmma(target):
        assert all(launched(target, k) > n for k, n in zip(kernels, before, strict=True))


@pytest.mark.parametrize(
    "form",
    [
        {"group": 1, "kv_heads": 1, "packed": False, "sizes": [(3, 84_000)] * 2},
        {"group": 4, "kv_heads": 2, "packed": True, "sizes": [(3, 70), (2, 84_000)]},
    ],
    ids=["dense", "packed"],
)
def test_more_keys_than_sums_fit_l2(target: Target, form: dict[str, Any]) -> None:
    """Kernels go through parts of the keys. The last query lists keys of the last part only."""
    fixed = {"list_heads": form["kv_heads"], "length": 800, "causal": False, "sink": True}
    fixed |= {"head_dim": 64, "value_dim": 64, "bias_heads": 1, "index_heads": 1}
    call = ListedCall(1, target, dtype=target.dtypes[-1], **fixed, **form)
    last = call.indices[..., -1, :]
    call.indices[..., -1, :] = last.where(last > 60_000, -1)
    check_listed(call)


def test_small_scales_leave_gradients_their_digits(target: Target) -> None:
    """Float16 holds dS, and not its product with such a scale."""
    fixed: dict[str, Any] = {"dtype": torch.float16, "scale": 2.0**-20, "softcap": 0.0}
    call = small_call(target, **fixed, bias_heads=None, index_heads=None)
    for name in ("query", "key"):
        call.tensors[name] *= 4096
    got, want = call.got(), call.want(torch.float64)
    for name in ("query", "key"):
        gradient = f"d{name}"
        error = (got[gradient].double() - want[gradient]).abs().max()
        assert error < 0.01 * want[gradient].abs().max(), name


def launched(target: Target, name: str) -> int:
    """Return how often kernels with this in their name were launched."""
    counts = loader.pack_for(target.device).launch_counts if target.is_pack else {}
    return sum(count for kernel, count in counts.items() if name in kernel)


def is_on_gpu_with_wgmma(target: Target) -> bool:
    """Say whether the pack's kernels, which have names on GPUs only, are those for Hopper."""
    return target == ("cuda", "cuda") and "wgmma" in loader.pack_for("cuda").features


def test_packs_with_kernels_for_lists_compute_them(target: Target) -> None:
    """Other targets compute them otherwise."""
    call = small_call(target, dtype=target.dtypes[-1])
    given = dict(leaves_of(call.tensors, target.device), backend=target.backend, **call.settings)
    lists = call.indices.to(target.device)

    def kernels(**changes: Any) -> tuple[str, str]:
        told = flash_dmattn.explain(**{**given, "key_indices": lists, **changes})
        assert told.forward is not None
        assert told.backward is not None
        return told.forward["kernel"], told.backward["kernel"]

    own = target.is_pack
    for found, name in zip(kernels(), ("list_forward of ", "list_backward of "), strict=True):
        assert found.startswith(name) == own
    forward, backward = kernels(deterministic=True)
    assert forward.startswith("list_forward of ") == own
    assert backward.startswith("list_backward of ") == (own and not target.has_kernels_of_gpu)
    empty = kernels(key_indices=lists[..., :0], index_bias=None)
    assert not own or empty == ("PyTorch operations",) * 2


def test_float64_biases_need_a_pack_that_computes_in_float32() -> None:
    """A pack that emulates GPU kernels is named cpu, too."""
    query, key = randn(1, 2, 1, 8, dtype=torch.bfloat16), randn(1, 4, 1, 8, dtype=torch.bfloat16)
    lists, bias = torch.zeros(1, 1, 2, 3, dtype=torch.int32), randn(1, 1, 1, 4)
    inputs = KeyListInputs(query, key, key, lists, bias=bias)
    facts = {"device_type": 1, "plan_layouts": {}, "lists_keys": True, "max_head_dim": 256}
    for dtypes in (["float16", "bfloat16"], ["float32", "float16", "bfloat16"]):
        backend = PackBackend(SimpleNamespace(dtypes=dtypes, **facts))
        assert backend.serves_lists(inputs)
        exact = inputs._replace(bias=bias.double())
        assert backend.serves_lists(exact) == ("float32" in dtypes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {"bias_heads": None, "index_heads": None, "causal": True, "list_heads": 1},
        {"bias_heads": 1, "index_heads": 2, "softcap": 2.0, "sink": True, "list_heads": 2},
        {"bias_heads": 6, "index_heads": 1, "causal": False, "sink": True, "dropped": 0.3},
        {"bias_heads": 2, "index_heads": 6, "causal": True, "list_heads": 1, "dropped": 0.3},
    ],
    ids=["plain", "shared", "head_bias", "head_index"],
)
def test_forms_of_lists(target: Target, form: dict[str, Any], packed: bool) -> None:
    sizes = [(3, 7), (0, 2), (4, 3), (2, 0)] if packed else [(4, 7)]
    check_listed(ListedCall(3, target, packed=packed, sizes=sizes, **SMALL, **form))


def small_call(target: Target, **changes: Any) -> ListedCall:
    """Return a call of sizes that Triton's interpreter serves in a second."""
    defaults = {"packed": False, "sizes": [(4, 9)], "bias_heads": 1, "index_heads": 2}
    defaults |= {"causal": True, "sink": True, "dropped": 0.0, "index_dropped": 0.0}
    return ListedCall(5, target, **{**SMALL, **defaults, **changes})


def with_lists(call: ListedCall, *lists: list[int]) -> ListedCall:
    """Give each query of a call its list, the same for all heads; no list is longer than k."""
    length = call.indices.shape[-1]
    rows = [[*own, *[-1] * (length - len(own))] for own in lists]
    call.indices = torch.tensor(rows, dtype=torch.int32).expand(call.indices.shape).contiguous()
    return call


LISTS = ([0, 4, 2], [], [3, 3, 3, 0], [8, 1, -7, 9])


@pytest.mark.parametrize("group", [3, 40])
@pytest.mark.parametrize(("packed", "softcap"), [(False, 0.0), (True, 2.0)])
def test_what_is_not_listed_reaches_nothing(
    target: Target, packed: bool, softcap: float, group: int
) -> None:
    call = small_call(target, packed=packed, causal=False, softcap=softcap, group=group)
    heads = 2 * group
    with_lists(call, *LISTS)
    # Keys 5, 6 and 7 are in no list, the second query has none, and two places are no keys.
    clean = call.got()
    poisoned = {name: t.clone() for name, t in call.tensors.items()}
    for name in ("key", "value"):
        poisoned[name].view(9, 2, 8)[5:8] = torch.nan
    poisoned["attn_bias"].view(-1)[5:8] = torch.nan
    poisoned["query"].view(4, heads, 8)[1] = torch.nan
    call.dout.view(4, heads, 8)[1] = torch.nan
    assert call.dlse is not None
    (call.dlse if packed else call.dlse[0])[:, 1] = torch.nan
    own = poisoned["index_bias"].view(2, 4, 5)
    own.masked_fill_(
        (call.indices.view(-1, 4, 5) < 0) | (call.indices.view(-1, 4, 5) > 8), torch.nan
    )
    call.tensors = poisoned
    for name, value in call.got().items():
        torch.testing.assert_close(value, clean[name])
    assert not clean["out"].view(4, heads, 8)[1].any()
    assert (clean["lse"].view(heads, 4)[:, 1] == -torch.inf).all()
    assert not clean["dkey"].view(9, 2, 8)[5:8].any()


@pytest.mark.parametrize("bias", ["attn_bias", "index_bias"])
def test_what_a_bias_drops_reaches_nothing(target: Target, bias: str) -> None:
    """Also where another head of the group keeps the key, whose value is NaN."""
    heads = {"bias_heads": 6} if bias == "attn_bias" else {"index_heads": 6}
    call = with_lists(small_call(target, causal=False, **heads), [5, 0], [5, 1], [5], [2])
    dropped = call.tensors[bias].view(6, -1, 9 if bias == "attn_bias" else 5)
    place = 5 if bias == "attn_bias" else 0
    dropped[0, : 3 if bias == "index_bias" else 1, place] = -torch.inf
    call.tensors["value"][0, 5, 0] = torch.nan
    got = call.got()
    out = got["out"][0]
    assert not out[:, 0].isnan().any()
    assert out[:3, 1:3].isnan().all()
    assert not out[3].isnan().any()
    assert not out[:, 3:].isnan().any()
    assert not got["dquery"][0, :, 0].isnan().any()
    assert got["lse"][0, 0, 2] == -torch.inf


def test_a_key_listed_twice_counts_twice(target: Target) -> None:
    twice = with_lists(small_call(target, causal=False), [3, 1, 3], [2], [0, 0, 0], [7, 8])
    once = with_lists(small_call(target, causal=False), [3, 1], [2], [0], [7, 8])
    for call in (twice, once):
        call.tensors["index_bias"].zero_()
    # As listed once with log(2) and log(3) more.
    once.tensors["index_bias"][:, :, 0, 0] = torch.tensor(2.0).log()
    once.tensors["index_bias"][:, :, 2, 0] = torch.tensor(3.0).log()
    got, want = twice.got(), once.got()
    for name in ("out", "lse", "dquery", "dkey", "dvalue", "dattn_bias", "dsink"):
        torch.testing.assert_close(got[name], want[name], atol=2e-2, rtol=2e-2)


def test_order_changes_nothing_but_rounding(target: Target) -> None:
    call = small_call(target)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    first = call.got()
    call.indices = call.indices[..., order].contiguous()
    call.tensors["index_bias"] = call.tensors["index_bias"][..., order].contiguous()
    second = call.got()
    second["dindex_bias"] = second["dindex_bias"][..., order.argsort()]
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=2e-2, rtol=2e-2)


def test_all_keys_in_order_are_dense_attention(target: Target) -> None:
    call = small_call(target, length=9, causal=True, index_heads=None, bias_heads=2)
    call.indices = torch.arange(9, dtype=torch.int32).expand(1, 1, 4, 9).contiguous()
    got = call.got()
    leaves = leaves_of(call.tensors, target.device)
    settings = {**call.settings, "backend": target.backend, "return_lse": True}
    dense = gathered(
        *flash_dmattn.flash_dmattn_func(**leaves, **settings), leaves, call.dout, call.dlse
    )
    for name, value in dense.items():
        torch.testing.assert_close(got[name], value, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias", "index_bias", "sink"])
def test_gradient_of_one_tensor_alone(target: Target, name: str) -> None:
    call = small_call(target)
    whole = call.got()
    leaves = {n: t.detach().to(target.device) for n, t in call.tensors.items()}
    leaves[name].requires_grad_()
    out, lse = call.call(leaves)
    assert call.dlse is not None
    cotangents = [call.dout.to(target.device), call.dlse.to(target.device)]
    (gradient,) = torch.autograd.grad([out, lse], [leaves[name]], cotangents)
    torch.testing.assert_close(gradient.cpu(), whole[f"d{name}"])


@pytest.mark.parametrize("head_dim", [8, 20])
@pytest.mark.parametrize(("table", "group"), [([2, 0, 3, 1], 3), ([1, 3, 0, 2], 40)])
def test_listed_pages(target: Target, table: list[int], group: int, head_dim: int) -> None:
    fixed = {"packed": True, "sizes": [(2, 7), (3, 5)], "causal": True}
    call = small_call(target, group=group, head_dim=head_dim, **fixed)
    tensors = {name: t.to(target.device) for name, t in call.tensors.items()}
    with torch.no_grad():
        want = call.call(tensors)
        pages = {}
        for name in ("key", "value"):
            # Two pages of four keys for each sequence; what lies behind its keys is not read.
            own = torch.full((4, 4, *tensors[name].shape[1:]), torch.nan, dtype=tensors[name].dtype)
            own = own.to(target.device)
            for page, (begin, end) in zip(table, ((0, 4), (4, 7), (7, 11), (11, 12)), strict=True):
                own[page, : end - begin] = tensors[name][begin:end]
            pages[name] = own
        block_table = torch.tensor(table, dtype=torch.int32, device=target.device).view(2, 2)
        got = call.call({**tensors, **pages}, block_table=block_table)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_equal_bits_where_they_are_asked_for(target: Target) -> None:
    call = ListedCall(11, target, sizes=[(40, 20)], length=17)
    first = call.got(deterministic=True)
    for _ in range(3):
        again = call.got(deterministic=True)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_chunks_of_rows_are_one_call(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2, 3):
        call = ListedCall(seed, target, sizes=[(20, 30)] * 2, length=17)
        for name in ("_GATHERED_ON_CPU", "_GATHERED_ELSEWHERE"):
            monkeypatch.setattr(formula, name, 1000)
        check_listed(call)


def test_memory_follows_the_lists() -> None:
    """No tensor has an element for each query and key, or as many as all lists with D elements."""
    call = ListedCall(
        1,
        Target("cpu", "cpu"),
        packed=False,
        sizes=[(3000, 3000)],
        length=32,
        kv_heads=1,
        group=4,
        head_dim=64,
    )
    inputs = call_inputs(call)
    with LargestStorage() as largest:
        out, _ = formula.forward(inputs)
        formula.backward(inputs, torch.ones_like(out), None, KEY_LISTS.differentiable[:3])
    assert 2**20 < largest.bytes < 3000 * 3000


def call_inputs(call: ListedCall) -> KeyListInputs:
    names = {"attn_bias": "bias"}
    tensors = {names.get(name, name): t for name, t in call.tensors.items()}
    return KeyListInputs(**tensors, indices=call.indices, scale=0.3)


def test_opcheck(target: Target) -> None:
    call = small_call(target)
    inputs = call_inputs(call)
    moved = [t.to(target.device) if isinstance(t, torch.Tensor) else t for t in inputs]
    inputs = KeyListInputs(*moved)
    leaves = [
        t.requires_grad_() if name in KEY_LISTS.differentiable and t is not None else t
        for name, t in inputs._asdict().items()
    ]
    operators = torch.ops.flash_dmattn
    for keeps_rest in (False, True):
        torch.library.opcheck(
            operators.key_list_forward.default, (*leaves, target.backend, keeps_rest)
        )
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]
    out, lse, rest = operators.key_list_forward.default(*plain, target.backend, True)
    torch.library.opcheck(
        operators.key_list_backward.default,
        (torch.ones_like(out), None, out, lse, rest, *plain, target.backend, *[True, False] * 3),
    )


def test_a_trace_is_the_same_with_and_without_gradients(target: Target) -> None:
    """torch.jit.trace traces again without gradients and compares."""
    call = small_call(target)
    leaves = leaves_of(call.tensors, target.device)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        return call.call(dict(zip(leaves, given, strict=True)))[0]

    given = tuple(leaves.values())
    torch.testing.assert_close(torch.jit.trace(attend, given)(*given), attend(*given))


@pytest.mark.parametrize("name", ["reference", "flex"])
def test_auto_may_be_a_backend_without_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = small_call(Target("cpu", "auto"))
    want = call.got()
    monkeypatch.setenv("FLASH_DMATTN_BACKEND", name)
    for field, gradient in call.got().items():
        torch.testing.assert_close(gradient, want[field])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(target: Target, dynamic: bool) -> None:
    torch.compiler.reset()
    call = small_call(target)
    compiled = torch.compile(call.call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    want = call.got()
    leaves = leaves_of(call.tensors, target.device)
    got = gathered(*compiled(leaves), leaves, call.dout, call.dlse)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name])


def test_exported_programs(tmp_path: Path) -> None:
    call = small_call(Target("cpu", "cpu"), index_heads=1, sizes=[(4, 9)])

    class Model(torch.nn.Module):
        def forward(self, query: torch.Tensor, index_bias: torch.Tensor) -> Any:
            return call.call({**call.tensors, "query": query, "index_bias": index_bias})

    given = call.tensors["query"], call.tensors["index_bias"]
    torch.export.save(torch.export.export(Model(), given), tmp_path / "model.pt2")
    got = torch.export.load(tmp_path / "model.pt2").module()(*given)
    for one, other in zip(got, call.call(call.tensors), strict=True):
        assert torch.equal(one, other)


def test_names_of_other_libraries_are_told() -> None:
    x = randn(1, 6, 2, 8)
    with pytest.raises(TypeError, match="it is called key_indices here"):
        flash_dmattn.flash_dmattn_func(x, x, x, topk_indices=zeros(1, 1, 6, 3))


@pytest.mark.parametrize("named", ["key_indices=i", "block_indices=i, block_size=(1, 3)"])
def test_the_first_call_may_be_compiled(named: str) -> None:
    """When nothing has loaded what serves lists."""
    script = (
        "import torch, flash_dmattn\n"
        "x = torch.randn(1, 6, 2, 8)\n"
        "i = torch.zeros(1, 1, 6, 1, dtype=torch.int32)\n"
        f"f = lambda: flash_dmattn.flash_dmattn_func(x, x, x, {named})\n"
        "out = torch.compile(f, fullgraph=True, backend='aot_eager')()\n"
        "assert torch.equal(out, f())"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_activation_checkpointing(target: Target) -> None:
    call = small_call(target)
    want = call.got()
    leaves = leaves_of(call.tensors, target.device)
    results = torch.utils.checkpoint.checkpoint(call.call, leaves, use_reentrant=False)
    got = gathered(*results, leaves, call.dout, call.dlse)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name])


def test_autocast(target: Target) -> None:
    call = small_call(target, dtype=torch.float32, bias_dtype=torch.float32)
    call.dout = call.dout.to(torch.bfloat16)
    leaves = leaves_of(call.tensors, target.device)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out, lse = call.call(leaves)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    rounded = dict(call.tensors)
    rounded |= {name: call.tensors[name].bfloat16() for name in ("query", "key", "value")}
    call.tensors = rounded
    want = call.got()
    assert torch.equal(out.cpu(), want["out"])
    out.backward(call.dout.to(target.device))
    assert leaves["query"].grad is not None
    assert leaves["query"].grad.dtype == torch.float32


def test_second_derivatives_of_the_reference() -> None:
    call = small_call(Target("cpu", "reference"), length=3, group=2)
    tensors = {name: t.double() for name, t in call.tensors.items()}
    names = list(tensors)

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call.call(dict(zip(names, given, strict=True)))
        return out, lse.masked_fill(lse == -torch.inf, 0)

    given = [t.requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_second_derivatives_are_refused(kernel_target: Target) -> None:
    call = small_call(kernel_target)
    leaves = leaves_of(call.tensors, kernel_target.device)
    out, _ = call.call(leaves)
    (gradient,) = torch.autograd.grad(out.sum(), leaves["query"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradient.sum().backward()


def test_transforms_of_torch_func(target: Target) -> None:
    call = small_call(target, dtype=target.dtypes[0])
    tensors = {name: t.to(target.device) for name, t in call.tensors.items()}

    def total(query: torch.Tensor) -> torch.Tensor:
        return call.call({**tensors, "query": query})[0].float().sum()

    leaves = leaves_of(call.tensors, target.device)
    (want,) = torch.autograd.grad(call.call(leaves)[0].float().sum(), leaves["query"])
    query = tensors["query"]
    torch.testing.assert_close(torch.func.grad(total)(query), want, atol=1e-2, rtol=1e-2)
    each = torch.func.vmap(torch.func.grad(total))(torch.stack([query, query]))
    torch.testing.assert_close(each[1], want, atol=1e-2, rtol=1e-2)
    _, tangent = torch.func.jvp(total, (query,), (torch.ones_like(query),))
    torch.testing.assert_close(tangent, want.float().sum(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("length", [0, 3])
def test_lists_without_queries_or_keys(target: Target, sizes: tuple[int, int], length: int) -> None:
    for packed in (False, True):
        call = small_call(target, packed=packed, sizes=[sizes], length=length)
        check_listed(call)
        got = call.got()
        assert not got["out"].any()
        assert (got["lse"] == -torch.inf).all()


@pytest.mark.parametrize("length", [0, 3])
def test_infinite_sinks_of_rows_without_keys(target: Target, length: int) -> None:
    call = small_call(target, length=length, sizes=[(4, 9)])
    call.indices.fill_(-1)
    call.tensors["sink"][:2] = torch.tensor([-torch.inf, torch.inf])
    got = call.got()
    for name in ("out", "dquery", "dkey", "dvalue", "dattn_bias", "dindex_bias", "dsink"):
        assert not got[name].count_nonzero(), name


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"key_indices": torch.zeros(2, 1, 5, 3).long()},
        TypeError,
        r"key_indices .*int32, got .*int64",
    ),
    ({"key_indices": [1]}, TypeError, r"key_indices must be a torch.Tensor, got list"),
    (
        {"key_indices": zeros(2, 4, 5, 3, dtype=torch.int32)},
        ValueError,
        r"key_indices must have shape \(B, \{Hk\|1\}, Q, k\) = \(2, \{2\|1\}, 5, any k\), "
        r"got \(2, 4, 5, 3\)",
    ),
    ({"key_indices": zeros(1, 1, 5, 3, dtype=torch.int32)}, ValueError, r"key_indices must have"),
    ({"key_indices": zeros(2, 5, 3, dtype=torch.int32)}, ValueError, r"key_indices must have"),
    (
        {"key_indices": None, "index_bias": randn(2, 1, 5, 3)},
        ValueError,
        r"index_bias .*key_indices",
    ),
    (
        {"index_bias": randn(2, 3, 5, 3)},
        ValueError,
        r"index_bias must have shape .*got \(2, 3, 5, 3\)",
    ),
    ({"index_bias": randn(2, 1, 5, 4)}, ValueError, r"index_bias must have shape .*5, 3\), got"),
    ({"index_bias": zeros(2, 1, 5, 3)}, TypeError, r"index_bias .*got torch.bool"),
    ({"attn_bias": randn(2, 1, 5, 7)}, ValueError, r"attn_bias must be the same for every query"),
    ({"attn_bias": randn(2, 8)}, ValueError, r"attn_bias with 2 dimensions"),
    ({"attn_mask": zeros(2, 7)}, ValueError, r"key_indices cannot be combined with attn_mask:"),
    ({"window_size": 0, "keep_last": 2}, ValueError, r"combined with window_size, keep_last:"),
    ({"keep_first": 1}, ValueError, r"combined with keep_first:"),
    ({"keep_last": zeros(2)}, TypeError, r"keep_last must be an integer, got .*tensor of shape"),
    ({"return_attn_probs": True}, ValueError, r"combined with return_attn_probs:"),
    ({"backend": "cudnn"}, ValueError, r"backend must be"),
    ({"is_causal": 2}, TypeError, r"is_causal must be"),
    ({"softmax_scale": "1"}, TypeError, r"softmax_scale must be"),
    ({"sink": randn(3)}, ValueError, r"sink has shape \(3,\)"),
    ({"value": randn(2, 6, 2, 8)}, ValueError, r"value has shape"),
    ({"value": randn(2, 7, 2, 577)}, ValueError, r"value has shape .*577\), .* from 1 to 576"),
]


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(
    target: Target, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    indices = {"key_indices": zeros(2, 1, 5, 3, dtype=torch.int32)}
    arguments = on_device(target, dense(target, **{**indices, **changes}))
    with pytest.raises(error, match=text):
        flash_dmattn.flash_dmattn_func(**arguments)


def test_refusals_of_packed_calls(target: Target) -> None:
    lists = zeros(1, 10, 3, dtype=torch.int32)
    for changes, text in (
        ({"key_indices": lists[:, 1:]}, r"\(\{Hk\|1\}, total_q, k\) = \(\{2\|1\}, 10, any k\)"),
        ({"key_indices": lists.unsqueeze(0)}, r"key_indices must have shape"),
        (
            {"index_bias": randn(1, 10, 2)},
            r"index_bias must have shape .*10, 3\), got \(1, 10, 2\)",
        ),
        ({"attn_bias": randn(1, 10, 6)}, r"attn_bias must be the same for every query"),
        ({"attn_mask": zeros(1, 1, 10)}, r"combined with attn_mask"),
    ):
        arguments = on_device(target, varlen(target, **{"key_indices": lists, **changes}))
        with pytest.raises(ValueError, match=text):
            flash_dmattn.flash_dmattn_varlen_func(**arguments)


def test_a_plan_is_refused(target: Target) -> None:
    given = on_device(target, dense(target, key_indices=zeros(2, 1, 5, 3, dtype=torch.int32)))
    query, key = (given[name].bfloat16() for name in ("query", "key"))
    plan = flash_dmattn.make_plan(query, key, zeros(2, 7).to(target.device))
    with pytest.raises(ValueError, match="combined with plan"):
        flash_dmattn.flash_dmattn_func(**given, plan=plan)


def test_bound_functions_take_lists() -> None:
    bound = flash_dmattn.flash_dmattn_func_auto("reference")
    x = randn(1, 6, 2, 8)
    lists = zeros(1, 1, 6, 3, dtype=torch.int32)
    torch.testing.assert_close(bound(x, x, x, key_indices=lists), x[:, :1].expand(x.shape))
