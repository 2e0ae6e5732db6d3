# SPDX-License-Identifier: BSD-3-Clause
"""The GPU packs' kernels that sum the attention of each key, even where calls do not use them."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import flash_dmattn_func
from flash_dmattn.backends import pack
from support import Target, randn
from test_key_mass import KINDS, assert_near, dense_tensors, mass_of, wanted


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "KEY_MASS_WITHOUT_MASK", True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, dtype: torch.dtype, gpu: str) -> None:
    tensors, options = dense_tensors(dtype), KINDS[kind]()
    assert_near(mass_of(tensors, Target(gpu, "cuda"), **options), wanted(tensors, options))


# The schedule divides blocks of more than 4096 keys; 600 sequences x heads wrap around all SMs.
@pytest.mark.parametrize("sizes", [(1, 5000, 6, 2), (2, 1500, 32, 8), (50, 300, 12, 12)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_many_tiles(
    window: int | None, head_dim: int, sizes: tuple[int, int, int, int], gpu: str
) -> None:
    batch, tokens, heads, kv_heads = sizes
    query, key = (
        randn(batch, tokens, count, head_dim, dtype=torch.bfloat16, seed=n).to(gpu)
        for n, count in enumerate((heads, kv_heads))
    )
    bias = randn(batch, kv_heads, 1, tokens, seed=2).to(gpu)
    options = {"attn_bias": bias, "is_causal": True, "window_size": window}
    found = []
    for backend in ("cuda", "reference"):
        with torch.no_grad():
            _, mass = flash_dmattn_func(
                query, key, key, return_key_mass=True, backend=backend, **options
            )
        found.append(mass)
    got, want = found
    assert ((got - want).abs() / (1 + want)).max() < 1e-3
    again = flash_dmattn_func(query, key, key, return_key_mass=True, deterministic=True, **options)
    assert torch.equal(again[1], got)
