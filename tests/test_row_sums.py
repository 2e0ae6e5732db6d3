# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of a row's scores sum to 0, even if out is rounded to 16 bit.

The sum is as exact as the backward pass's knowledge of the unrounded out. Sums of the gradient of a
bias per key, such as gradients of gates, collect the errors of all rows. Here dout points along the
rounding remainder of out, so no two rows cancel. All probabilities of a row are alike, so they
round alike.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import (
    IntervalMask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    loader,
    make_plan,
)
from flash_dmattn.backends import torch_memory
from flash_dmattn.key_lists import ops as list_ops
from support import HALF_TYPES, Target, core_without_allocator, randn


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of a call; those of each sequence, if they are packed."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    batch: int = 1
    causal: bool = True
    packed: bool = False
    mask: str = "none"
    shares_bias: bool = False  # the heads of a group share the bias

    @property
    def bias_heads(self) -> int:
        return self.kv_heads if self.shares_bias else self.heads

    def kept(self, sequence: int = 0) -> Tensor:
        """Return the pairs that a sequence's rows keep."""
        queries, keys = self.queries[sequence], self.keys[sequence]
        row, key = torch.arange(queries)[:, None], torch.arange(keys)
        kept = torch.ones(queries, keys, dtype=torch.bool)
        if self.causal:
            kept &= key <= row + keys - queries
        if self.mask == "keys":
            kept &= key % 3 > 0
        elif self.mask == "intervals":
            kept &= row < key + 40
        elif self.mask == "window":  # with equal biases the first keys are selected
            kept &= key < 30
        elif self.mask == "lists":
            kept &= key % 4 > 0
        return kept


CASES = {
    "usual": Case((70,), (130,)),
    "heads alone": Case((70,), (130,), 2),
    "heads of a group": Case((40,), (130,), shares_bias=True),
    "all keys": Case((70,), (130,), causal=False),
    "more keys": Case((30,), (700,), 2),
    "keys of a mask": Case((70,), (130,), 2, mask="keys"),
    "intervals": Case((130,), (130,), 2, batch=2, mask="intervals"),
    "more keys of a mask": Case((30,), (700,), 2, mask="keys"),
    "splits": Case((20,), (900,), 2, 1),
    "splits of heads of a group": Case((20,), (900,), 2, 1, shares_bias=True),
    "decoding": Case((5,), (900,)),
    "decoding heads of a group": Case((5,), (900,), shares_bias=True),
    "one query": Case((1,), (90,)),
    "one query of a group": Case((1,), (90,), 8, shares_bias=True),
    "head dimension 40": Case((70,), (130,), head_dim=40),
    "head dimension 44": Case((70,), (130,), head_dim=44),
    "head dimension 44 decoding": Case((5,), (900,), head_dim=44),
    "head dimension 128": Case((70,), (130,), 2, head_dim=128),
    "head dimension 128 of a mask": Case((70,), (130,), 2, head_dim=128, mask="keys"),
    "head dimension 192": Case((70,), (130,), 2, head_dim=192, mask="keys"),
    "head dimension 256": Case((70,), (130,), 2, head_dim=256),
    "many heads": Case((130,), (130,), 32, 32),
    "packed": Case((40, 0, 90), (50, 10, 90), packed=True),
    "packed few": Case((4, 1, 9), (30, 10, 90), packed=True),
    "window": Case((130,), (130,), mask="window"),
    "lists": Case((40,), (130,), mask="lists"),
    "lists of heads of a group": Case((40,), (130,), 12, 2, mask="lists", shares_bias=True),
    "lists of 32 heads": Case((9,), (130,), 32, 1, mask="lists"),
    "lists of 64 heads": Case((9,), (130,), 64, 1, mask="lists"),
    "lists of 64 heads of 128": Case((9,), (130,), 64, 1, head_dim=128, mask="lists"),
    "lists, head dimension 44": Case((9,), (130,), 20, 1, head_dim=44, mask="lists"),
    "packed lists": Case((40, 0, 90), (50, 10, 90), packed=True, mask="lists"),
}
WAYS = ("core", "plan", "torch's memory", "older torch", "compiled")


