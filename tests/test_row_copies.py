# SPDX-License-Identifier: BSD-3-Clause
"""Rows that kernels of GPUs cannot copy 16 bytes at a time: copies of them give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import (
    IntervalMask,
    _core,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    loader,
    record,
)
from flash_dmattn.backends import torch_memory
from good_arguments import on_device
from support import Target, core_without_allocator, rand_bool, randn

NAMES = ("query", "key", "value")
BOUNDS = torch.tensor([0, 60, 61, 150], dtype=torch.int32)
PACKED = {
    "cu_seqlens_q": BOUNDS,
    "cu_seqlens_k": BOUNDS,
    "max_seqlen_q": 89,
    "max_seqlen_k": 89,
    "is_causal": True,
}
# Options of a call of 150 queries and keys, or of one query.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"is_causal": True},
    "bias and sink": {"attn_bias": randn(2, 2, 1, 150), "sink": randn(4)},
    "selection": {"attn_bias": randn(2, 2, 1, 150), "window_size": 40, "is_causal": True},
    "bias per query": {"attn_bias": randn(1, 2, 150, 150), "softcap": 3.0},
    "mask per query": {"attn_mask": rand_bool(2, 2, 150, 150)},
    "intervals": {"attn_mask": IntervalMask.sliding_window(20, 3, 150, 150)},
    "lists": {"key_indices": torch.randint(-9, 160, (2, 1, 150, 30), dtype=torch.int32)},
    "lists with a bias": {
        "key_indices": torch.randint(-9, 160, (2, 2, 150, 30), dtype=torch.int32),
        "attn_bias": randn(2, 2, 1, 150),
        "index_bias": randn(2, 2, 150, 30),
    },
    "packed": PACKED,
    "packed selection": PACKED | {"attn_bias": randn(2, 1, 150), "window_size": 20},
    "one query": {"is_causal": True, "attn_mask": rand_bool(2, 150)},
}
# Forms of a tensor with the same values.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns apart": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "one element behind": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "columns last but one": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "rows last": lambda t: t.movedim(-3, -1).contiguous().movedim(-1, -3),
}


def states_of(call: str, target: Target, head_dim: int) -> dict[str, Tensor]:
    rows: tuple[int, ...] = (150,) if "cu_seqlens_q" in CALLS[call] else (2, 150)
    queries = (2, 1) if call == "one query" else rows
    shapes = {"query": (*queries, 4, head_dim), "key": (*rows, 2, head_dim)}
    shapes["value"] = shapes["key"]
    made = {name: randn(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    return on_device(target, made)


def results(
    target: Target, call: str, states: dict[str, Tensor], dout: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Return out, lse and the gradients; gradients of lists have no fixed order."""
    given = on_device(target, CALLS[call]) | options
    ordered = {} if "lists" in call else {"deterministic": True}
    function = flash_dmattn_varlen_func if "cu_seqlens_q" in given else flash_dmattn_func
    leaves = {name: state.detach().requires_grad_() for name, state in states.items()}
    if "attn_bias" in given:
        leaves["attn_bias"] = given["attn_bias"].detach().requires_grad_()
    out, lse = function(**{**given, **leaves}, **ordered, return_lse=True, backend=target.backend)
    return (out, lse, *torch.autograd.grad(out, list(leaves.values()), dout))


def assert_same(call: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    tolerance = 2e-2 if "lists" in call else 0.0
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        *(("bias and sink", rows) for rows in ROWS if rows != "columns apart"),
        *((call, "columns apart") for call in CALLS),
    ],
)
def test_rows_of_any_form(pack_target: Target, call: str, rows: str) -> None:
    states = states_of(call, pack_target, 32)
    dout = randn(*states["query"].shape, seed=7).to(states["query"])
    wanted = results(pack_target, call, states, dout)
    others = {name: ROWS[rows](state) for name, state in states.items()}
    assert_same(call, results(pack_target, call, others, ROWS[rows](dout)), wanted)
    assert_same(call, results(pack_target, call, states, ROWS[rows](dout)), wanted)
    with core_without_allocator():
        assert_same(call, results(pack_target, call, others, dout), wanted)


@pytest.mark.parametrize("call", CALLS)
def test_an_expanded_gradient(pack_target: Target, call: str) -> None:
    states = states_of(call, pack_target, 32)
    ones = torch.ones_like(states["query"])
    wanted = results(pack_target, call, states, ones)
    assert_same(call, results(pack_target, call, states, ones.new_ones(()).expand_as(ones)), wanted)


