# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of a decoding step do what PyTorch's operations do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flash_dmattn import AttentionCache, DynamicMaskAttention
from flash_dmattn.backends.triton import why_unavailable
from flash_dmattn.modules import heads
from flash_dmattn.state import stepping
from flash_dmattn.state.rows import Rows, empty_rows


@pytest.fixture(params=["cpu-triton", "cuda-triton"])
def device(request: pytest.FixtureRequest) -> str:
    name = str(request.param).partition("-")[0]
    reason = why_unavailable(name)
    if reason is not None:
        pytest.skip(reason)
    return name


@pytest.mark.parametrize(
    ("bias_heads", "kv_heads", "window", "dim"),
    [(2, 2, 7, 6), (1, 3, 5, 20), (1, 1, 40, 64), (4, 4, 1, 8)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_slot_is_written(
    device: str, bias_heads: int, kv_heads: int, window: int, dim: int, dtype: torch.dtype
) -> None:
    """The same rows after each token, among ties, NaN and -inf."""
    generator = torch.Generator().manual_seed(0)
    batch, sets = 3, 1 if bias_heads == 1 else kv_heads

    def token(position: int) -> Rows:
        # Strided, as heads of a projection may be.
        both = torch.randn(batch, 1, 2 * kv_heads, dim, generator=generator).to(dtype)
        bias = torch.randint(0, 6, (batch, bias_heads, 1, 1), generator=generator).float()
        bias[bias == 5] = torch.nan
        bias[bias == 4] = -torch.inf
        positions = torch.full((batch, sets, 1), position)
        key, value = both.to(device).split(kv_heads, 2)
        return Rows(key, value, bias.to(device), positions.to(device))

    got = empty_rows(token(0), window)
    want = Rows(*(tensor.clone() for tensor in got))
    counters = torch.zeros(2, 3, dtype=torch.int64, device=device)
    for position in range(3 * window + 5):
        new = token(position)
        stepping.insert(got, new, window, counters[0])
        stepping.insert_by_operations(want, new, window, counters[1])
        assert torch.equal(counters[0], counters[1])
        for name, one, other in zip(Rows._fields, got, want, strict=True):
            assert torch.equal(one, other), (name, position)


@pytest.mark.parametrize(
    "settings",
    [{}, {"qk_norm": False}, {"rotary_base": None}, {"head_dim": 20}, {"norm_eps": 0.1}],
    ids=str,
)
def test_heads_are_prepared(
    device: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also far from the first token, where a position fills its float32."""
    for dtype in (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        made = {"window_size": 6, "init_std": 0.3, **settings}
        layer = DynamicMaskAttention(48, 4, 2, **made).to(device, dtype)
        for norm in (layer.q_norm, layer.k_norm):
            if norm is not None:
                torch.nn.init.normal_(norm.weight)
        x = torch.randn(2, 12, 48).to(device, dtype)
        cache = AttentionCache()
        results = {}
        with torch.no_grad():
            layer(x, cache=cache)
            assert cache.kept is not None
            assert cache.kept.counter is not None
            for far, is_kernel in itertools.product((12, 100_000), (True, False)):
                cache.kept.counter[0] = far
                query, key = (
                    projection(x).unflatten(-1, (-1, layer.head_dim))
                    for projection in (layer.q_proj, layer.k_proj)
                )
                monkeypatch.setattr(heads, "has_kernel", lambda _, it=is_kernel: it)
                results[far, is_kernel] = heads.prepared(layer, query, key, None, None, cache)
        for far in (12, 100_000):
            for one, other in zip(results[far, True], results[far, False], strict=True):
                tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5 if far == 12 else 2e-2
                torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
