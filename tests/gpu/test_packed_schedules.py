# SPDX-License-Identifier: BSD-3-Clause
"""The division of the key blocks of many packed sequences over a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import flash_dmattn_varlen_func
from support import randn


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("blocks", "sequences"), [(3, 176), (5, 106), (6, 88), (7, 76)])
def test_many_sequences_of_few_blocks(
    blocks: int, sequences: int, deterministic: bool, gpu: str
) -> None:
    """Each key block is computed once: the gradients equal those of calls with few sequences."""
    generator = torch.Generator().manual_seed(blocks)
    longest = 128 * blocks
    lengths = torch.randint(longest - 127, longest + 1, (sequences,), generator=generator)
    total = int(lengths.sum())
    *tensors, dout = (randn(total, 2, 16, dtype=torch.bfloat16, seed=n).to(gpu) for n in range(4))

    def gradients(first: int, past: int) -> tuple[Tensor, ...]:
        begin, end = int(lengths[:first].sum()), int(lengths[:past].sum())
        leaves = [tensor[begin:end].detach().requires_grad_() for tensor in tensors]
        cu_seqlens = lengths[first:past].cumsum(0)
        cu_seqlens = torch.nn.functional.pad(cu_seqlens, (1, 0)).to(gpu, torch.int32)
        out = flash_dmattn_varlen_func(
            *leaves,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            is_causal=True,
            deterministic=deterministic,
        )
        return torch.autograd.grad(out, leaves, dout[begin:end])

    parts = [gradients(n, min(n + 20, sequences)) for n in range(0, sequences, 20)]
    for got, want in zip(
        gradients(0, sequences), map(torch.cat, zip(*parts, strict=True)), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-2, rtol=2e-2)
