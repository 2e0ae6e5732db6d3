# SPDX-License-Identifier: BSD-3-Clause
"""Fused projections, and norm and rotation in one kernel, give the results of single operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from direct import needs_direct_calls
from flash_dmattn import DynamicMaskAttention
from flash_dmattn.modules import heads as heads_of_layer
from flash_dmattn.modules.rotary import rotary_factors, rotate
from support import Target

EPS = 1e-6


class Heads(NamedTuple):
    """Heads as a view of larger memory, and the operations on them."""

    x: Tensor
    weight: Tensor | None
    factors: tuple[Tensor, Tensor] | None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x] if self.weight is None else [self.x, self.weight]

    def wide(self) -> Heads:
        x, *weight = (leaf.detach().double().requires_grad_() for leaf in self.leaves)
        factors = None if self.factors is None else tuple(t.double() for t in self.factors)
        return Heads(x, *weight or [None], factors)

    def by_operations(self) -> Tensor:
        x, weight, factors = self
        if weight is not None:
            x = rms_norm(x.to(weight.dtype), weight.shape, weight, EPS).to(x.dtype)
        return x if factors is None else rotate(x, *factors)

    def by_kernels(self) -> Tensor:
        from flash_dmattn.modules.fused_heads import norm_and_rotate

        return norm_and_rotate(self.x, self.weight, EPS, self.factors)


def make_heads(
    device: str, dtype: torch.dtype, dim: int, *, norm: torch.dtype | None, turns: bool
) -> Heads:
    generator = torch.Generator().manual_seed(0)
    both = 2 * torch.randn(2, 21, 5, dim, generator=generator).to(device, dtype)
    weight = None if norm is None else torch.randn(dim, generator=generator).to(device, norm)
    positions = torch.arange(21, device=device)
    factors = rotary_factors(positions, dim, 1e4, torch.float32) if turns else None
    for leaf in (both, weight):
        if leaf is not None:
            leaf.requires_grad_()
    return Heads(both[:, :, 1:4], weight, factors)


def results(heads: Heads, compute: Callable[[Heads], Tensor], dout: Tensor) -> list[Tensor]:
    out = compute(heads)
    return [out, *torch.autograd.grad(out, heads.leaves, dout.to(out))]


def assert_as_good(heads: Heads) -> None:
    """Check that the kernels' error against float64 is at most twice that of the operations."""
    dout = torch.randn(heads.x.shape, generator=torch.Generator().manual_seed(1))
    got, want, truth = (
        results(of, compute, dout)
        for of, compute in (
            (heads, Heads.by_kernels),
            (heads, Heads.by_operations),
            (heads.wide(), Heads.by_operations),
        )
    )
    for one, other, true in zip(got, want, truth, strict=True):
        assert one.dtype == other.dtype
        allowed = 2 * (other - true).abs().max() + 1e-6 * true.abs().max()
        assert (one - true).abs().max() <= allowed


@pytest.mark.parametrize("dim", [6, 7, 64, 96, 256])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_heads_are_what_operations_make(
    triton_device: str, dtype: torch.dtype, is_wide: bool, dim: int
) -> None:
    if triton_device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts bfloat16 off in place of rounding")
    norm = torch.float32 if is_wide else dtype
    assert_as_good(make_heads(triton_device, dtype, dim, norm=norm, turns=False))
    if dim % 2 == 0:
        assert_as_good(make_heads(triton_device, dtype, dim, norm=norm, turns=True))
        assert_as_good(make_heads(triton_device, dtype, dim, norm=None, turns=True))


