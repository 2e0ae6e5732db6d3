# SPDX-License-Identifier: BSD-3-Clause
"""Selections of packed sequences that exceed one thread block."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn import IntervalMask, dynamic_mask
from support import randn

LENGTHS = [257, 4999, 0, 1, 6000, 300, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_every_sequence_has_its_own_windows(causal: bool, gpu: str) -> None:
    """Sequences begin inside of key chunks and have many chunks or none."""
    bias = randn(2, 1, sum(LENGTHS), seed=0).to(gpu)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(gpu, torch.int32)
    longest = max(LENGTHS)
    got = dynamic_mask(
        bias,
        200,
        causal,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
    )
    begin = 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        begin += length
        if length == 0:
            continue
        want = dynamic_mask(
            bias[None, ..., own], 200, causal, query_length=length, key_length=length
        )
        if isinstance(got, torch.Tensor):
            assert isinstance(want, torch.Tensor)
            assert torch.equal(got[..., own], want[0])
        else:
            assert isinstance(want, IntervalMask)
            assert torch.equal(got.start[..., own], want.start[0])
            assert torch.equal(got.end[..., own], want.end[0])
