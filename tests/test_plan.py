# SPDX-License-Identifier: BSD-3-Clause
"""Plans for several calls: equal results, and refusal where a plan does not fit."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_dmattn import (
    AttentionPlan,
    IntervalMask,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
)
from support import Target, rand_bool, randn

KINDS = ["none", "keys", "rows", "intervals", "expanded"]


def tensors(target: Target, *, seed: int = 0, requires_grad: bool = False) -> list[Tensor]:
    """Return query, key, value and bias."""
    shapes = [(2, 70, 4, 16), (2, 90, 2, 16), (2, 90, 2, 16), (2, 2, 1, 90)]
    return [
        randn(*shape, dtype=target.dtypes[0], seed=seed + n)
        .to(target.device)
        .requires_grad_(requires_grad)
        for n, shape in enumerate(shapes)
    ]


def refused(text: str) -> AbstractContextManager[object]:
    return pytest.raises(ValueError, match=text)


def make_mask(kind: str, target: Target) -> Tensor | IntervalMask | None:
    if kind == "keys":
        return rand_bool(2, 90).to(target.device)
    if kind == "rows":
        return rand_bool(1, 4, 70, 90).to(target.device)
    if kind == "expanded":
        return rand_bool(2, 1, 1, 90).to(target.device).expand(2, 4, 70, 90)
    if kind == "intervals":
        return dynamic_mask(
            randn(2, 2, 90, seed=9).to(target.device),
            20,
            True,
            query_length=70,
            backend=target.backend,
        )
    return None


def gradients(inputs: list[Tensor], mask: object, target: Target, **options: object):
    query, key, value, bias = inputs
    out, lse = flash_dmattn_func(
        query, key, value, mask, bias, return_lse=True, backend=target.backend, **options
    )
    loss = (out.float() ** 2).sum() + lse.masked_fill(lse.isinf(), 0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_several_calls_share_a_plan(kind: str, causal: bool, target: Target) -> None:
    """Forward and backward, with other values, biases and head dimensions."""
    mask = make_mask(kind, target)
    query, key = tensors(target)[:2]
    plan = make_plan(query, key, mask, causal, backend=target.backend)
    for seed, head_dim in ((0, 16), (20, 16), (40, 8)):
        inputs = tensors(target, seed=seed)
        inputs = [t[..., :head_dim] for t in inputs[:3]] + inputs[3:]
        inputs = [t.detach().requires_grad_() for t in inputs]
        got = gradients(inputs, None, target, plan=plan, deterministic=True)
        want = gradients(inputs, mask, target, is_causal=causal, deterministic=True)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)
        with torch.no_grad():
            again = flash_dmattn_func(
                *(t.detach() for t in inputs[:3]), mask, inputs[3], plan=plan, is_causal=causal
            )
        assert torch.equal(again, got[0])


def test_backward_keeps_the_plan_and_no_copy(target: Target) -> None:
    inputs = tensors(target, requires_grad=True)
    plan = make_plan(*inputs[:2], make_mask("keys", target), backend=target.backend)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = flash_dmattn_func(*inputs[:3], attn_bias=inputs[3], plan=plan)
    kept = [t for t in saved if t.dtype == torch.uint8 and t.numel()]
    own = plan._columns.data_ptr()
    plans, others = (
        [t for t in kept if (t.data_ptr() == own) is is_own] for is_own in (True, False)
    )
    # Beside the plan there is only the rounding remainder of out.
    low = 0 if out.dtype == torch.float32 else -(-out.nbytes // 256) * 256
    assert sum(t.numel() for t in others) <= low
    assert len(plans) == (1 if plan.columns.numel() else 0)
    assert plans or not target.is_pack


@pytest.mark.parametrize("paged", [False, True])
def test_packed_sequences_share_a_plan(paged: bool, target: Target) -> None:
    dtype, page = target.dtypes[0], 30
    bounds_q = torch.tensor([0, 1, 41, 50], dtype=torch.int32, device=target.device)
    bounds_k = torch.tensor([0, 30, 60, 120], dtype=torch.int32, device=target.device)
    query = randn(50, 4, 16, dtype=dtype).to(target.device)
    key, value = (randn(120, 2, 16, dtype=dtype, seed=s).to(target.device) for s in (1, 2))
    mask = rand_bool(2, 1, 120).to(target.device)
    table = None
    if paged:
        key, value = (t.view(4, page, 2, 16) for t in (key, value))
        table = torch.tensor([[0, 0], [1, 0], [2, 3]], dtype=torch.int32, device=target.device)
    packing = (bounds_q, bounds_k, 40, 60)
    plan = make_plan(
        query,
        key,
        mask,
        True,
        cu_seqlens_q=bounds_q,
        cu_seqlens_k=bounds_k,
        max_seqlen_q=40,
        max_seqlen_k=60,
        block_table=table,
        backend=target.backend,
    )
    settings = {"block_table": table, "backend": target.backend}
    for scale in (0.3, 1.0):
        got = flash_dmattn_varlen_func(query, key, value, *packing, scale, plan=plan, **settings)
        want = flash_dmattn_varlen_func(
            query, key, value, *packing, scale, True, attn_mask=mask, **settings
        )
        assert torch.equal(got, want)
    with refused("cu_seqlens_k must be the very tensor that plan was made"):
        flash_dmattn_varlen_func(
            query, key, value, bounds_q, bounds_k.clone(), 40, 60, plan=plan, block_table=table
        )
    with refused("max_seqlen_k is 70, but plan was made for 60"):
        flash_dmattn_varlen_func(
            query, key, value, bounds_q, bounds_k, 40, 70, plan=plan, block_table=table
        )
    with refused("plan was made for packed.*pass it to flash_dmattn_varlen"):
        flash_dmattn_func(query[None], query[None], query[None], plan=plan)
    if paged:
        return
    with refused("block_table is a tensor, unlike in the make_plan"):
        flash_dmattn_varlen_func(
            query,
            key.view(4, page, 2, 16),
            value.view(4, page, 2, 16),
            *packing,
            plan=plan,
            block_table=torch.zeros(3, 1, dtype=torch.int32, device=target.device).expand(3, 4),
        )
    bounds_k.add_(0)
    with refused("cu_seqlens_k was changed in place after plan was made"):
        flash_dmattn_varlen_func(query, key, value, *packing, plan=plan)


def test_refuses_what_it_was_not_made_for(target: Target) -> None:
    query, key, _, bias = tensors(target)
    mask = make_mask("keys", target)
    plan = make_plan(query, key, mask, backend=target.backend)

    def call(q: Tensor = query, k: Tensor = key, m: object = None, **options: object) -> None:
        flash_dmattn_func(q, k, k, m, **{"plan": plan, **options})

    again = r"; make another with make_plan"
    with refused(rf"query.shape\[1\] is 69, but plan was made for 70{again}"):
        call(query[:, :69])
    with refused(r"query.shape\[0\] is 1, but plan was made for 2"):
        call(query[:1], key[:1])
    with refused(r"query.shape\[2\] is 2, but plan was made for 4"):
        call(query[:, :, :2])
    with refused(r"key.shape\[1\] is 80, but plan was made for 90"):
        call(k=key[:, :80])
    with refused(r"key.shape\[2\] is 1, but plan was made for 2"):
        call(k=key[:, :, :1])
    with refused("is_causal is True, but plan was made for False"):
        call(is_causal=True)
    with refused(r"attn_mask must be None or the very mask .*\(2, 90\), got"):
        call(m=mask.clone())
    with refused("window_size must be None with a plan, got 5"):
        call(window_size=5, attn_bias=bias)
    other = "cpu" if target.backend != "cpu" else "reference"
    with refused(f"backend is '{other}', but plan was made for '{target.backend}'"):
        call(backend=other)
    with pytest.raises(TypeError, match="plan must be an AttentionPlan of make_plan or None, got"):
        call(plan=3)
    bounds = torch.tensor([0, 140], dtype=torch.int32, device=target.device)
    with refused("plan was made for dense.*pass it to flash_dmattn_func"):
        flash_dmattn_varlen_func(
            query.flatten(0, 1), query.flatten(0, 1), query.flatten(0, 1), bounds, bounds, 140, 140,
            plan=plan,
        )  # fmt: skip
    with torch.device("meta"):
        elsewhere = [torch.empty(t.shape, dtype=t.dtype) for t in (query, key)]
    with refused("query is on meta, but plan was made on"):
        call(*elsewhere)
    mask[0, 0] = ~mask[0, 0]
    with refused(rf"attn_mask was changed in place after plan was.*{again}"):
        call()


def test_interval_masks_are_watched_too(target: Target) -> None:
    query, key, value, _ = tensors(target)
    mask = make_mask("intervals", target)
    plan = make_plan(query, key, mask, backend=target.backend)
    same = IntervalMask(mask.start, mask.end)
    flash_dmattn_func(query, key, value, same, plan=plan)
    with refused(r"the very mask .*IntervalMask\(shape=\(2, 2, 90\)"):
        flash_dmattn_func(query, key, value, mask & mask, plan=plan)
    mask.end.clamp_(max=30)
    with refused("attn_mask.end was changed in place"):
        flash_dmattn_func(query, key, value, plan=plan)


def test_make_plan_refuses(target: Target) -> None:
    query, key, _, _ = tensors(target)
    bounds = torch.tensor([0, 70], dtype=torch.int32, device=target.device)
    settings = {"backend": target.backend}
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, got list"):
        make_plan([1], key, **settings)
    with refused(r"query and key must have shape \(B, rows, heads, D\), got"):
        make_plan(query[0], key, **settings)
    with refused(r"attn_mask with 2 dimensions must have shape \(B, K\) ="):
        make_plan(query, key, rand_bool(2, 80).to(target.device), **settings)
    with refused("attn_mask"):
        make_plan(query, key, rand_bool(3, 1, 70, 90).to(target.device), **settings)
    with pytest.raises(TypeError, match=r"attn_mask must have dtype torch\.bool"):
        make_plan(query, key, torch.ones(2, 90, device=target.device), **settings)
    with refused("query_length=70 cannot mask 60 queries"):
        make_plan(query[:, :60], key, make_mask("intervals", target), **settings)
    with refused("cu_seqlens_k must be given too: packed sequences need"):
        make_plan(query[0], key[0], cu_seqlens_q=bounds, **settings)
    with refused("cu_seqlens_q must be given too"):
        make_plan(query[0], key, block_table=bounds[None], **settings)


def test_plans_of_inference_mode(target: Target) -> None:
    with torch.inference_mode():
        query, key, value, bias = tensors(target)
        mask = make_mask("keys", target)
        plan = make_plan(query, key, mask, backend=target.backend)
        got = flash_dmattn_func(query, key, value, attn_bias=bias, plan=plan)
        want = flash_dmattn_func(query, key, value, mask, bias, backend=target.backend)
    assert torch.equal(got, want)


def test_says_what_it_is_for(target: Target) -> None:
    query, key, _, _ = tensors(target)
    plan = make_plan(query, key, is_causal=True, backend=target.backend)
    assert isinstance(plan, AttentionPlan)
    assert "query.shape[1]=70" in repr(plan)
    assert f"is_causal=True, backend='{target.backend}'" in repr(plan)
    assert plan.attn_mask is None


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_with_a_plan(kind: str, made_inside: bool, target: Target) -> None:
    torch._dynamo.reset()
    mask = make_mask(kind, target)
    inputs = tensors(target, requires_grad=True)

    def two_layers(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, plan: object) -> Tensor:
        if made_inside:
            plan = make_plan(query, key, mask, True, backend=target.backend)
        # The comparison is too close for gradient sums in varying order.
        options = {"attn_bias": bias, "plan": plan, "deterministic": True}
        out = flash_dmattn_func(query, key, value, **options)
        return flash_dmattn_func(out, key, value, **options)

    plan = make_plan(*inputs[:2], mask, True, backend=target.backend)
    compiled = torch.compile(two_layers, fullgraph=True, backend="aot_eager")
    want = two_layers(*inputs, plan)
    got = compiled(*inputs, plan)
    torch.testing.assert_close(got, want)
    cotangent = torch.ones_like(want)
    for one, other in zip(
        torch.autograd.grad(got, inputs, cotangent),
        torch.autograd.grad(want, inputs, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_with_a_plan(use_reentrant: bool, target: Target) -> None:
    inputs = tensors(target, requires_grad=True)
    plan = make_plan(*inputs[:2], make_mask("rows", target), backend=target.backend)

    def loss(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, value, attn_bias=bias, plan=plan).float().sum()

    want = torch.autograd.grad(loss(*inputs), inputs)
    checkpoint(loss, *inputs, use_reentrant=use_reentrant).backward()
    for tensor, gradient in zip(inputs, want, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_plans_in_cuda_graphs() -> None:
    """Each replay makes a new plan if the plan is made inside of the graph."""
    target = Target("cuda", "cuda")
    query, key, value, _ = tensors(target)
    mask = make_mask("keys", target)

    def layers() -> Tensor:
        plan = make_plan(query, key, mask)
        out = flash_dmattn_func(query, key, value, plan=plan)
        return flash_dmattn_func(out, key, value, plan=plan)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    mask.logical_not_()
    graph.replay()
    assert torch.equal(out, layers())
