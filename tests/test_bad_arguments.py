# SPDX-License-Identifier: BSD-3-Clause
"""Each wrong argument has its own message: argument, value, allowed values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flash_dmattn import IntervalMask, flash_dmattn_func, flash_dmattn_varlen_func
from good_arguments import dense, intervals, on_device, varlen, zeros
from support import Target, randn

DENSE_CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query is a list": ({"query": [1.0]}, TypeError, r"query must be a torch.Tensor, got list"),
    "key is a number": ({"key": 3}, TypeError, r"key must be a torch.Tensor, got int"),
    "key is None": ({"key": None}, TypeError, r"key must be a torch.Tensor, got None"),
    "value is None": ({"value": None}, TypeError, r"value must be a torch.Tensor, got None"),
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
        {"attn_bias": randn(2, 2, 5, 7).double()},
        TypeError,
        r"attn_bias .*float64",
    ),
    "sink of another dtype": ({"sink": randn(4).double()}, TypeError, r"sink .*float64"),
    "sink of other heads": ({"sink": randn(2)}, ValueError, r"sink .*\(2,\).*\(4,\)"),
    "sink of two dimensions": ({"sink": randn(1, 4)}, ValueError, r"sink .*\(1, 4\)"),
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
    "window of more bits than an integer has": (
        {"window_size": 2**63, "attn_bias": randn(2, 2, 1, 7)},
        ValueError,
        r"window_size must be at most 9223372036854775807, got 9223372036854775808",
    ),
    "window is a flag": (
        {"window_size": True, "attn_bias": randn(2, 2, 1, 7)},
        TypeError,
        r"window_size must be an integer, got True",
    ),
    "flag is text": (
        {"is_causal": "no"},
        TypeError,
        r"is_causal must be True, False or None, got 'no'",
    ),
    "query of NumPy": (
        {"query": np.full((2, 5, 4, 8), 123.0, np.float32)},
        TypeError,
        r"^query must be a torch.Tensor, got ndarray of shape \(2, 5, 4, 8\) and dtype float32; "
        r"torch.from_numpy\(query\) makes a tensor of it$",
    ),
    "nested key": (
        {"key": torch.nested.nested_tensor([torch.ones(7, 2, 8)], layout=torch.jagged)},
        TypeError,
        r"key must be a dense torch.Tensor, got a nested one; flash_dmattn_varlen_func takes",
    ),
    "sparse mask": (
        {"attn_mask": torch.ones(2, 7, dtype=torch.bool).to_sparse()},
        TypeError,
        r"attn_mask must be a torch.Tensor of layout torch.strided, got torch.sparse_coo; "
        r"attn_mask.to_dense\(\) is one",
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
