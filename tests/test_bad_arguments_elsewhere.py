# SPDX-License-Identifier: BSD-3-Clause
"""Messages for wrong arguments of masks, selection, the cache and the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_dmattn import AttentionCache, DynamicMaskAttention, IntervalMask, dynamic_mask
from good_arguments import BOUNDS

_MASK = IntervalMask.sliding_window(2, 0, 5, 5)
_ROWS = torch.ones(5, 5, dtype=torch.bool)
_EMPTY = torch.tensor([], dtype=torch.int32)
_SHORT = torch.tensor([0, 4, 9], dtype=torch.int32)


def packed(**changes: Any) -> Any:
    arguments = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS, "is_causal": True}
    return dynamic_mask(torch.zeros(1, 1, 10), 3, **{**arguments, **changes})


def cache_of_two() -> AttentionCache:
    cache = AttentionCache()
    cache.append(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4), torch.zeros(2, 2, 1, 3))
    return cache


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "mask & tensor": (
        lambda: _MASK & _ROWS,
        TypeError,
        r"& of an IntervalMask needs another IntervalMask, got a torch.bool tensor of shape "
        r"\(5, 5\); to_bool\(query_length\) makes a boolean tensor",
    ),
    "tensor & mask": (lambda: _ROWS & _MASK, TypeError, "& of an IntervalMask needs another"),
    "no bias": (
        lambda: dynamic_mask(None, 3),  # type: ignore[arg-type]
        TypeError,
        "attn_bias must be a torch.Tensor, got None",
    ),
    "no bounds": (
        lambda: packed(cu_seqlens_q=_EMPTY),
        ValueError,
        r"cu_seqlens_q must have shape \(B \+ 1,\), got \(0,\)",
    ),
    "longest too short": (
        lambda: packed(max_seqlen_q=3),
        ValueError,
        "max_seqlen_q is 3, but must be at least 6, the longest sequence of cu_seqlens_q",
    ),
    "bounds that end early": (
        lambda: packed(cu_seqlens_k=_SHORT),
        ValueError,
        r"attn_bias has shape \(1, 1, 10\), but .* 1, 9\) .*where cu_seqlens_k ends with total_k",
    ),
    "bounds that end early, by the reference": (
        lambda: packed(cu_seqlens_k=_SHORT, backend="reference"),
        ValueError,
        r"attn_bias has shape \(1, 1, 10\), but .* 1, 9\) .*where cu_seqlens_k ends with total_k",
    ),
    "a list of sequences": (
        lambda: cache_of_two().reorder([1, 0]),  # type: ignore[arg-type]
        TypeError,
        "indices must be a torch.Tensor of integers, got list of length 2",
    ),
    "a sequence that is not there": (
        lambda: cache_of_two().reorder(torch.tensor([1, 2])),
        ValueError,
        "indices must be from 0 to 1, as the cache holds 2 sequences, got 2",
    ),
    "input of another dtype": (
        lambda: DynamicMaskAttention(16, 4)(torch.zeros(2, 3, 16, dtype=torch.bfloat16)),
        TypeError,
        "hidden_states must have dtype torch.float32, as the layer's parameters, got torch.bf",
    ),
    "a window of yes": (
        lambda: DynamicMaskAttention(16, 4, window_size=True),
        TypeError,
        "window_size must be an integer, got True",
    ),
    "a device that is none": (
        lambda: _MASK.to("nowhere"),
        ValueError,
        "device must name a device of torch, got 'nowhere'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_text(case: str) -> None:
    call, error, message = CASES[case]
    with pytest.raises(error, match=message):
        call()
