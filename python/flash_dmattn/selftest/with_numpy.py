# SPDX-License-Identifier: BSD-3-Clause
"""The self-test of the cpu pack through the core, for NumPy without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flash_dmattn import _core

from .outcome import (
    BATCH,
    HEAD_DIM,
    HEADS,
    KEYS,
    KV_HEADS,
    QUERIES,
    TOLERANCES,
    WINDOW,
    Comparison,
)

# The names of the gradients, by the fields of a call.
_GRADIENTS = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias"}
_ALIGNMENT = 64  # of plans and workspaces, in bytes


def compare(pack: Any) -> Iterator[Comparison]:
    """Yield the comparisons of the cpu pack, forward and backward, in float32."""
    random = np.random.default_rng(0)
    rows, columns = np.arange(QUERIES)[:, None], np.arange(KEYS)[None, :]
    last_visible = rows + KEYS - QUERIES
    bias = random.standard_normal((BATCH, KV_HEADS, 1, KEYS)).astype(np.float32)
    first_row = np.arange(KEYS, dtype=np.int32) - (KEYS - QUERIES)
    start = np.maximum(first_row, 0)[None, None]
    end = (first_row + WINDOW)[None, None]
    in_window = (columns <= last_visible) & (columns > last_visible - WINDOW)
    keys = (random.random((BATCH, 1, 1, KEYS)) < 0.5) | (np.arange(KEYS) == 0)
    by_row = random.random((BATCH, HEADS, QUERIES, KEYS)) < 0.2
    everything = np.ones((1, 1, QUERIES, KEYS), dtype=bool)
    causal = columns <= last_visible

    cases: tuple[tuple[str, dict[str, Any], bool, Any], ...] = (
        ("no mask", {}, False, everything),
        ("causal", {}, True, causal),
        ("key mask", {"mask": keys}, False, keys),
        ("causal window", {"start": start, "end": end}, True, in_window),
        ("boolean mask", {"mask": by_row}, False, by_row),
        ("window and bias", {"start": start, "end": end, "bias": bias}, True, in_window),
    )
    for case, fields, is_causal, kept in cases:
        query, dout = random.standard_normal((2, BATCH, QUERIES, HEADS, HEAD_DIM))
        key, value = random.standard_normal((2, BATCH, KEYS, KV_HEADS, HEAD_DIM))
        query, key, value, dout = (a.astype(np.float32) for a in (query, key, value, dout))
        found = _run_pack(pack, query, key, value, dout, fields, is_causal)
        wanted = attention(query, key, value, dout, fields.get("bias"), kept)
        for name, result in found.items():
            expected = wanted[name]
            same = result == expected
            with np.errstate(invalid="ignore"):
                difference = np.where(same, 0, np.abs(result - expected)).max()
            size = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max()))
            error = float(difference) / size
            yield Comparison("cpu", case, "float32", name, error, TOLERANCES["float32"])


def attention(query: Any, key: Any, value: Any, dout: Any, bias: Any, kept: Any) -> dict[str, Any]:
    """Return out, lse and the gradients by the formula, in float64.

    ``kept`` broadcasts to (B, H, Q, K).
    """
    group = query.shape[2] // key.shape[2]
    q, k, v, do = (a.astype(np.float64).transpose(0, 2, 1, 3) for a in (query, key, value, dout))
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    scale = query.shape[-1] ** -0.5
    scores = scale * q @ k.swapaxes(-1, -2)
    if bias is not None:
        scores = scores + np.repeat(bias.astype(np.float64), group, axis=1)
    scores = np.where(kept, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    out = p @ v
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + peak)[..., 0]
    ds = p * (do @ v.swapaxes(-1, -2) - (do * out).sum(-1, keepdims=True))
    results = {
        "out": out.transpose(0, 2, 1, 3),
        "lse": lse,
        "dq": (scale * ds @ k).transpose(0, 2, 1, 3),
        "dk": _per_group(scale * ds.swapaxes(-1, -2) @ q, group).transpose(0, 2, 1, 3),
        "dv": _per_group(p.swapaxes(-1, -2) @ do, group).transpose(0, 2, 1, 3),
    }
    if bias is not None:
        results["dbias"] = _per_group(ds.sum(2, keepdims=True), group)
    return results


def _run_pack(
    pack: Any, query: Any, key: Any, value: Any, dout: Any, fields: dict[str, Any], causal: bool
) -> dict[str, Any]:
    """Return the same results as `attention`, computed by the pack."""
    problem = _core.Problem(
        pack,
        _as_tuple(query),
        _as_tuple(key),
        _as_tuple(value),
        mask=_as_tuple(fields.get("mask")),
        start=_as_tuple(fields.get("start")),
        end=_as_tuple(fields.get("end")),
        bias=_as_tuple(fields.get("bias")),
        scale=query.shape[-1] ** -0.5,
        causal=causal,
        softcap=0.0,
        threads=2,
    )
    bias = fields.get("bias")
    results = {
        "out": np.empty_like(query),
        "lse": np.empty((query.shape[0], query.shape[2], query.shape[1]), np.float32),
        "dq": np.empty_like(query),
        "dk": np.empty_like(key),
        "dv": np.empty_like(value),
        **({} if bias is None else {"dbias": np.empty_like(bias)}),
    }
    tensors = {name: _as_tuple(array) for name, array in results.items()}
    plan = _buffer(problem.plan_bytes)
    workspace = _buffer(
        max(
            problem.plan_workspace_bytes,
            problem.forward_workspace_bytes,
            problem.backward_workspace_bytes,
        )
    )
    buffers = _as_tuple(plan), _as_tuple(workspace)
    problem.plan(*buffers)
    problem.forward(tensors["out"], tensors["lse"], *buffers)
    problem.backward(
        _as_tuple(dout),
        None,
        tensors["out"],
        tensors["lse"],
        {name: tensors[result] for name, result in _GRADIENTS.items() if result in tensors},
        *buffers,
    )
    return results


def _as_tuple(array: Any) -> Any:
    """Return an array in the core's form, or None for None. The caller keeps the array alive."""
    if array is None:
        return None
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return array.ctypes.data, str(array.dtype), array.shape, strides, 1, 0


def _buffer(size: int) -> Any:
    """Return ``size`` zero bytes with the alignment that packs require."""
    storage = np.zeros(size + _ALIGNMENT, np.uint8)
    return storage[-storage.ctypes.data % _ALIGNMENT :][:size]


def _per_group(per_head: Any, group: int) -> Any:
    """Sum over the query heads that share a KV head."""
    batch, heads, *rest = per_head.shape
    return per_head.reshape(batch, heads // group, group, *rest).sum(2)
