# SPDX-License-Identifier: BSD-3-Clause
"""Each wrong argument of packed sequences has its own message, as in test_bad_arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dmattn import flash_dmattn_varlen_func
from good_arguments import BOUNDS, intervals, on_device, varlen, zeros
from support import Target, randn

VARLEN_CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no bounds": (
        {"cu_seqlens_k": None},
        TypeError,
        r"cu_seqlens_k must be an int32 tensor of shape \(B \+ 1,\), got None",
    ),
    "bounds are a list": (
        {"cu_seqlens_q": [0, 4, 10]},
        TypeError,
        r"cu_seqlens_q must be a torch.Tensor, got list",
    ),
    "bounds of int64": ({"cu_seqlens_q": BOUNDS.long()}, TypeError, r"cu_seqlens_q .*int64"),
    "bounds of two dimensions": (
        {"cu_seqlens_q": BOUNDS[None]},
        ValueError,
        r"cu_seqlens_q .*\(1, 3\)",
    ),
    "strided bounds": (
        {"cu_seqlens_q": BOUNDS.repeat_interleave(2)[::2]},
        ValueError,
        r"cu_seqlens_q .*contiguous",
    ),
    "bounds of another length": (
        {"cu_seqlens_k": torch.tensor([0, 10], dtype=torch.int32), "max_seqlen_k": 10},
        ValueError,
        r"cu_seqlens_k",
    ),
    "bounds that begin late": (
        {"cu_seqlens_q": torch.tensor([1, 4, 10], dtype=torch.int32)},
        ValueError,
        r"cu_seqlens_q .*0",
    ),
    "bounds that fall": (
        {"cu_seqlens_q": torch.tensor([0, 12, 10], dtype=torch.int32), "max_seqlen_q": 20},
        ValueError,
        r"cu_seqlens_q .*12",
    ),
    "bounds that end early": (
        {"cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32)},
        ValueError,
        r"cu_seqlens_k .*(9|10)",
    ),
    "longest too short": ({"max_seqlen_q": 5}, ValueError, r"max_seqlen_q .*5"),
    "longest key too short": ({"max_seqlen_k": 5}, ValueError, r"max_seqlen_k .*5"),
    "longest is no integer": (
        {"max_seqlen_k": 6.5},
        TypeError,
        r"max_seqlen_k must be an integer, got 6.5",
    ),
    "query of four dimensions": (
        {"query": randn(1, 10, 4, 8)},
        ValueError,
        r"query .*\(1, 10, 4, 8\)",
    ),
    "key of four dimensions": ({"key": randn(1, 10, 2, 8)}, ValueError, r"key .*\(1, 10, 2, 8\)"),
    "dense mask": ({"attn_mask": zeros(2, 1, 1, 6)}, ValueError, r"attn_mask .*\(2, 1, 1, 6\)"),
    "mask of other keys": ({"attn_mask": zeros(1, 1, 9)}, ValueError, r"attn_mask .*\(1, 1, 9\)"),
    "mask of the row of one query": (
        {
            "query": randn(1, 4, 8),
            "cu_seqlens_q": torch.tensor([0, 1, 1], dtype=torch.int32),
            "attn_mask": zeros(2, 1, 6),
        },
        ValueError,
        r"attn_mask .*with one query must have shape \(heads, 1, total_k\) = \(.*, 1, 10\), where",
    ),
    "bias of other rows": ({"attn_bias": randn(2, 9, 6)}, ValueError, r"attn_bias .*\(2, 9, 6\)"),
    "dense intervals": (
        {"attn_mask": intervals(1, 1, 10)},
        ValueError,
        r"attn_mask.start .*\(1, 1, 10\)",
    ),
    "pages without gradients": (
        {
            "key": randn(3, 4, 2, 8).requires_grad_(),
            "value": randn(3, 4, 2, 8),
            "block_table": zeros(2, 2, dtype=torch.int32),
        },
        ValueError,
        r"block_table: paged keys and values .*no gradient",
    ),
    "table of another batch": (
        {
            "key": randn(3, 4, 2, 8),
            "value": randn(3, 4, 2, 8),
            "block_table": zeros(1, 2, dtype=torch.int32),
        },
        ValueError,
        r"block_table .*\(1, 2\)",
    ),
    "table of int64": (
        {
            "key": randn(3, 4, 2, 8),
            "value": randn(3, 4, 2, 8),
            "block_table": zeros(2, 2, dtype=torch.int64),
        },
        TypeError,
        r"block_table .*int64",
    ),
    "table of too few pages": (
        {
            "key": randn(3, 4, 2, 8),
            "value": randn(3, 4, 2, 8),
            "block_table": zeros(2, 1, dtype=torch.int32),
        },
        ValueError,
        r"block_table .*\(2, 1\)",
    ),
}


@pytest.mark.parametrize("case", VARLEN_CASES)
def test_varlen(case: str, target: Target) -> None:
    reads_no_values = target.device == "cuda" and target.backend in ("cuda", "triton")
    if reads_no_values and any(word in case for word in ("bounds that", "longest", "few")):
        pytest.skip("values on a GPU are not read by the host; the kernels stay inside the tensors")
    changes, error, message = VARLEN_CASES[case]
    arguments = on_device(target, varlen(target, **changes))
    if case == "strided bounds":
        # A copy to another device would be contiguous.
        arguments["cu_seqlens_q"] = BOUNDS.to(target.device).repeat_interleave(2)[::2]
    with pytest.raises(error, match=message):
        flash_dmattn_varlen_func(**arguments)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias", "sink"])
def test_paged_keys_have_no_gradient(name: str, target: Target) -> None:
    """Any of the tensors may require a gradient; without gradients the call is valid."""
    dtype = target.dtypes[0]
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    pages = {"key": randn(4, 4, 2, 8), "value": randn(4, 4, 2, 8), "block_table": table}
    added = {"attn_bias": randn(1, 1, 10), "sink": randn(4)}
    arguments = on_device(target, varlen(target, **pages, **added))
    arguments[name] = arguments[name].to(dtype).requires_grad_()
    with torch.no_grad():
        flash_dmattn_varlen_func(**arguments)
    with pytest.raises(ValueError, match=r"block_table: paged keys and values .*no gradient"):
        flash_dmattn_varlen_func(**arguments)