@pytest.mark.parametrize("norm", [None, torch.float32], ids=str)
def test_gradients_of_heads_have_gradients(triton_device: str, norm: torch.dtype | None) -> None:
    heads = make_heads(triton_device, torch.float32, 8, norm=norm, turns=True)
    found = []
    for compute in (Heads.by_kernels, Heads.by_operations):
        out = compute(heads)
        first = torch.autograd.grad(out.square().sum(), heads.leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(each.square().sum() for each in first), heads.leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_many_gradients_of_heads_at_once(triton_device: str) -> None:
    heads = make_heads(triton_device, torch.float32, 8, norm=torch.float32, turns=True)
    cotangents = torch.randn(3, *heads.x.shape).to(heads.x)
    many, (one, *_) = (
        torch.autograd.grad(heads.by_kernels(), heads.leaves, dout, is_grads_batched=batched)
        for dout, batched in ((cotangents, True), (cotangents[1], False))
    )
    torch.testing.assert_close(many[0][1], one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [(2, 9), (9,)])
@pytest.mark.parametrize("settings", [{}, {"qk_norm": False}, {"rotary_base": None}], ids=str)
def test_a_layer_trains_the_same(
    triton_device: str,
    rows: tuple[int, ...],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = make_layer(triton_device, **settings)
    x = torch.randn(*rows, 16).to(layer.A)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=triton_device)
    options = {"cu_seqlens": bounds} if len(rows) == 1 else {}
    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr(heads_of_layer, "has_kernel", lambda _, has=has_kernel: has)
        out = layer(x, **options)
        loss = out.float().square().sum()
        found.append([out, *torch.autograd.grad(loss, list(layer.parameters()))])
    tolerance = 1e-5 if triton_device == "cpu" else 1e-2
    for one, other in zip(*found, strict=True):
        allowed = tolerance * max(1.0, other.abs().max().item())
        assert (one - other).abs().max() <= allowed


def test_positions_lie_in_memory_in_any_order(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(triton_device)
    x = torch.randn(3, 9, 16).to(layer.A)
    positions = torch.randint(50, (9, 3), device=triton_device).t()
    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr(heads_of_layer, "has_kernel", lambda _, has=has_kernel: has)
        found.append(layer(x, position_ids=positions))
    tolerance = 1e-5 if triton_device == "cpu" else 1e-2
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def make_layer(device: str, **settings: Any) -> DynamicMaskAttention:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = {"window_size": None, "keep_last": 0, "init_std": 0.3, "backend": device, **settings}
    return DynamicMaskAttention(16, 4, 2, **made).to(device, dtype)


def is_fused(layer: DynamicMaskAttention, x: Tensor) -> bool:
    return heads_of_layer._has_fused_kernel(x, layer.q_norm)


@needs_direct_calls
def test_what_others_change_or_watch_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_of_layer, "has_kernel", lambda _: True)
    x = torch.randn(2, 5, 4, 4)
    assert is_fused(make_layer("cpu"), x)
    with torch.profiler.profile():
        assert is_fused(make_layer("cpu"), x)
    hooked, replaced = make_layer("cpu"), make_layer("cpu")
    hooked.q_norm.register_forward_hook(lambda module, inputs, output: output)
    replaced.q_norm = torch.nn.LayerNorm(4)
    strided, elsewhere = make_layer("cpu"), make_layer("cpu")
    strided.q_norm.weight = torch.nn.Parameter(torch.randn(4, 2)[:, 0])
    elsewhere.q_norm.to("meta")
    unnamed = make_layer("cpu")
    unnamed.q_norm.eps = None
    wide = make_layer("cpu").to(torch.float64)
    for changed in (hooked, replaced, strided, elsewhere, unnamed, wide):
        assert not is_fused(changed, x)
    assert not is_fused(make_layer("cpu"), x.double())
    assert not is_fused(make_layer("cpu"), x.transpose(2, 3))
    assert not is_fused(make_layer("cpu"), x[:, ::2].transpose(0, 1))
    assert not is_fused(make_layer("cpu"), x[:0])
    layer = make_layer("cpu")
    assert not torch.func.vmap(lambda x: torch.tensor(is_fused(layer, x)))(x).any()


# --- projections


@pytest.mark.parametrize("projection_bias", [False, True])
def test_heads_of_one_product_are_those_of_three(target: Target, projection_bias: bool) -> None:
    layer = make_layer(target.device, projection_bias=projection_bias, backend=target.backend)
    x = torch.randn(2, 9, 16).to(layer.A).requires_grad_()
    leaves = [x, *layer.parameters()]
    found = []
    called: list[object] = []
    for is_hooked in (False, True):
        if is_hooked:  # hooks must be called
            layer.k_proj.register_forward_hook(lambda *_: called.append(None))
        out = layer(x)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert len(called) == 1
    tolerance = 1e-5 if layer.A.dtype == torch.float32 else 2e-2
    for one, other in zip(*found, strict=True):
        allowed = tolerance * max(1.0, other.abs().max().item())
        assert (one - other).abs().max() <= allowed


@pytest.mark.parametrize(
    "kind",
    ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"],
)
def test_what_is_hooked_to_all_modules_sees_each(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_of_layer, "has_kernel", lambda _: True)
    layer = make_layer("cpu")
    seen: list[torch.nn.Module] = []
    register = getattr(torch.nn.modules.module, f"register_module_{kind}")
    hook = register(lambda module, *_: seen.append(module))
    try:
        layer(torch.randn(2, 9, 16, requires_grad=True)).sum().backward()
    finally:
        hook.remove()
    assert set(seen) == set(layer.modules())


def test_projections_of_other_widths_are_an_error() -> None:
    """This includes widths with the right total."""
    layer = make_layer("cpu")
    layer.q_proj, layer.k_proj = torch.nn.Linear(16, 12), torch.nn.Linear(16, 12)
    layer.v_proj = torch.nn.Linear(16, 8)
    with pytest.raises(RuntimeError, match="12"):
        layer(torch.randn(2, 9, 16))


def test_a_projection_that_does_not_train_has_no_gradient() -> None:
    layer = make_layer("cpu")
    layer.k_proj.requires_grad_(False)
    layer(torch.randn(2, 9, 16)).sum().backward()
    assert layer.k_proj.weight.grad is None
    assert layer.q_proj.weight.grad is not None


def test_autocast_casts_the_states_once() -> None:
    layer, x = make_layer("cpu"), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile(record_shapes=True) as seen:
        layer(x)
    casts = [
        event
        for event in seen.events()
        if event.name == "aten::_to_copy" and event.input_shapes[0] == [2, 9, 16]
    ]
    assert len(casts) == 1