def results(
    case: Case, dtype: torch.dtype, target: Target, way: str = "core"
) -> tuple[Tensor, Tensor]:
    """Return the float64 out minus the rounded out, and the bias gradient."""
    form = (sum(case.queries),) if case.packed else (case.batch, *case.queries)
    key_form = (sum(case.keys),) if case.packed else (case.batch, *case.keys)
    device, group = target.device, case.heads // case.kv_heads
    value = (randn(*key_form, case.kv_heads, case.head_dim, seed=1) + 1).to(dtype)
    key = randn(*key_form, case.kv_heads, case.head_dim, seed=2).to(dtype)
    tensors = [torch.zeros(*form, case.heads, case.head_dim, dtype=dtype), key, value]
    bias = torch.zeros(
        *key_form[:-1], case.bias_heads, 1, key_form[-1], device=device
    ).requires_grad_()
    options: dict[str, Any] = {"is_causal": case.causal, "backend": target.backend}
    mask: Any = None
    if case.mask == "keys":
        mask = (torch.arange(*case.keys) % 3 > 0).expand(case.batch, -1)
    elif case.mask == "intervals":
        first = torch.arange(*case.keys, dtype=torch.int32)
        start = torch.zeros_like(first) if not case.causal else first
        shape = (case.batch, 1, -1)
        mask = IntervalMask(start.expand(shape), (first + 40).expand(shape))
    elif case.mask == "window":
        options["window_size"] = 30
    elif case.mask == "lists":
        key = torch.arange(max(case.keys), dtype=torch.int32).flip(0)
        lists = torch.cat(
            [
                torch.where((key < keys) & (key % 4 > 0), key, -1).expand(queries, -1)
                for queries, keys in zip(case.queries, case.keys, strict=True)
            ]
        ).to(device)
        shape = (1, -1, -1) if case.packed else (case.batch, 1, -1, -1)
        options["key_indices"] = lists.expand(shape)
    query, key, value = (tensor.to(device) for tensor in tensors)
    mask = None if mask is None else mask.to(device)
    call: Any = flash_dmattn_func
    if case.packed:
        call = flash_dmattn_varlen_func
        for name, lengths in (("q", case.queries), ("k", case.keys)):
            ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
            options |= {f"cu_seqlens_{name}": ends, f"max_seqlen_{name}": max(lengths)}
    if way == "plan":
        given = {name: option for name, option in options.items() if name != "window_size"}
        options["plan"], mask = make_plan(query, key, mask, **given), None
    elif way == "compiled":
        call = torch.compile(call, backend="aot_eager")
    out = call(query, key, value, attn_mask=mask, attn_bias=bias, **options)
    exact = torch.zeros(out.shape, dtype=torch.float64)
    row = column = 0
    for number, (queries, keys) in enumerate(zip(case.queries, case.keys, strict=True)):
        kept = case.kept(number).double()
        kept = kept / kept.sum(1, keepdim=True).clamp(min=1)
        rows, columns = slice(row, row + queries), slice(column, column + keys)
        values = tensors[2][..., columns, :, :].double().repeat_interleave(group, -2)
        exact[..., rows, :, :] = torch.einsum("qk,...khd->...qhd", kept, values)
        row, column = rows.stop, columns.stop
    left = exact - out.detach().cpu().double()
    (dbias,) = torch.autograd.grad(out, bias, left.sign().to(device, dtype))
    return left, dbias.cpu().double()


