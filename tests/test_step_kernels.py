# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of a decoding step give the results of PyTorch's operations."""

from __future__ import annotations

import contextlib
import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import AttentionCache, DynamicMaskAttention, KeptKeys
from flash_dmattn.loader import FallbackWarning
from flash_dmattn.modules import fusing
from flash_dmattn.record import KeyCounts
from flash_dmattn.state import stepping
from flash_dmattn.state.rows import Rows, empty_rows


@pytest.mark.parametrize(
    ("bias_heads", "kv_heads", "counts", "dim"),
    [
        (2, 2, (7, 0, 0), 6),
        (1, 3, (5, 0, 0), 20),
        (1, 1, (40, 0, 0), 64),
        (4, 4, (1, 0, 0), 8),
        (2, 2, (5, 4, 3), 6),
        (1, 3, (3, 6, 0), 20),
        (2, 2, (4, 0, 2), 8),
        (1, 1, (0, 5, 1), 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_slot_is_written(
    triton_device: str,
    bias_heads: int,
    kv_heads: int,
    counts: tuple[int, int, int],
    dim: int,
    dtype: torch.dtype,
) -> None:
    """The rows are equal after each token, with ties, NaN and -inf."""
    generator = torch.Generator().manual_seed(0)
    batch, sets = 3, 1 if bias_heads == 1 else kv_heads

    def token(position: int) -> Rows:
        # Strided, as heads of a projection may be.
        both = torch.randn(batch, 1, 2 * kv_heads, dim, generator=generator).to(dtype)
        bias = torch.randint(0, 6, (batch, bias_heads, 1, 1), generator=generator).float()
        bias[bias == 5] = torch.nan
        bias[bias == 4] = -torch.inf
        positions = torch.full((batch, sets, 1), position)
        key, value = both.to(triton_device).split(kv_heads, 2)
        return Rows(key, value, bias.to(triton_device), positions.to(triton_device))

    got = empty_rows(token(0), sum(counts))
    want = Rows(*(tensor.clone() for tensor in got))
    counters = torch.zeros(2, 3, dtype=torch.int64, device=triton_device)
    for position in range(3 * sum(counts) + 5):
        new = token(position)
        stepping.insert(got, new, KeyCounts(*counts), counters[0])
        stepping.insert_by_operations(want, new, KeyCounts(*counts), counters[1])
        assert torch.equal(counters[0], counters[1])
        for name, one, other in zip(Rows._fields, got, want, strict=True):
            assert torch.equal(one, other), (name, position)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"qk_norm": False},
    {"rotary_base": None, "head_dim": 7},
    {"projection_bias": True, "bias_form": "exp", "head_dim": 20},
    {"norm_eps": 0.1, "softcap": 2.0, "softmax_scale": 0.3},
    {"keep_last": 4, "keep_first": 3},
    {"window_size": 0, "keep_last": 6},
]


def decoded(layer: DynamicMaskAttention, x: Tensor, is_fused: bool) -> tuple[Tensor, KeptKeys]:
    """Return a layer's outputs for a prompt and single tokens, and its kept keys."""
    cache = AttentionCache()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusing, "has_kernel", lambda _: is_fused)
        outs = [layer(x[:, :8], cache=cache)]
        outs += [layer(x[:, i : i + 1], cache=cache) for i in range(8, x.shape[1])]
    assert cache.kept is not None
    return torch.cat(outs, 1), cache.kept


