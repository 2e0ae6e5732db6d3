# SPDX-License-Identifier: BSD-3-Clause
"""Every wrong result, buffer and selection argument has its own message."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from flash_dmattn import _core

from .core_calls import (
    HK,
    SELECTION,
    TOTAL_Q,
    B,
    D,
    H,
    K,
    Q,
    batch_call,
    int32,
    refused,
    to_core,
    varlen_call,
    zeros,
)
from .core_packs import CUDA, as_tuple

START = zeros(B, HK, K, dtype="int32")
PLAN = zeros(4096, dtype="uint8")
FORWARD = {"out": zeros(B, Q, H, D), "lse": zeros(B, H, Q), "plan": PLAN, "workspace": None}
BACKWARD: dict[str, Any] = {
    **FORWARD,
    "dout": zeros(B, Q, H, D),
    "dlse": None,
    "dbias": None,
    "dsink": None,
    "dq": zeros(B, Q, H, D),
    "dk": zeros(B, K, HK, D),
    "dv": zeros(B, K, HK, D),
}
SHARED = np.broadcast_to(zeros(B, Q, 1, D), (B, Q, H, D))
RESULTS = [
    ("out", zeros(B, Q, H, D + 1), ValueError, "out has shape (2, 5, 4, 9)", "(2, 5, 4, 8)"),
    ("out", zeros(B, Q, H, D, dtype="float16"), TypeError, "out has dtype float16", "float32"),
    ("out", (64, "float32", (B, Q, H, D), (1,) * 4, CUDA, 0), ValueError, "out is on cuda:0"),
    ("lse", zeros(B, H, Q, 1), ValueError, "lse has shape (2, 4, 5, 1)", "(2, 4, 5)"),
    ("lse", zeros(B, H, Q, dtype="float16"), TypeError, "lse has dtype float16", "float32"),
    ("plan", None, ValueError, "plan is None", "136 bytes"),
    ("plan", zeros(8, dtype="uint8"), ValueError, "plan has shape (8,)", "bytes"),
    ("plan", zeros(4096), TypeError, "plan has dtype float32", "uint8"),
    ("plan", zeros(64, 64, dtype="uint8"), ValueError, "plan has shape (64, 64)"),
    ("plan", zeros(8192, dtype="uint8")[::2], ValueError, "plan has strides (2,)", "contiguous"),
]
GRADIENTS = [
    ("dout", zeros(B, Q, H), ValueError, "dout has shape (2, 5, 4)", "(2, 5, 4, 8)"),
    ("dlse", zeros(B, H), ValueError, "dlse has shape (2, 4)", "(2, 4, 5)"),
    ("dq", zeros(B, K, H, D), ValueError, "dq has shape (2, 7, 4, 8)", "like query"),
    ("dk", zeros(B, K, H, D), ValueError, "dk has shape (2, 7, 4, 8)", "like key"),
    ("dv", zeros(B, K, H, D), ValueError, "dv has shape (2, 7, 4, 8)", "like value"),
    ("dq", SHARED, ValueError, "dq has sizes (2, 5, 4, 8) with strides (40, 8, 0, 1)"),
    ("dbias", zeros(B, 1, 1, K), ValueError, "dbias has shape (2, 1, 1, 7)", "(2, 2, 1, 7)"),
    ("dbias", zeros(B, HK, K, dtype="float16"), TypeError, "dbias has dtype float16"),
    ("dbias", np.broadcast_to(zeros(B, HK, 1), (B, HK, K)), ValueError, "dbias", "stride 0"),
    ("dsink", zeros(HK), ValueError, "dsink has shape (2,)", "(4,) like sink"),
    ("dsink", zeros(H, dtype="float16"), TypeError, "dsink has dtype float16", "float32"),
    ("dsink", np.broadcast_to(zeros(1), (H,)), ValueError, "dsink", "stride 0"),
]


def backward_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {key: to_core(value) for key, value in {**BACKWARD, **changes}.items()}
    fields = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias", "sink": "dsink"}
    gradients = {field: arguments.pop(name) for field, name in fields.items()}
    return {**arguments, "gradients": gradients}


def masked_problem(pack: _core.Pack) -> _core.Problem:
    tensors = {"mask": zeros(B, K, dtype="bool"), "bias": zeros(B, HK, K), "sink": zeros(H)}
    return batch_call(**tensors).problem(pack)


@pytest.mark.parametrize("case", [*RESULTS, ("out", SHARED, ValueError, "out has sizes", "(40,")])
def test_forward(pack: _core.Pack, case: Any) -> None:
    name, value, exception, *fragments = case
    arguments = {key: to_core(value) for key, value in {**FORWARD, name: value}.items()}
    refused(lambda: masked_problem(pack).forward(**arguments), exception, tuple(fragments))


@pytest.mark.parametrize("case", [*RESULTS, *GRADIENTS])
def test_backward(pack: _core.Pack, case: Any) -> None:
    name, value, exception, *fragments = case
    arguments = backward_arguments(**{name: value})
    refused(lambda: masked_problem(pack).backward(**arguments), exception, tuple(fragments))


def test_other_results(pack: _core.Pack) -> None:
    forward = {key: to_core(value) for key, value in FORWARD.items()}
    with pytest.raises(ValueError, match="splits is -1, but must be at least 0"):
        batch_call().problem(pack).forward(**forward, splits=-1)
    arguments = backward_arguments(dbias=zeros(B, K))
    with pytest.raises(ValueError, match="dbias is given, but the problem has no attn_bias"):
        batch_call().problem(pack).backward(**arguments)
    with pytest.raises(ValueError, match="dsink is given, but the problem has no sink"):
        batch_call().problem(pack).backward(**backward_arguments(dsink=zeros(H)))
    lse = as_tuple(zeros(B, H, Q))
    with pytest.raises(ValueError, match=re.escape("lse has shape (2, 4, 5)")):
        varlen_call().problem(pack).forward(as_tuple(zeros(TOTAL_Q, H, D)), lse, None, None)


BIAS, KEEP = zeros(B, HK, 1, K), zeros(B, HK, Q, K, dtype="bool")
VARLEN = {"cu_seqlens_q": int32(0, 2, 6), "cu_seqlens_k": int32(0, 3, 9), "queries": 4, "keys": 6}
SELECTIONS = [
    ({"bias": zeros(B, K, dtype="int32")}, TypeError, "attn_bias has dtype int32", "bfloat16"),
    ({"bias": zeros(B, HK, 1, 1)}, ValueError, "attn_bias has shape (2, 2, 1, 1)", "keys, 7"),
    ({"bias": zeros(B, 3, 1, K)}, ValueError, "attn_bias has shape (2, 3, 1, 7)", "{4|2|1}"),
    ({"mask": zeros(B, K)}, TypeError, "attn_mask has dtype float32", "bool"),
    ({"mask": zeros(B, 4, dtype="bool")}, ValueError, "attn_mask has shape (2, 4)", "{7|1}"),
    ({"window": -1}, ValueError, "window_size is -1", "at least 0"),
    ({"keep_last": -1}, ValueError, "keep_last is -1", "at least 0"),
    ({"keep_first": -2}, ValueError, "keep_first is -2", "at least 0"),
    ({"batch": -2}, ValueError, "batch is -2"),
    ({"queries": -2}, ValueError, "query_length is -2"),
    ({"keys": -2}, ValueError, "key_length is -2"),
    ({"heads": 3}, ValueError, "query has 3 heads and key has 2"),
    ({"threads": 0}, ValueError, "threads is 0"),
    ({"cu_seqlens_q": int32(0, 5)}, ValueError, "cu_seqlens_k is None"),
    ({**VARLEN, "batch": 3}, ValueError, "cu_seqlens_q has shape (3,)", "(4,)"),
    ({**VARLEN, "queries": 3}, ValueError, "max_seqlen_q is 3", "at least 4"),
    ({**VARLEN}, ValueError, "attn_bias has shape (2, 2, 1, 7)", "({4|2|1}, 1, 9)"),
]


def selection(pack: _core.Pack, **changes: Any) -> _core.Selection:
    arguments = {**SELECTION, "bias": BIAS, **changes}
    return _core.Selection(pack, **{name: to_core(value) for name, value in arguments.items()})


@pytest.mark.parametrize("case", SELECTIONS)
def test_selection(pack: _core.Pack, case: Any) -> None:
    changes, exception, *fragments = case
    refused(lambda: selection(pack, **changes), exception, tuple(fragments))


def test_selection_results(pack: _core.Pack) -> None:
    start, wrong = to_core(START), to_core(zeros(B, H, K, dtype="int32"))
    with pytest.raises(
        ValueError, match=re.escape("end has in 4 dimensions the shape (2, 4, 1, 7)")
    ):
        selection(pack).intervals(start, wrong, None)
    with pytest.raises(TypeError, match="start has dtype bool"):
        selection(pack).intervals(to_core(KEEP), start, None)
    with pytest.raises(ValueError, match=r"start and end are wanted, but .* each of 5 queries"):
        selection(pack, bias=zeros(B, HK, Q, K)).intervals(start, start, None)
    with pytest.raises(ValueError, match=re.escape("the broadcast shape (2, 2, 1, 7)")):
        selection(pack).keep(to_core(KEEP), None)
