# SPDX-License-Identifier: BSD-3-Clause
"""Rows of packed tensors that belong to no sequence, as where they are padded to a multiple.

On a GPU a pack cannot refuse them without waiting. They are 0 in results and gradients, whatever
the memory held before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dmattn import flash_dmattn_varlen_func
from support import HALF_TYPES, randn

TOTAL = 640


def call(bounds: tuple[int, ...], window: int | None, backend: str, device: str) -> dict[str, Any]:
    """Return the arguments of a call that has rows before the first bound and from the last on."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    query, key, value = (
        randn(TOTAL, heads, 64, seed=heads).to(device, HALF_TYPES[1]).requires_grad_()
        for heads in (4, 2, 2)
    )
    return {
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": 300,
        "max_seqlen_k": 300,
        "is_causal": True,
        "attn_bias": randn(2, 1, TOTAL, seed=5).to(device).requires_grad_(),
        "window_size": window,
        "return_lse": True,
        "backend": backend,
    }


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("bounds", [(0, 100, 400, 523), (3, 200, 500), (0,), (0, 0)], ids=str)
def test_rows_of_no_sequence_are_zero(
    bounds: tuple[int, ...], window: int | None, backend: str, gpu: str
) -> None:
    arguments = call(bounds, window, backend, gpu)
    junk = [torch.full((1 << 20,), torch.nan, device=gpu) for _ in range(8)]
    del junk  # what is allocated next holds NaN
    out, lse = flash_dmattn_varlen_func(**arguments)
    names = ("query", "key", "value", "attn_bias")
    gradients = torch.autograd.grad(out.float().sum(), [arguments[name] for name in names])
    unused = torch.ones(TOTAL, dtype=torch.bool, device=gpu)
    unused[bounds[0] : bounds[-1]] = False
    assert not out[unused].any()
    assert lse[:, unused].isneginf().all()
    assert lse[:, ~unused].isfinite().all()
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.isfinite().all(), name
        assert not gradient.movedim(-1 if name == "attn_bias" else 0, 0)[unused].any(), name


@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_backends_that_read_the_bounds_refuse_such_rows(backend: str, gpu: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens_q ends with 523, but must end with"):
        flash_dmattn_varlen_func(**call((0, 523), None, backend, gpu))