def least_margin(layer: DynamicMaskAttention, x: Tensor) -> float:
    """Return the least relative margin of a step between its worst kept and best dropped bias.

    The biases of the prompt's 8 tokens are equal in both ways of decoding, so margins among them do
    not count.
    """
    exact, margins = copy.deepcopy(layer).double(), []
    with torch.no_grad():
        value = exact.v_proj(x.double()).unflatten(-1, (exact.num_kv_heads, exact.head_dim))
        biases = exact.key_bias(value).flatten(0, 2)
    for tokens in range(9, x.shape[1] + 1):
        best = biases[:, :tokens].sort(descending=True)
        kept, dropped = best.values[:, 5], best.values[:, 6]
        depends = best.indices[:, 5:7].amax(1) >= 8
        margins += ((kept - dropped) / kept.abs())[depends].tolist()
    return min(margins)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_is_what_the_layer_computes(triton_device: str, settings: dict[str, Any]) -> None:
    for dtype in (torch.bfloat16,) if triton_device == "cuda" else (torch.float32, torch.bfloat16):
        # Drawn on the CPU, so that it does not depend on the device. In this problem rounding
        # decides no selection, biases are small, and states have enough precision in bfloat16.
        torch.manual_seed(2179)
        made = {"window_size": 6, "keep_last": 0, "init_std": 0.3, **settings}
        layer = DynamicMaskAttention(48, 4, 2, backend=triton_device, **made)
        for name, parameter in layer.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                torch.nn.init.normal_(parameter)
        layer, x = layer.to(dtype), torch.randn(2, 14, 48).to(dtype)
        assert least_margin(layer, x) > 0.03
        layer, x = layer.to(triton_device), x.to(triton_device)
        got, kept = decoded(layer, x, is_fused=True)
        want, other = decoded(layer, x, is_fused=False)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, want, atol=tolerance * 16, rtol=tolerance)
        assert kept.length == other.length == 14
        held = kept.tensors
        assert torch.equal(held["position"], other.tensors["position"])
        # Keys kept for their place may have small biases, from states that cancel.
        small = tolerance / 16 if kept.counts.keeps_first_or_last else 0
        torch.testing.assert_close(held["bias"], other.tensors["bias"], atol=small, rtol=tolerance)


@pytest.mark.parametrize("name", ["softcap", "softmax_scale", "sink"])
def test_a_refused_step_takes_nothing_in(triton_device: str, name: str) -> None:
    """This holds before and after kernels were made for the layer."""
    torch.manual_seed(0)
    layer = DynamicMaskAttention(48, 4, 2, window_size=6, sink=True, backend=triton_device)
    layer.to(triton_device, torch.bfloat16)
    wrong = {"softcap": -1.0, "softmax_scale": torch.nan, "sink": torch.nn.Parameter(layer.A[:1])}
    x, cache, right = torch.randn(2, 12, 48).to(layer.A), AttentionCache(), getattr(layer, name)
    with torch.no_grad():
        layer(x[:, :9], cache=cache)
        for end in (10, 11):
            setattr(layer, name, wrong[name])
            with pytest.raises(ValueError, match=r"softcap|scale|sink"):
                layer(x[:, end - 1 : end], cache=cache)
            assert cache.length == end - 1
            setattr(layer, name, right)
            layer(x[:, end - 1 : end], cache=cache)
    assert cache.length == 11


def is_fused(layer: DynamicMaskAttention, *arguments: Any) -> bool:
    return fusing.fused_step(layer, DynamicMaskAttention, *arguments) is not None


def test_parts_that_were_changed_are_called() -> None:
    """Hooked, replaced, overridden or given parts are not fused."""

    class Louder(DynamicMaskAttention):
        def key_bias(self, value: Tensor) -> Tensor:
            return 2 * super().key_bias(value)

    x, cache = torch.randn(1, 9, 16), AttentionCache()
    layer, hooked, replaced, wide, wrapped, odd, unnamed = (
        DynamicMaskAttention(16, 2, window_size=4) for _ in range(7)
    )
    assert unnamed.q_norm is not None
    unnamed.q_norm.eps = None
    wrapped.k_proj.forward = lambda x: x  # type: ignore[method-assign]
    odd.window_size = 3
    hooked.o_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    replaced.v_proj = torch.nn.Sequential(replaced.v_proj)  # type: ignore[assignment]
    wide.to(torch.float64)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusing, "has_kernel", lambda _: True)
        layer(x[:, :8], cache=cache)
        token, nothing = x[:, 8:], (None,) * 4
        assert is_fused(layer, token, cache, *nothing)
        for changed in (hooked, replaced, wrapped, odd, unnamed, Louder(16, 2, window_size=4)):
            assert not is_fused(changed, token, cache, *nothing)
        assert not is_fused(wide, token.double(), cache, *nothing)
        assert not is_fused(layer, x, cache, *nothing)
        assert not is_fused(layer, token.expand(2, -1, -1), cache, *nothing)
        assert not is_fused(layer, token, None, *nothing)
        assert not is_fused(layer, token, AttentionCache(), *nothing)
        assert not is_fused(layer, token, cache, torch.ones(1, 1).bool())
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_fused(layer, token, cache, *nothing)
        # The facts of a layer are determined again after it changes.
        handle = layer.dt_proj.register_forward_pre_hook(lambda module, inputs: inputs)
        assert not is_fused(layer, token, cache, *nothing)
        handle.remove()
        assert is_fused(layer, token, cache, *nothing)
        before = fusing.fused_step(layer, DynamicMaskAttention, token, cache, *nothing)
        assert layer.k_norm is not None
        layer.k_norm.eps = 0.1
        after = fusing.fused_step(layer, DynamicMaskAttention, token, cache, *nothing)
        assert after is not None
        assert after is not before
        layer.q_proj.weight.data = layer.q_proj.weight.data.t()
        assert not is_fused(layer, token, cache, *nothing)
    assert not is_fused(layer, token, cache, *nothing)


