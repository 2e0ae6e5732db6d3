# SPDX-License-Identifier: BSD-3-Clause
"""Every wrong argument has its own message: argument, value and allowed values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flash_dmattn import _core

from .core_calls import (
    HK,
    TOTAL_K,
    B,
    Call,
    D,
    H,
    K,
    Q,
    batch_call,
    int32,
    paged_call,
    refused,
    varlen_call,
    zeros,
)
from .core_packs import CPU, CUDA

START = zeros(B, HK, K, dtype="int32")
SELECTING = {"window": 3, "causal": True, "bias": zeros(B, H, K)}
OTHER_DEVICE = (4096, "float32", (B, K, HK, D), (K * HK * D, HK * D, D, 1), CUDA, 0)


def case(name: str, call: Any, exception: type[Exception], *fragments: str) -> Any:
    return pytest.param(call, exception, fragments, id=name)


PROBLEMS = [
    # One argument alone: type, dtype, rank, memory, device.
    case("query not a tensor", batch_call(query="x"), TypeError, "query", "str", "torch.Tensor"),
    case("query short tuple", batch_call(query=(1, 2)), TypeError, "query", "2 items", "data_ptr"),
    case(
        "query bad tuple",
        batch_call(query=(1, 2, (3,), (1,), CPU, 0)),
        TypeError,
        "query",
        "data_ptr",
    ),
    case(
        "query unknown dtype",
        batch_call(query=(64, "float7", (3,), (1,), CPU, 0)),
        TypeError,
        "query",
        "float7",
    ),
    case(
        "query negative size",
        batch_call(query=(64, "float32", (-3,), (1,), CPU, 0)),
        ValueError,
        "query",
        "(-3,)",
    ),
    case(
        "query size not an integer",
        batch_call(query=(64, "float32", (2.5,), (1,), CPU, 0)),
        TypeError,
        "query",
        "float",
    ),
    case("query rank 9", batch_call(query=zeros(*[1] * 9)), ValueError, "query", "9 dimensions"),
    case(
        "query no memory",
        batch_call(query=(0, "float32", (B, Q, H, D), (1, 1, 1, 1), CPU, 0)),
        ValueError,
        "query",
        "(2, 5, 4, 8)",
        "no memory",
    ),
    case(
        "query dtype",
        batch_call(query=zeros(B, Q, H, D, dtype="float64")),
        TypeError,
        "query",
        "float64",
        "float32 or float16",
    ),
    case("query rank", batch_call(query=zeros(Q, H, D)), ValueError, "query", "(5, 4, 8)", "4 dim"),
    case("varlen query rank", varlen_call(query=zeros(1, 6, H, D)), ValueError, "query", "3 dim"),
    case(
        "head_dim",
        batch_call(query=zeros(B, Q, H, 257)),
        ValueError,
        "query",
        "(2, 5, 4, 257)",
        "1 to 256",
    ),
    case("head_dim 0", batch_call(query=zeros(B, Q, H, 0)), ValueError, "query", "(2, 5, 4, 0)"),
    case(
        "key dtype",
        batch_call(key=zeros(B, K, HK, D, dtype="float16")),
        TypeError,
        "key has dtype float16",
        "float32",
    ),
    case(
        "value dtype",
        batch_call(value=zeros(B, K, HK, D, dtype="float16")),
        TypeError,
        "value has dtype float16",
    ),
    case("key device", batch_call(key=OTHER_DEVICE), ValueError, "key is on cuda:0", "on cpu"),
    case(
        "value device", batch_call(value=OTHER_DEVICE), ValueError, "value is on cuda:0", "on cpu"
    ),
    # Query, key and value together.
    case(
        "key rank", batch_call(key=zeros(K, HK, D)), ValueError, "key", "(7, 2, 8)", "4 dimensions"
    ),
    case(
        "key batch",
        batch_call(key=zeros(3, K, HK, D)),
        ValueError,
        "key",
        "(3, 7, 2, 8)",
        "batch 2",
    ),
    case(
        "key head_dim",
        batch_call(key=zeros(B, K, HK, 9)),
        ValueError,
        "key",
        "(2, 7, 2, 9)",
        "head dimension 8",
    ),
    case(
        "heads",
        batch_call(key=zeros(B, K, 3, D), value=zeros(B, K, 3, D)),
        ValueError,
        "query has 4 heads",
        "key has 3",
        "multiple",
    ),
    case("no heads", batch_call(query=zeros(B, Q, 0, D)), ValueError, "query has 0 heads"),
    case(
        "value shape",
        batch_call(value=zeros(B, K + 1, HK, D)),
        ValueError,
        "value",
        "(2, 8, 2, 8)",
        "(2, 7, 2, 8)",
    ),
    # Masks, intervals and biases.
    case(
        "mask dtype",
        batch_call(mask=zeros(B, 1, 1, K)),
        TypeError,
        "attn_mask has dtype float32",
        "bool",
    ),
    case(
        "mask device",
        batch_call(mask=(64, "bool", (B, K), (K, 1), CUDA, 1)),
        ValueError,
        "attn_mask is on cuda:1",
    ),
    case(
        "mask rank",
        batch_call(mask=zeros(K, dtype="bool")),
        ValueError,
        "attn_mask",
        "(7,)",
        "4 dimensions",
    ),
    *[
        case(
            f"mask {shape}",
            batch_call(mask=zeros(*shape, dtype="bool")),
            ValueError,
            "attn_mask",
            str(shape),
            allowed,
        )
        for shape, allowed in [
            ((3, 1, 1, K), "({2|1}, {4|2|1}, {5|1}, {7|1})"),
            ((B, 3, 1, K), "({2|1}, {4|2|1}, {5|1}, {7|1})"),
            ((B, 1, 3, K), "({2|1}, {4|2|1}, {5|1}, {7|1})"),
            ((B, 1, 1, 3), "({2|1}, {4|2|1}, {5|1}, {7|1})"),
            ((B, Q, K), "(batch, heads, keys) = ({2|1}, {4|2|1}, {7|1})"),
            ((Q, K), "(batch, keys) = ({2|1}, {7|1})"),
        ]
    ],
    case(
        "mask twice",
        batch_call(mask=zeros(B, K, dtype="bool"), start=START, end=START),
        ValueError,
        "attn_mask",
        "both",
    ),
    case("start alone", batch_call(start=START), ValueError, "attn_mask.end is None"),
    case("end alone", batch_call(end=START), ValueError, "attn_mask.start is None"),
    case(
        "start dtype",
        batch_call(start=zeros(B, HK, K), end=START),
        TypeError,
        "attn_mask.start has dtype float32",
        "int32",
    ),
    case(
        "start shape",
        batch_call(start=zeros(B, 3, K, dtype="int32"), end=START),
        ValueError,
        "attn_mask.start",
        "(2, 3, 7)",
        "({2|1}, {4|2|1}, 7)",
    ),
    case(
        "end shape",
        batch_call(start=START, end=zeros(1, HK, K, dtype="int32")),
        ValueError,
        "attn_mask.end",
        "(1, 2, 7)",
        "(2, 2, 7)",
    ),
    case(
        "bias dtype",
        batch_call(bias=zeros(B, K, dtype="float16")),
        TypeError,
        "attn_bias has dtype float16",
        "float32",
    ),
    case(
        "bias shape",
        batch_call(bias=zeros(B, H, K, Q)),
        ValueError,
        "attn_bias",
        "(2, 4, 7, 5)",
        "{5|1}, {7|1}",
    ),
    case("sink dtype", batch_call(sink=zeros(H, dtype="float64")), TypeError, "sink", "float64"),
    case("sink shape", batch_call(sink=zeros(HK)), ValueError, "sink has shape (2,)", "(4,)"),
    case("sink rank", batch_call(sink=zeros(1, H)), ValueError, "sink has shape (1, 4)"),
    # Numbers.
    case("scale", batch_call(scale=float("nan")), ValueError, "softmax_scale is nan", "finite"),
    case(
        "scale too large", batch_call(scale=1e300), ValueError, "softmax_scale is 1e+300", "finite"
    ),
    case("softcap", batch_call(softcap=-1.5), ValueError, "softcap is -1.5", "0 (off) or positive"),
    case("softcap infinite", batch_call(softcap=float("inf")), ValueError, "softcap is inf"),
    case("threads", batch_call(threads=0), ValueError, "threads is 0", "at least 1"),
    # Selection within the call.
    *(
        case(
            f"window with {name}",
            batch_call(**{**SELECTING, **change}),
            ValueError,
            "window is 3",
            "only a causal problem with a bias per key",
        )
        for name, change in {
            "all keys visible": {"causal": False},
            "no bias": {"bias": None},
            "a bias per query": {"bias": zeros(B, H, Q, K)},
            "a mask per query": {"mask": zeros(B, 1, Q, K, dtype="bool")},
            "bounds": {"start": START, "end": START},
        }.items()
    ),
    # Packed sequences.
    case("cu_seqlens_k missing", varlen_call(cu_seqlens_k=None), ValueError, "cu_seqlens_k"),
    case("cu_seqlens_q missing", varlen_call(cu_seqlens_q=None), ValueError, "cu_seqlens_q"),
    case(
        "cu_seqlens_q dtype",
        varlen_call(cu_seqlens_q=np.array([0, 2, 6])),
        TypeError,
        "cu_seqlens_q has dtype int64",
        "int32",
    ),
    case(
        "cu_seqlens_q rank",
        varlen_call(cu_seqlens_q=int32(0, 6).reshape(1, 2)),
        ValueError,
        "cu_seqlens_q",
        "(1, 2)",
        "1 dimensions",
    ),
    case("cu_seqlens_q empty", varlen_call(cu_seqlens_q=int32()), ValueError, "(0,)", "batch + 1"),
    case(
        "cu_seqlens_q strides",
        varlen_call(cu_seqlens_q=int32(0, 9, 2, 9, 6)[::2]),
        ValueError,
        "cu_seqlens_q",
        "(2,)",
        "contiguous",
    ),
    case(
        "cu_seqlens_q first",
        varlen_call(cu_seqlens_q=int32(1, 2, 6)),
        ValueError,
        "cu_seqlens_q starts with 1",
    ),
    case(
        "cu_seqlens_k falls",
        varlen_call(cu_seqlens_k=int32(0, 10, 9)),
        ValueError,
        "cu_seqlens_k falls from 10 to 9 at index 2",
    ),
    case(
        "cu_seqlens_q last",
        varlen_call(cu_seqlens_q=int32(0, 2, 5)),
        ValueError,
        "cu_seqlens_q ends with 5",
        "query, 6",
    ),
    case(
        "cu_seqlens_k last",
        varlen_call(cu_seqlens_k=int32(0, 3, 8)),
        ValueError,
        "cu_seqlens_k ends with 8",
        "key, 9",
    ),
    case(
        "cu_seqlens batch",
        varlen_call(cu_seqlens_k=int32(0, 3, 3, 9)),
        ValueError,
        "cu_seqlens_k has shape (4,)",
        "(3,)",
    ),
    case(
        "max_seqlen_q",
        varlen_call(max_seqlen_q=3),
        ValueError,
        "max_seqlen_q is 3",
        "at least 4",
    ),
    case(
        "max_seqlen_k",
        varlen_call(max_seqlen_k=-2),
        ValueError,
        "max_seqlen_k is -2",
        "at least 0",
    ),
    case(
        "varlen mask",
        varlen_call(mask=zeros(1, 1, 6, dtype="bool")),
        ValueError,
        "attn_mask has shape (1, 1, 6)",
        "({4|2|1}, 1, 9) or",
        "({4|2|1}, 6, 6)",
    ),
    case(
        "varlen start",
        varlen_call(start=START, end=START),
        ValueError,
        "attn_mask.start has shape (2, 2, 7)",
        "({4|2|1}, 9)",
    ),
    # Pages.
    case(
        "block_table without sequences",
        batch_call(block_table=int32(0).reshape(1, 1)),
        ValueError,
        "block_table",
        "cu_seqlens_q",
    ),
    case(
        "paged key rank",
        paged_call(key=zeros(TOTAL_K, HK, D)),
        ValueError,
        "key has shape (9, 2, 8)",
        "(pages, page size, heads, head_dim)",
    ),
    case(
        "page size",
        paged_call(key=zeros(5, 0, HK, D), value=zeros(5, 0, HK, D)),
        ValueError,
        "key has shape (5, 0, 2, 8)",
    ),
    case(
        "block_table dtype",
        paged_call(block_table=zeros(2, 2)),
        TypeError,
        "block_table has dtype float32",
        "int32",
    ),
    case(
        "block_table rows",
        paged_call(block_table=zeros(3, 2, dtype="int32")),
        ValueError,
        "block_table has shape (3, 2)",
        "2 sequences",
    ),
    case(
        "block_table columns",
        paged_call(block_table=zeros(2, 1, dtype="int32")),
        ValueError,
        "block_table has shape (2, 1)",
        "6 keys",
        "2 pages of size 4",
    ),
    case(
        "block_table page",
        paged_call(block_table=int32(0, 0, 1, 5).reshape(2, 2)),
        ValueError,
        "block_table has the value 5 at index (1, 1)",
        "0 to 4",
    ),
]


@pytest.mark.parametrize(("call", "exception", "fragments"), PROBLEMS)
def test_problem(
    pack: _core.Pack, call: Call, exception: type[Exception], fragments: tuple[str, ...]
) -> None:
    refused(lambda: call.problem(pack), exception, fragments)
