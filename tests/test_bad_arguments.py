# SPDX-License-Identifier: BSD-3-Clause
"""Each wrong argument has its own message: the argument, its value, what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dmattn import (
    IntervalMask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
)
from support import Target, randn

BOUNDS = torch.tensor([0, 4, 10], dtype=torch.int32)


def dense(target: Target, **changes: Any) -> dict[str, Any]:
    """Return good arguments: B 2, Q 5, K 7, H 4, Hk 2, D 8."""
    arguments: dict[str, Any] = {
        "query": randn(2, 5, 4, 8),
        "key": randn(2, 7, 2, 8),
        "value": randn(2, 7, 2, 8),
        "backend": target.backend,
    }
    return arguments | changes


def varlen(target: Target, **changes: Any) -> dict[str, Any]:
    """Return good arguments: two sequences of 4 and 6 rows."""
    arguments: dict[str, Any] = {
        "query": randn(10, 4, 8),
        "key": randn(10, 2, 8),
        "value": randn(10, 2, 8),
        "cu_seqlens_q": BOUNDS,
        "cu_seqlens_k": BOUNDS,
        "max_seqlen_q": 6,
        "max_seqlen_k": 6,
        "backend": target.backend,
    }
    return arguments | changes


def on_device(target: Target, arguments: dict[str, Any]) -> dict[str, Any]:
    dtype = target.dtypes[0]

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            value = value.to(dtype)
        if isinstance(value, (torch.Tensor, IntervalMask)) and value.device.type == "cpu":
            return value.to(target.device)
        return value

    return {name: convert(value) for name, value in arguments.items()}


def zeros(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def intervals(*shape: int) -> IntervalMask:
    return IntervalMask(zeros(*shape, dtype=torch.int32), zeros(*shape, dtype=torch.int32))


DENSE_CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query is a list": ({"query": [1.0]}, TypeError, r"query must be a torch.Tensor, got list"),
    "key is None": ({"key": 3}, TypeError, r"key must be a torch.Tensor, got int"),
    "mask is a list": (
        {"attn_mask": [True]},
        TypeError,
        r"attn_mask must be a boolean torch.Tensor, an IntervalMask or None, got list",
    ),
    "bias is an interval mask": (
        {"attn_bias": intervals(1, 1, 7)},
        TypeError,
        r"attn_bias must be a torch.Tensor, got an IntervalMask",
    ),
    "mask is no bool": (
        {"attn_mask": zeros(2, 1, 1, 7, dtype=torch.int32)},
        TypeError,
        r"attn_mask must have dtype torch.bool .*got torch.int32",
    ),
    "window within a mask that is no bool": (
        {
            "attn_mask": zeros(2, 1, 1, 7, dtype=torch.float32),
            "attn_bias": randn(2, 2, 1, 7),
            "window_size": 3,
        },
        TypeError,
        r"attn_mask must have dtype torch.bool .*got torch.float",
    ),
    "mixed dtypes": (
        {"key": randn(2, 7, 2, 8, dtype=torch.bfloat16)},
        TypeError,
        r"query, key and value must have one dtype, got .*key torch.bfloat16",
    ),
    "integer query": (
        {
            n: zeros(2, r, h, 8, dtype=torch.int32)
            for n, r, h in (("query", 5, 4), ("key", 7, 2), ("value", 7, 2))
        },
        TypeError,
        r"query .*int32",
    ),
    "bias of another dtype": (
        {"attn_bias": randn(2, 2, 1, 7).double()},
        TypeError,
        r"attn_bias .*float64",
    ),
    "key elsewhere": (
        {"key": torch.empty(2, 7, 2, 8, device="meta")},
        ValueError,
        r"key must be on query's device .*got a tensor on meta",
    ),
    "mask elsewhere": (
        {"attn_mask": torch.empty(2, 1, 1, 7, device="meta", dtype=torch.bool)},
        ValueError,
        r"attn_mask must be on query's device .*got a tensor on meta",
    ),
    "query of three dimensions": ({"query": randn(5, 4, 8)}, ValueError, r"query .*\(5, 4, 8\)"),
    "value of another shape": ({"value": randn(2, 6, 2, 8)}, ValueError, r"value .*\(2, 6, 2, 8\)"),
    "another batch": (
        {"key": randn(3, 7, 2, 8), "value": randn(3, 7, 2, 8)},
        ValueError,
        r"key .*batch",
    ),
    "another head dimension": (
        {"key": randn(2, 7, 2, 9), "value": randn(2, 7, 2, 9)},
        ValueError,
        r"key .*head dimension 8",
    ),
    "heads that do not divide": (
        {"key": randn(2, 7, 3, 8), "value": randn(2, 7, 3, 8)},
        ValueError,
        r"4 .*3",
    ),
    "no key heads": (
        {"key": randn(2, 7, 0, 8), "value": randn(2, 7, 0, 8)},
        ValueError,
        r"heads",
    ),
    "head dimension of 0": (
        {"query": randn(2, 5, 4, 0), "key": randn(2, 7, 2, 0), "value": randn(2, 7, 2, 0)},
        ValueError,
        r"query .*from 1 to 256",
    ),
    "head dimension of 257": (
        {"query": randn(1, 5, 1, 257), "key": randn(1, 7, 1, 257), "value": randn(1, 7, 1, 257)},
        ValueError,
        r"query .*from 1 to 256",
    ),
    "mask of five dimensions": (
        {"attn_mask": zeros(1, 2, 1, 1, 7)},
        ValueError,
        r"attn_mask .*\(1, 2, 1, 1, 7\)",
    ),
    "mask of another batch": (
        {"attn_mask": zeros(3, 1, 1, 7)},
        ValueError,
        r"attn_mask .*\(3, 1, 1, 7\)",
    ),
    "mask of other heads": (
        {"attn_mask": zeros(2, 3, 1, 7)},
        ValueError,
        r"attn_mask .*\(2, 3, 1, 7\)",
    ),
    "mask of other rows": (
        {"attn_mask": zeros(2, 1, 4, 7)},
        ValueError,
        r"attn_mask .*\(2, 1, 4, 7\)",
    ),
    "mask of other keys": (
        {"attn_mask": zeros(2, 1, 1, 8)},
        ValueError,
        r"attn_mask .*\(2, 1, 1, 8\)",
    ),
    "two-dimensional mask of another batch": (
        {"attn_mask": zeros(5, 7)},
        ValueError,
        r"attn_mask with 2 dimensions .*\(B, K\) = \(2, 7\), got \(5, 7\)",
    ),
    "two-dimensional bias of other keys": (
        {"attn_bias": randn(2, 8)},
        ValueError,
        r"attn_bias with 2 dimensions .*\(B, K\) = \(2, 7\), got \(2, 8\)",
    ),
    "three-dimensional mask of other heads": (
        {"attn_mask": zeros(2, 5, 7)},
        ValueError,
        r"attn_mask with 3 dimensions .*= \(2, \{4\|2\|1\}, 7\), got \(2, 5, 7\)",
    ),
    "selection mask of other keys": (
        {"attn_mask": zeros(2, 8), "attn_bias": randn(2, 7), "window_size": 3},
        ValueError,
        r"attn_mask with 2 dimensions .*got \(2, 8\)",
    ),
    "selection bias of another batch": (
        {"attn_bias": randn(3, 1, 1, 7), "window_size": 3},
        ValueError,
        r"attn_bias must have batch size 2 or 1, .*got \(3, 1, 1, 7\)",
    ),
    "intervals of another number of queries": (
        {"attn_mask": IntervalMask.sliding_window(3, 0, 7, 7)},
        ValueError,
        r"attn_mask: .* made for query_length=7 cannot mask 5 queries",
    ),
    "scale that should learn": (
        {"softmax_scale": torch.ones((), dtype=torch.float64).requires_grad_()},
        TypeError,
        r"softmax_scale must be a number, got a tensor that requires a gradient",
    ),
    "scale is a number in text": (
        {"softmax_scale": "0.5"},
        TypeError,
        r"softmax_scale must be a number or None, got '0.5'",
    ),
    "bias of other heads": (
        {"attn_bias": randn(2, 3, 1, 7)},
        ValueError,
        r"attn_bias .*\(2, 3, 1, 7\)",
    ),
    "bias of other rows": (
        {"attn_bias": randn(2, 2, 7, 7)},
        ValueError,
        r"attn_bias .*\(2, 2, 7, 7\)",
    ),
    "intervals of other keys": (
        {"attn_mask": intervals(1, 1, 6)},
        ValueError,
        r"attn_mask.start .*\(1, 1, 6\)",
    ),
    "packed intervals": ({"attn_mask": intervals(1, 7)}, ValueError, r"attn_mask.start .*\(1, 7\)"),
    "infinite scale": ({"softmax_scale": float("inf")}, ValueError, r"softmax_scale .*inf"),
    "scale is text": (
        {"softmax_scale": "big"},
        TypeError,
        r"softmax_scale must be a number or None, got 'big'",
    ),
    "negative softcap": ({"softcap": -1.0}, ValueError, r"softcap .*-1"),
    "softcap is NaN": ({"softcap": float("nan")}, ValueError, r"softcap .*nan"),
    "window without a bias": (
        {"window_size": 3},
        ValueError,
        r"window_size .*attn_bias is None; pass a bias, or an IntervalMask.sliding_window",
    ),
    "window with intervals": (
        {"window_size": 3, "attn_bias": randn(2, 2, 1, 7), "attn_mask": intervals(1, 1, 7)},
        ValueError,
        r"window_size cannot be combined with an IntervalMask",
    ),
    "negative window": (
        {"window_size": -3, "attn_bias": randn(2, 2, 1, 7)},
        ValueError,
        r"window_size must be at least 0, got -3",
    ),
}


@pytest.mark.parametrize("case", DENSE_CASES)
def test_dense(case: str, target: Target) -> None:
    changes, error, message = DENSE_CASES[case]
    with pytest.raises(error, match=message):
        flash_dmattn_func(**on_device(target, dense(target, **changes)))


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
        # Moving to another device would make it contiguous.
        arguments["cu_seqlens_q"] = BOUNDS.to(target.device).repeat_interleave(2)[::2]
    with pytest.raises(error, match=message):
        flash_dmattn_varlen_func(**arguments)


@pytest.mark.parametrize(
    "backend, error, message",
    [
        ("refrence", ValueError, r"got 'refrence'. Did you mean 'reference'\?"),
        ("nothing like it", ValueError, r"backend must be None, 'auto' or one of .*'cuda'"),
        (3, TypeError, r"backend must be a string or None, got 3"),
        ("cuda", ValueError, r"backend='cuda' runs on cuda tensors, but query is on cpu"),
    ],
)
def test_backend(backend: object, error: type[Exception], message: str) -> None:
    arguments = dense(Target("cpu", "cpu"), backend=backend)
    with pytest.raises(error, match=message):
        flash_dmattn_func(**arguments)


def test_good_arguments_are_good(target: Target) -> None:
    flash_dmattn_func(**on_device(target, dense(target)))
    flash_dmattn_varlen_func(**on_device(target, varlen(target)))