@pytest.mark.parametrize(
    ("call", "head_dim", "rows"),
    [("plain", 1, None), ("plain", 31, "columns apart"), *((c, 20, "rows last") for c in CALLS)],
)
def test_head_dimensions_between_multiples_of_eight(
    pack_target: Target, call: str, head_dim: int, rows: str | None
) -> None:
    states = states_of(call, pack_target, head_dim)
    dout = randn(*states["query"].shape, seed=7).to(states["query"])
    scale = {"softmax_scale": head_dim**-0.5}
    padding = (0, -head_dim % 8)
    padded = {name: torch.nn.functional.pad(state, padding) for name, state in states.items()}
    padded_dout = torch.nn.functional.pad(dout, padding)
    if rows is not None:
        states, dout = {n: ROWS[rows](state) for n, state in states.items()}, ROWS[rows](dout)
    found = results(pack_target, call, states, dout, **scale)
    wanted = results(pack_target, call, padded, padded_dout, **scale)
    cut = [t if t.shape[-1] != padded_dout.shape[-1] else t[..., :head_dim] for t in wanted]
    if pack_target.has_kernels_of_gpu:
        assert_same(call, found, tuple(cut))
    for one, other in zip(found, cut, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [16, 20])
def test_compiled_calls(pack_target: Target, head_dim: int) -> None:
    states = states_of("bias and sink", pack_target, head_dim)
    options = on_device(pack_target, CALLS["bias and sink"])
    leaves = [ROWS["columns apart"](state).requires_grad_() for state in states.values()]

    def call(*leaves: Tensor) -> Tensor:
        return flash_dmattn_func(
            *leaves, **options, is_causal=True, deterministic=True, backend=pack_target.backend
        )

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    (got, *got_gradients), (want, *want_gradients) = (
        (out, *torch.autograd.grad(out.square().sum(), leaves))
        for out in (compiled(*leaves), call(*leaves))
    )
    for one, other in zip((got, *got_gradients), (want, *want_gradients), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize("head_dim", [15, 16])
@pytest.mark.parametrize("queries", [1, 16, 17])
def test_few_queries_copy_no_keys(
    pack_target: Target, queries: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loader.pack_for(pack_target.device).row_bytes == 1:
        pytest.skip("the pack reads any rows")
    copies, copy = [], torch_memory._with_readable_rows

    def recording(pack: _core.Pack, tensor: Tensor) -> Tensor:
        copies.append(tensor.shape)
        return copy(pack, tensor)

    monkeypatch.setattr(torch_memory, "_with_readable_rows", recording)
    dtype, device = pack_target.dtypes[-1], pack_target.device
    query, key, value = (
        ROWS["columns apart"](randn(1, rows, 2, head_dim, dtype=dtype)).to(device)
        for rows in (queries, 500, 500)
    )
    options = {"backend": pack_target.backend}
    lists = torch.arange(9, dtype=torch.int32, device=device).expand(1, 1, queries, 9)
    out = flash_dmattn_func(query, key, value, **options)
    listed = flash_dmattn_func(query, key, value, key_indices=lists, **options)
    assert len(copies) == (3 if queries > 16 else 0)
    plain = [tensor.contiguous() for tensor in (query, key, value)]
    want = flash_dmattn_func(*plain, **options)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    want = flash_dmattn_func(*plain, key_indices=lists, **options)
    torch.testing.assert_close(listed, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [16, 20])
def test_the_attention_of_each_key_and_a_plan(pack_target: Target, head_dim: int) -> None:
    states = states_of("plain", pack_target, head_dim)
    mask = rand_bool(2, 150).to(pack_target.device)
    found = []
    for rows in ("columns apart", None):
        given = [state if rows is None else ROWS[rows](state) for state in states.values()]
        plan = flash_dmattn.make_plan(*given[:2], mask, backend=pack_target.backend)
        options = {"backend": pack_target.backend, "is_causal": True}
        found.append(flash_dmattn_func(*given, mask, return_key_mass=True, **options))
        found[-1] += (flash_dmattn_func(*given, plan=plan, backend=pack_target.backend),)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize("columns", [15, 17, 24])
@pytest.mark.parametrize("name", ["dout", "out"])
def test_gradients_of_a_wrong_width_are_refused(
    pack_target: Target, name: str, columns: int
) -> None:
    query, key, value = states_of("plain", pack_target, 20).values()
    inputs = record.AttentionInputs(query, key, value, scale=0.2)
    out, lse = flash_dmattn_func(
        query, key, value, return_lse=True, softmax_scale=0.2, backend=pack_target.backend
    )
    tensors = {"dout": torch.ones_like(out), "out": out}
    tensors[name] = out.new_ones((*out.shape[:-1], columns))
    kept = out.new_empty(0, dtype=torch.uint8)
    wanted = [field == "query" for field in record.ATTENTION.differentiable]
    words = f"{name} has shape .* {columns}\\), but must have shape .* 20\\)"
    with pytest.raises(ValueError, match=words):
        torch.ops.flash_dmattn.attention_backward(
            tensors["dout"], None, tensors["out"], lse, kept, *inputs, pack_target.backend, *wanted
        )


@pytest.mark.parametrize("bounds", [(0,), (0, 150), (0, 0, 150)], ids=str)
def test_pages_of_no_keys(pack_target: Target, bounds: tuple[int, ...]) -> None:
    """Such a block_table has no memory."""
    states = states_of("packed", pack_target, 32)
    query = ROWS["columns apart"](states["query"][: bounds[-1]])
    key, value = (
        ROWS["columns apart"](states[name].view(15, 10, 2, 32)) for name in ("key", "value")
    )
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=query.device)
    table = cu_seqlens.new_zeros(len(bounds) - 1, 0)
    given = {"block_table": table, "max_seqlen_q": 150, "max_seqlen_k": 0}
    bounds_of = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": torch.zeros_like(cu_seqlens)}
    out, lse = flash_dmattn_varlen_func(
        query, key, value, **bounds_of, **given, return_lse=True, backend=pack_target.backend
    )
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("name", [*NAMES, "dout", "out"])
def test_the_pack_refuses_rows_that_it_cannot_copy(pack_target: Target, name: str) -> None:
    """The core copies such rows before."""
    pack = loader.pack_for(pack_target.device)
    if pack.row_bytes == 1:
        pytest.skip("the pack reads any rows")
    tensors = states_of("plain", pack_target, 16)
    tensors["dout"], tensors["out"] = (torch.zeros_like(tensors["query"]) for _ in range(2))
    lse = torch.zeros(2, 4, 150, device=pack_target.device)
    tensors[name] = ROWS["columns apart"](tensors[name])
    dout, out = tensors.pop("dout"), tensors.pop("out")
    stream = torch_memory._stream(out)
    problem = _core.Problem(pack, **tensors, scale=0.25, causal=True, stream=stream)
    assert problem.needs_row_copies(True) is (name in NAMES)
    size = problem.backward_workspace_bytes
    workspace = torch.empty(size, dtype=torch.uint8, device=pack_target.device)
    words = f"rows of {name[0] if name in NAMES else name} cannot be copied 16 bytes at a time"
    with pytest.raises(ValueError, match=words):
        problem.backward(dout, None, out, lse, {"query": torch.empty_like(out)}, None, workspace)


def test_compiled_lists_of_queries_that_data_choose(pack_target: Target) -> None:
    """The size of what such a call keeps has no number until the call runs."""
    states = states_of("packed", pack_target, 32)
    query, key, value = (state[:40].requires_grad_() for state in states.values())
    chosen = torch.arange(40, device=query.device) % 3 == 0
    lists = torch.arange(40, dtype=torch.int32, device=query.device).expand(1, 40, 40)
    bias = randn(1, 1, 40).to(query.device)
    bounds = {
        "cu_seqlens_q": torch.tensor([0, 14], dtype=torch.int32, device=query.device),
        "cu_seqlens_k": torch.tensor([0, 40], dtype=torch.int32, device=query.device),
        "max_seqlen_q": 14,
        "max_seqlen_k": 40,
    }

    def call(query: Tensor, chosen: Tensor) -> Tensor:
        rows = chosen.nonzero()[:, 0]
        options = {"key_indices": lists[:, rows], "attn_bias": bias, "backend": pack_target.backend}
        return flash_dmattn_varlen_func(query[rows], key, value, **bounds, **options)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
        out = compiled(query, chosen)
    torch.testing.assert_close(out, call(query, chosen), atol=0, rtol=0)
    out.sum().backward()
    assert query.grad is not None
