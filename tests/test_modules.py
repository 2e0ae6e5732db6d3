# SPDX-License-Identifier: BSD-3-Clause
"""DynamicMaskAttention against a plain float64 formulation."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from flash_dmattn import DynamicMaskAttention, IntervalMask
from flash_dmattn.modules.rotary import packed_positions
from plain_module import EMBED, make_input, make_module, module_results, plain_results
from support import Target, assert_accurate, rand_bool, randn

SETTINGS = {
    "default": {},
    "one_head_each": {"num_kv_heads": 4},
    "one_kv_head": {"num_kv_heads": 1},
    "odd_heads": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 7, "rotary_base": None},
    "plain_heads": {"qk_norm": False, "rotary_base": None},
    "not_causal": {"is_causal": False},
    "exp": {"bias_form": "exp"},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7, "rotary_base": 100.0},
    "projection_bias": {"projection_bias": True},
    "window_of_two": {"window_size": 2},
    "window_of_all": {"window_size": 17},
    "window_beyond_all": {"window_size": 1000},
    "no_window": {"window_size": None},
    "sink": {"sink": True},
}


def check(
    module: DynamicMaskAttention, x: Tensor, mask: Tensor | None = None, form: object = None
) -> None:
    """Compare results by the rule; the module gets the mask as ``form``."""
    dout = randn(*x.shape, seed=1)
    four = mask[:, None, None] if mask is not None and mask.dim() == 2 else mask
    got = module_results(module, x, dout, mask if form is None else form)
    truth = plain_results(module, x, dout.to(x.device), torch.float64, four)
    eager = plain_results(module, x, dout.to(x.device), x.dtype, four)
    assert_accurate(got, truth, eager)


@pytest.mark.parametrize("name", SETTINGS)
def test_module_equals_the_formula(name: str, target: Target) -> None:
    module = make_module(target, **SETTINGS[name])
    check(module, make_input(module, 2, 17))


def test_module_in_bfloat16_equals_the_formula(target: Target) -> None:
    module = make_module(target, torch.bfloat16)
    check(module, make_input(module, 2, 17))


@pytest.mark.parametrize("rows", [1, 4, 6, 33])
def test_any_number_of_rows(rows: int, target: Target) -> None:
    module = make_module(target)
    check(module, make_input(module, 3, rows))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str, causal: bool, target: Target) -> None:
    module = make_module(target, is_causal=causal)
    x = make_input(module, 3, 13)
    lengths = torch.tensor([[13], [6], [2]], device=x.device)
    mask = torch.arange(13, device=x.device) < lengths
    check(module, x, mask.flip(1) if side == "left" else mask)


def test_what_padding_holds_reaches_no_other_token(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 1, 13)
    mask = torch.arange(13, device=x.device)[None] >= 4
    other = x.clone()
    other[:, :4] = 1000
    assert torch.equal(module(x, mask)[:, 4:], module(other, mask)[:, 4:])
    assert not torch.equal(module(x)[:, 4:], module(other)[:, 4:])


@pytest.mark.parametrize("window", [5, None])
def test_masks_of_each_form(window: int | None, target: Target) -> None:
    module = make_module(target, window_size=window)
    x = make_input(module, 2, 13)
    rows = rand_bool(2, 1, 13, 13, seed=3).to(x.device)
    check(module, x, rows)
    band = IntervalMask.sliding_window(6, 0, 13, 13, device=x.device)
    check(module, x, band.to_bool(13), form=band)


def test_rows_that_see_nothing_are_zero(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 9).requires_grad_()
    mask = torch.zeros(2, 9, dtype=torch.bool, device=x.device)
    mask[1, 5:] = True
    out = module(x, mask)
    assert not out[0].any()
    assert not out[1, :5].any()
    assert out[1, 5:].any()
    gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][0].any()


@pytest.mark.parametrize("shape", [(0, 9), (2, 0), (0, 0)])
def test_empty_batches(shape: tuple[int, int], target: Target) -> None:
    module = make_module(target)
    x = make_input(module, *shape).requires_grad_()
    out = module(x)
    assert out.shape == (*shape, EMBED)
    gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    assert not any(gradient.any() for gradient in gradients)


def test_positions_can_be_given(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 11)
    counted = torch.arange(11, device=x.device)
    for positions in (counted, counted.expand(2, 11).int()):
        assert torch.equal(module(x, position_ids=positions), module(x))
    # Only differences of positions count: equal rotations of query and key cancel.
    torch.testing.assert_close(module(x, position_ids=counted + 3), module(x), atol=5e-2, rtol=5e-2)
    assert not torch.allclose(module(x, position_ids=3 * counted), module(x), atol=5e-2)


def test_only_the_bias_decides_what_is_kept(target: Target) -> None:
    """With equal biases the first keys are kept, whatever the scores."""
    module = make_module(target, window_size=3)
    x = make_input(module, 1, 10)
    with torch.no_grad():
        module.A.zero_()
    changed = x.clone()
    changed[:, 3:] = make_input(module, 1, 7, seed=9)
    query_of_last = changed[:, -1:]
    first = torch.cat([x[:, :9], query_of_last], 1)
    assert torch.equal(module(first)[:, -1], module(changed)[:, -1])


# --- packed sequences


def packed_batch(module: DynamicMaskAttention) -> tuple[Tensor, Tensor, list[Tensor]]:
    sequences = [make_input(module, n, seed=n) for n in (7, 0, 1, 23, 4)]
    lengths = torch.tensor([0, *(len(s) for s in sequences)], device=module.A.device)
    return torch.cat(sequences), lengths.cumsum(0).to(torch.int32), sequences


@pytest.mark.parametrize("settings", [{}, {"is_causal": False}, {"window_size": None}])
def test_packed_equals_separate_sequences(settings: dict[str, object], target: Target) -> None:
    module = make_module(target, **settings)
    packed, cu_seqlens, sequences = packed_batch(module)
    dout = randn(*packed.shape, seed=1).to(packed)
    parameters = list(module.parameters())
    for longest in (23, 40, None):
        out = module(packed, cu_seqlens=cu_seqlens, max_seqlen=longest)
        alone = torch.cat([module(sequence[None])[0] for sequence in sequences])
        close = {"atol": 1e-2, "rtol": 1e-2} if out.dtype != torch.float32 else {}
        torch.testing.assert_close(out, alone, **close)
        got = torch.autograd.grad(out, parameters, dout)
        want = torch.autograd.grad(alone, parameters, dout)
        for one, other in zip(got, want, strict=True):
            scale = other.abs().max().item()
            assert (one - other).abs().max() <= (2e-5 if not close else 2e-2) * scale


def test_packed_masks_and_positions(target: Target) -> None:
    module = make_module(target)
    packed, cu_seqlens, sequences = packed_batch(module)
    keep = rand_bool(len(packed), seed=4).to(packed.device)
    position = torch.cat([torch.arange(len(s)) for s in sequences]).to(packed.device)
    out = module(packed, keep[None, None], cu_seqlens=cu_seqlens, position_ids=position)
    bounds = cu_seqlens.tolist()
    for begin, end in itertools.pairwise(bounds):
        alone = module(packed[None, begin:end], keep[None, begin:end])[0]
        torch.testing.assert_close(out[begin:end], alone, atol=1e-2, rtol=1e-2)


def test_packed_positions_start_anew_in_each_sequence() -> None:
    """The rotation depends only on differences, so an offset changes results only by rounding."""
    cu_seqlens = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    assert packed_positions(cu_seqlens, 6).tolist() == [0, 1, 0, 1, 2, 0]


def test_packed_batch_without_sequences(target: Target) -> None:
    module = make_module(target)
    nothing = torch.zeros(1, dtype=torch.int32, device=module.A.device)
    assert module(make_input(module, 0), cu_seqlens=nothing).shape == (0, EMBED)