def test_a_converted_layer_has_kernels_of_its_own() -> None:
    """The kernels are compiled for its dtype; conversion keeps the layer's parameter objects."""
    layer = DynamicMaskAttention(16, 2, window_size=4)
    steps = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusing, "has_kernel", lambda _: True)
        for dtype in (torch.float32, torch.bfloat16):
            x, cache = torch.randn(1, 9, 16, dtype=dtype), AttentionCache()
            layer.to(dtype)(x[:, :8], cache=cache)
            given = layer, DynamicMaskAttention, x[:, 8:], cache, *(None,) * 4
            steps.append(fusing.fused_step(*given))
            assert fusing.fused_step(*given) is steps[-1]
    assert None not in steps
    assert steps[0] is not steps[1]


def test_without_a_compiler_operations_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs a compiler to start kernels, and runtime images have none."""
    triton = pytest.importorskip("triton")

    class Driver:
        def get_current_target(self) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=Driver()))
    monkeypatch.setattr(stepping, "why_unavailable", lambda _: None)
    stepping._has_kernel.cache_clear()
    with pytest.warns(FallbackWarning, match="Failed to find C compiler"):
        assert not stepping.has_kernel("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning comes once
        assert not stepping.has_kernel("cuda")
    stepping._has_kernel.cache_clear()


@pytest.mark.parametrize(("kind", "number"), [("cuda", 2**31), ("xpu", 1)])
def test_triton_is_asked_where_what_was_compiled_may_not_serve(
    kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This covers strides of 64 bits, and devices whose current one torch.cuda does not know."""
    pytest.importorskip("triton")
    from flash_dmattn.backends.triton import bound_kernel

    started = []

    class Kernel:
        arg_names = ("x", "stride", "SIZE")

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return self

        def __call__(self, *arguments: Any, **options: Any) -> Kernel:
            started.append("stream" not in options)
            return self

    class Somewhere:
        device = torch.device(kind, 0)

        def data_ptr(self) -> int:
            return 1024

    monkeypatch.setattr(bound_kernel, "_STARTS_COMPILED", True)
    monkeypatch.setattr(bound_kernel, "raw_stream", lambda index: 0)
    monkeypatch.setattr(bound_kernel, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0 if kind == "cuda" else 1 // 0)
    kernel = bound_kernel.BoundKernel(Kernel(), 4, SIZE=8)
    tensors: Any = (Somewhere(),)
    for given in (1, 1, number):
        kernel.start((1, 1, 1), tensors, (given,))
    assert started == ([True, False, True] if kind == "cuda" else [True] * 3)


def test_steps_of_layers_with_places_are_fused(triton_device: str) -> None:
    layer = DynamicMaskAttention(48, 4, 2, window_size=5, keep_last=3, keep_first=1)
    layer = layer.to(triton_device, torch.bfloat16)
    x, cache = torch.randn(2, 9, 48).to(layer.A), AttentionCache()
    with torch.no_grad():
        layer(x[:, :8], cache=cache)
        given = layer, DynamicMaskAttention, x[:, 8:], cache, *(None,) * 4
        assert fusing.fused_step(*given) is not None
        layer.keep_last = 4
        assert fusing.fused_step(*given) is None
