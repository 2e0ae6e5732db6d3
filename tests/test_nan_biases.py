# SPDX-License-Identifier: BSD-3-Clause
"""A window never keeps a key whose bias is NaN or -inf, for any number of keys; without a window
NaN propagates, as in any formula.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import (
    DynamicMaskAttention,
    IntervalMask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
)
from flash_dmattn.integrations.transformers_attention import (
    flash_dynamic_mask_attention_forward,
)
from plain_module import make_input, make_module
from support import Target, rand_bool, randn

KEYS = 9
BAD = (2, 5)  # keys with a bias of NaN and of -inf
WINDOWS = (KEYS - len(BAD), KEYS, 50)  # each can hold all valid keys
BIASES = {"keys": (2, 2, 1, KEYS), "rows": (2, 4, KEYS, KEYS), "one batch": (1, 1, 1, KEYS)}
MASKS = ("none", "padding", "rows")


def problem(target: Target, form: str) -> tuple[list[Tensor], Tensor]:
    """Return query, key, value, a bias without NaN, and the keys to drop."""
    shapes = [(2, KEYS, 4, 8), (2, KEYS, 2, 8), (2, KEYS, 2, 8), BIASES[form]]
    tensors = [
        randn(*shape, seed=n).to(target.device, target.dtypes[0]) for n, shape in enumerate(shapes)
    ]
    dropped = torch.zeros(KEYS, dtype=torch.bool, device=target.device)
    dropped[list(BAD)] = True
    return tensors, dropped


def poisoned(bias: Tensor) -> Tensor:
    bias = bias.clone()
    bias[..., BAD[0]] = torch.nan
    bias[..., BAD[1]] = -torch.inf
    return bias


def mask_of(kind: str, target: Target) -> Tensor | None:
    if kind == "none":
        return None
    mask = rand_bool(2, 1, 1 if kind == "padding" else KEYS, KEYS, density=0.8)
    return mask.to(target.device)


def results(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", BIASES)
def test_function(form: str, mask: str, causal: bool, target: Target) -> None:
    tensors, dropped = problem(target, form)
    seen = mask_of(mask, target)
    options: dict[str, Any] = {"is_causal": causal, "backend": target.backend}
    for window in WINDOWS:
        leaves = [t.clone().requires_grad_() for t in (*tensors[:3], poisoned(tensors[3]))]
        got = flash_dmattn_func(*leaves[:3], seen, leaves[3], window_size=window, **options)
        kept = ~dropped if seen is None else seen & ~dropped
        plain = [t.clone().requires_grad_() for t in tensors]
        kept = kept.expand(2, 1, -1, KEYS) if kept.dim() == 4 else kept.view(1, 1, 1, KEYS)
        want = flash_dmattn_func(*plain[:3], kept, plain[3], **options)
        assert_equal(results(got, leaves), results(want, plain))
    propagated = flash_dmattn_func(*tensors[:3], None, poisoned(tensors[3]), **options)
    assert propagated[:, -1].isnan().all()


def test_expanded_biases_stay_small(pack_target: Target) -> None:
    tensors, _ = problem(pack_target, "one batch")
    bias = poisoned(tensors[3])
    options: dict[str, Any] = {"window_size": KEYS, "backend": pack_target.backend}
    got = flash_dmattn_func(*tensors[:3], None, bias.expand(2, 4, KEYS, KEYS), **options)
    assert torch.equal(got, flash_dmattn_func(*tensors[:3], None, bias, **options))


@pytest.mark.parametrize("rows", [False, True])
def test_varlen(rows: bool, target: Target) -> None:
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=target.device)
    tensors, _ = problem(target, "keys")
    query, key, value = (t[0] for t in tensors[:3])
    bias = tensors[3][0].expand(2, 9, 9)[:, :, :5].clone() if rows else tensors[3][0].clone()
    bias[..., 3] = torch.nan
    dropping = bias.nan_to_num(nan=-torch.inf)
    options: dict[str, Any] = {"is_causal": True, "backend": target.backend}
    for window in (4, 5, 50):
        packed = (query, key, value, bounds, bounds, 5, 5)
        got = flash_dmattn_varlen_func(*packed, attn_bias=bias, window_size=window, **options)
        want = flash_dmattn_varlen_func(*packed, attn_bias=dropping, window_size=5, **options)
        assert got.isfinite().all()
        if window > 4:
            assert_equal([got], [want])
    plain = flash_dmattn_varlen_func(*packed, attn_bias=bias, **options)
    assert plain.isnan().any()


class WithNaN(DynamicMaskAttention):
    """A layer whose projections produce a NaN."""

    def key_bias(self, value: Tensor) -> Tensor:
        bias = super().key_bias(value)
        bad = torch.zeros(bias.shape[-1], dtype=torch.bool, device=bias.device)
        bad[BAD[0]] = True
        return bias.masked_fill(bad, torch.nan)


@pytest.mark.parametrize("form", ["none", "padding", "intervals", "packed", "packed intervals"])
def test_layer(form: str, target: Target) -> None:
    """A window that must select, one of all keys and a larger one give equal results."""
    dtype = target.dtypes[0]
    layer = make_module(target, dtype)
    layer.__class__ = WithNaN
    x = make_input(layer, 2, KEYS)
    intervals = IntervalMask.sliding_window(50, 0, KEYS, KEYS, device=x.device)
    options: dict[str, Any] = {}
    if form.startswith("packed"):
        x = x[0]
        bounds = torch.tensor([0, KEYS], dtype=torch.int32, device=x.device)
        options = {"cu_seqlens": bounds, "max_seqlen": KEYS}
    if form.endswith("intervals"):
        start, end = intervals.start[0], intervals.end[0]
        options["attn_mask"] = intervals if form == "intervals" else IntervalMask(start, end)
    elif form == "padding":
        options["attn_mask"] = torch.ones(2, KEYS, dtype=torch.bool, device=x.device)
    outs = []
    for window in (KEYS - 1, KEYS, 50):
        if form == "packed intervals" and window < KEYS:
            continue
        layer.window_size = window
        outs.append(layer(x, **options))
        assert outs[-1].isfinite().all()
        assert_equal([outs[-1]], [outs[0]])
    layer.window_size = None
    assert layer(x, **options).isnan().any()


@pytest.mark.parametrize("form", ["none", "padding", "rows", "intervals", "documents"])
def test_integration(form: str, pack_target: Target) -> None:
    tensors, _ = problem(pack_target, "keys")
    query, key, value, bias = (*(t.transpose(1, 2) for t in tensors[:3]), poisoned(tensors[3]))
    module = torch.nn.Module()
    module.is_causal = True
    mask: Any = None
    options: dict[str, Any] = {}
    if form in ("padding", "rows"):
        mask = torch.ones(2, 1, 1 if form == "padding" else KEYS, KEYS, device=query.device) > 0
    elif form == "intervals":
        mask = IntervalMask.sliding_window(50, 0, KEYS, KEYS, device=query.device)
    elif form == "documents":
        options["position_ids"] = torch.tensor([[*range(6), *range(3)]] * 2, device=query.device)
    outs = []
    for window in WINDOWS:
        given = (module, query, key, value, mask, bias)
        outs.append(flash_dynamic_mask_attention_forward(*given, window_size=window, **options)[0])
        assert outs[-1].isfinite().all()
        assert_equal([outs[-1]], [outs[0]])
    assert flash_dynamic_mask_attention_forward(*given, **options)[0].isnan().any()