def check(case: Case, dtype: torch.dtype, target: Target, way: str = "core") -> None:
    left, dbias = results(case, dtype, target, way)
    # The sums of each head if delta came from the rounded out.
    missing = left.abs().sum((-3, -1)).unflatten(-1, (case.bias_heads, -1)).sum(-1)
    assert missing.min() > 1e-4
    sums = dbias.sum((-2, -1)).abs()
    # Triton's interpreter truncates to bfloat16 instead of rounding, which leaves a larger error.
    share = 256 if target.backend == "triton" else 1000
    assert (sums <= missing / share).all(), f"{sums} of {missing}"


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_row_sum_to_zero(
    name: str, dtype: torch.dtype, kernel_target: Target
) -> None:
    if kernel_target.backend == "flex":
        pytest.skip("FlexAttention's backward pass has out as it rounds it")
    case = CASES[name]
    if case.head_dim > kernel_target.most_head_dim:
        pytest.skip("the pack was built for smaller heads")
    check(case, dtype, kernel_target)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["usual", "keys of a mask", "intervals", "packed", "window", "lists"]
)
def test_on_every_way_to_the_kernels(
    name: str, way: str, pack_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if way == "plan" and name in ("window", "lists"):
        pytest.skip("a call with a plan selects and lists nothing")
    if way == "older torch":
        monkeypatch.setattr(torch_memory, "CORE_READS_TENSORS", False)
    if way in ("torch's memory", "older torch"):
        with core_without_allocator():
            check(case, torch.bfloat16, pack_target, way)
    else:
        check(case, torch.bfloat16, pack_target, way)


def test_lists_of_a_graph_without_gradients(
    pack_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_ops, "is_recorded", lambda _: False)
    check(CASES["lists"], torch.bfloat16, pack_target)


# Calls that keep the residual of out have aligned rows and no bias per query, unlike `general`'s.
KERNELS = {"usual", "decode", "direct"}
HOPPER_KERNELS = KERNELS | {"persistent", "boxes", "small_tiles", "small_boxes"}


def test_cases_take_every_forward_kernel(pack_target: Target) -> None:
    if not pack_target.has_kernels_of_gpu:
        pytest.skip("the cpu pack has no kernels")
    pack = loader.pack_for(pack_target.device)
    before = Counter(pack.launch_counts)
    for case in CASES.values():
        if case.head_dim <= pack_target.most_head_dim:
            results(case, torch.float16, pack_target)
    taken = Counter(pack.launch_counts) - before
    ways = [way for way in taken if way.startswith("forward: ")]
    kernels = {way.removeprefix("forward: ").partition(" + ")[0] for way in ways}
    wanted = HOPPER_KERNELS if "wgmma" in pack.features else KERNELS
    assert kernels >= wanted
    assert any("splits" in way for way in ways)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_the_gradient_of_a_sink(dtype: torch.dtype, listed: bool, pack_target: Target) -> None:
    """It is a sum over rows, each with the rounding remainder of out."""
    rows, keys, heads = 200, 37, 2
    query, key = torch.zeros(1, rows, heads, 64), torch.zeros(1, keys, heads, 64)
    value, sink = randn(1, keys, heads, 64, seed=1).to(dtype), torch.tensor([0.0, 2.0])
    weight = 1 / (keys + sink.exp().double())
    exact = (value.double().sum(1) * weight[:, None]).expand(rows, -1, -1)
    left = exact - exact.to(dtype).double()
    dout = left.sign().to(dtype)
    given = (t.to(pack_target.device, dtype) for t in (query, key, value))
    leaf = sink.to(pack_target.device).requires_grad_()
    lists = torch.arange(keys, dtype=torch.int32, device=leaf.device).expand(1, 1, rows, -1)
    options = {"key_indices": lists} if listed else {}
    out = flash_dmattn_func(*given, sink=leaf, backend=pack_target.backend, **options)
    (got,) = torch.autograd.grad(out, leaf, dout[None].to(out.device))
    share = sink.exp().double() * weight
    want = -share * (dout.double() * exact).sum((0, 2))
    missing = share * (dout.double() * left).sum((0, 2))
    assert ((got.double().cpu() - want).abs() < missing / 10).all()
