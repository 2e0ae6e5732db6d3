# SPDX-License-Identifier: BSD-3-Clause
"""Wrong cu_seqlens on a GPU, which cannot be checked there: only the results are written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import _core
from flash_dmattn.loader import pack_for
from flash_dmattn.record import SelectionInputs

TOTAL_Q, TOTAL_K, HEADS, LONGEST_Q, LONGEST_K = 40, 60, 2, 24, 32
UNTOUCHED = 77
WRONG = (
    [0, 10, 1000],
    [-300, 10, 60],
    [0, 50, 20],
    [500, 600, 700],
    [0, 0, 60],  # longer than the maximum
    [-(2**31), 2**31 - 1, 5],
)


def surrounded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor in the middle of a constant buffer, and the buffer."""
    size, margin = int(torch.tensor(shape).prod()), 1 << 16
    buffer = torch.full((2 * margin + size,), UNTOUCHED, device="cuda").to(dtype)
    return buffer[margin : margin + size].view(shape), buffer


def assert_untouched(tensor: Tensor, buffer: Tensor, value: int = UNTOUCHED) -> None:
    margin = (buffer.numel() - tensor.numel()) // 2
    assert (buffer[:margin] == value).all()
    assert (buffer[-margin:] == value).all()


def inputs(bias: Tensor, bounds_q: list[int], bounds_k: list[int], causal: bool) -> SelectionInputs:
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor(b, dtype=torch.int32, device="cuda") for b in (bounds_q, bounds_k)
    )
    batch = len(bounds_q) - 1
    sizes = (batch, HEADS, HEADS, LONGEST_Q, LONGEST_K, 7, causal)
    return SelectionInputs(bias, None, cu_seqlens_q, cu_seqlens_k, *sizes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bounds_k", WRONG, ids=str)
@pytest.mark.parametrize("bounds_q", [[0, 20, 40], *WRONG], ids=str)
def test_selection(bounds_q: list[int], bounds_k: list[int], causal: bool, gpu: str) -> None:
    pack = pack_for("cuda", torch.cuda.current_device())
    per_key = torch.randn(HEADS, 1, TOTAL_K, device=gpu)
    if causal:
        start, around_start = surrounded((HEADS, TOTAL_K), torch.int32)
        end, around_end = surrounded((HEADS, TOTAL_K), torch.int32)
        assert _core.select(pack, 1, (start, end), inputs(per_key, bounds_q, bounds_k, causal))
        assert_untouched(start, around_start)
        assert_untouched(end, around_end)
    else:
        keep, around_keep = surrounded((HEADS, 1, TOTAL_K), torch.bool)
        assert _core.select(pack, 1, (keep,), inputs(per_key, bounds_q, bounds_k, causal))
        assert_untouched(keep, around_keep, 1)

    per_query = torch.randn(HEADS, TOTAL_Q, LONGEST_K, device=gpu)
    keep, around_keep = surrounded((HEADS, TOTAL_Q, LONGEST_K), torch.bool)
    assert _core.select(pack, 1, (keep,), inputs(per_query, bounds_q, bounds_k, causal))
    assert_untouched(keep, around_keep, 1)
