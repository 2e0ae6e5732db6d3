# SPDX-License-Identifier: BSD-3-Clause
"""The helpers that keep the signatures of flash-dmattn 1.2.2."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn.utils.mask import create_mask, dynamic_mask
from flash_dmattn.utils.padding import (
    get_unpad_data,
    index_first_axis,
    pad_input,
    unpad_input,
    upad_input,
)
from support import rand_bool, randn

MIN = torch.finfo(torch.float32).min


def test_dynamic_mask_keeps_the_largest() -> None:
    bias, mask = randn(2, 2, 5, 30), rand_bool(2, 1, 5, 30, density=0.2)
    keep = dynamic_mask(bias, mask, 8, MIN)
    assert keep.shape == bias.shape
    assert not (keep & ~mask).any()
    for kept, row, seen in zip(
        keep.flatten(0, 2), bias.flatten(0, 2), mask.expand_as(bias).flatten(0, 2), strict=True
    ):
        count = min(8, int(seen.sum()))
        assert kept.sum() == count
        assert torch.equal(
            row[kept].sort().values, row[seen].sort().values[-count:] if count else row[:0]
        )


def test_dynamic_mask_without_a_mask_and_with_a_wide_window() -> None:
    bias = randn(1, 1, 3, 10).requires_grad_()
    assert (dynamic_mask(bias, None, 4, MIN).sum(-1) == 4).all()
    assert dynamic_mask(bias, None, 11, MIN).all()


def test_blocks_are_kept_by_majority() -> None:
    bias = torch.tensor([[[[5.0, 4, 0, 0, 3, 0, 0, 0, 2, 1]]]])
    keep = dynamic_mask(bias, None, 5, MIN, block_size=4)
    # Blocks of 4, 4 and 2 keys have 2, 1 and 2 of the five largest.
    assert keep.flatten().tolist() == [False] * 8 + [True] * 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_create_mask_takes_padding(dtype: torch.dtype) -> None:
    bias = randn(2, 1, 3, 8)
    padding = rand_bool(2, 8).to(dtype)
    keep = create_mask(bias, padding, 2, 3, 8, 4, MIN)
    assert torch.equal(keep, dynamic_mask(bias, padding.bool()[:, None, None], 4, MIN))


def test_create_mask_takes_padding_of_the_queries() -> None:
    bias = randn(2, 1, 3, 8)
    padding = torch.tensor([[True, True, True], [False, True, True]])
    keep = create_mask(bias, padding, 2, 3, 8, 8, MIN)
    expected = torch.ones(2, 8, dtype=torch.bool)
    expected[1, 5] = False
    assert torch.equal(keep, expected[:, None, None].expand_as(keep))


def test_create_mask_takes_four_dimensions_or_none() -> None:
    bias, mask = randn(2, 1, 3, 8), rand_bool(2, 1, 3, 8)
    assert torch.equal(create_mask(bias, mask, 2, 3, 8, 4, MIN), dynamic_mask(bias, mask, 4, MIN))
    assert create_mask(bias, None, 2, 3, 8, 8, MIN).all()
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 8\) or \(2, 3\)"):
        create_mask(bias, torch.ones(2, 5, dtype=torch.bool), 2, 3, 8, 4, MIN)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_and_pad_are_inverse(dtype: torch.dtype) -> None:
    mask = rand_bool(3, 7).to(dtype)
    mask[1] = 0
    hidden = randn(3, 7, 2, 4)
    packed, indices, cu_seqlens, longest, used = unpad_input(hidden, mask)
    lengths = mask.bool().sum(-1)
    assert packed.shape == (int(lengths.sum()), 2, 4)
    assert cu_seqlens.dtype == torch.int32
    assert torch.equal(cu_seqlens.diff(), lengths.to(torch.int32))
    assert longest == lengths.max()
    assert torch.equal(used, lengths.to(torch.int32))
    padded = pad_input(packed, indices, 3, 7)
    assert torch.equal(padded, hidden * mask.bool()[:, :, None, None])


def test_unpad_packs_unused_places_too() -> None:
    mask = torch.tensor([[1, 1, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0]])
    _, indices, cu_seqlens, longest, used = unpad_input(randn(1, 4, 2), mask, unused)
    assert indices.tolist() == [0, 1, 2]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3], 3, [2])


def test_unpad_data_and_first_axis() -> None:
    indices, cu_seqlens, longest = get_unpad_data(torch.tensor([[1, 0, 1], [0, 0, 1]]))
    assert (indices.tolist(), cu_seqlens.tolist(), longest) == ([0, 2, 5], [0, 2, 3], 2)
    hidden = randn(2, 3, 4)
    assert torch.equal(index_first_axis(hidden, indices), hidden.reshape(6, 4)[indices])


@pytest.mark.parametrize("query_length", [6, 1, 3])
def test_upad_input(query_length: int) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    query, key, value = randn(2, query_length, 4, 8), randn(2, 8, 2, 8), randn(2, 8, 2, 8)
    q, k, v, indices, (cu_q, cu_k), (longest_q, longest_k) = upad_input(
        query, key, value, mask, query_length, unpad_input
    )
    rows = {6: [6, 3], 1: [1, 1], 3: [3, 3]}[query_length]
    assert cu_q.diff().tolist() == rows
    assert (longest_q, longest_k) == (max(rows), 6)
    assert cu_k.diff().tolist() == [6, 3]
    assert torch.equal(k, torch.cat([key[0, :6], key[1, 3:6]]))
    assert torch.equal(v, torch.cat([value[0, :6], value[1, 3:6]]))
    assert q.shape == (sum(rows), 4, 8)
    assert len(indices) == sum(rows)
    assert cu_q.dtype == cu_k.dtype == torch.int32
