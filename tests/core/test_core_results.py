# SPDX-License-Identifier: BSD-3-Clause
"""The core and the cpu pack with NumPy arrays, against the float64 formula. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flash_dmattn import _core

from .core_packs import as_tuple

Array = np.ndarray


@pytest.fixture(scope="module")
def cpu() -> _core.Pack:
    from flash_dmattn import loader

    return loader.pack_for("cpu")


@dataclass
class Inputs:
    """One problem as arrays; keep is the boolean form of the given mask."""

    query: Array
    key: Array
    value: Array
    forms: dict[str, Array]
    keep: Array
    bias: Array | None = None
    scale: float = 0.4
    causal: bool = False
    softcap: float = 0.0

    def problem(self, pack: _core.Pack, **extra: Any) -> _core.Problem:
        tensors = {name: as_tuple(array) for name, array in self.forms.items()}
        if self.bias is not None:
            tensors["bias"] = as_tuple(self.bias)
        qkv = (as_tuple(array) for array in (self.query, self.key, self.value))
        options = {"scale": self.scale, "causal": self.causal, "softcap": self.softcap}
        return _core.Problem(pack, *qkv, **tensors, **options, **extra)


def formula(
    inputs: Inputs, q: Array, k: Array, v: Array, bias: Array | None
) -> tuple[Array, Array]:
    """Return (out, lse) in the dtype of q, k, v and bias; all KV heads are repeated."""
    group = q.shape[2] // k.shape[2]
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, group, 2)) * inputs.scale
    if inputs.softcap > 0:
        scores = inputs.softcap * np.tanh(scores / inputs.softcap)
    keep = np.broadcast_to(repeat_heads(inputs.keep, q.shape[2]), scores.shape)
    if bias is not None:
        scores = scores + repeat_heads(bias, q.shape[2])
    if inputs.causal:
        rows, keys = q.shape[1], k.shape[1]
        keep = keep & (np.arange(keys) <= np.arange(rows)[:, None] + keys - rows)
    scores = np.where(keep, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", p / np.where(total == 0, 1, total), np.repeat(v, group, 2))
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + np.where(total == 0, 0, top))[..., 0]


def repeat_heads(array: Array, heads: int) -> Array:
    return np.repeat(array, heads // array.shape[1], 1) if array.shape[1] != 1 else array


def compute(inputs: Inputs, pack: _core.Pack) -> tuple[_core.Problem, Array, Array, Array]:
    """Return (problem, plan, out, lse) of the pack."""
    problem = inputs.problem(pack)
    plan = np.zeros(problem.plan_bytes, np.uint8)
    problem.plan(as_tuple(plan), as_tuple(np.empty(problem.plan_workspace_bytes, np.uint8)))
    b, q, h, _ = inputs.query.shape
    out = np.full(inputs.query.shape, np.nan, inputs.query.dtype)
    lse = np.full((b, h, q), np.nan, np.float32)
    workspace = np.empty(problem.forward_workspace_bytes, np.uint8)
    problem.forward(as_tuple(out), as_tuple(lse), as_tuple(plan), as_tuple(workspace))
    return problem, plan, out, lse


def make(form: str, q: int = 9, k: int = 13, bias: str = "none", **options: Any) -> Inputs:
    rng = np.random.default_rng(sum(map(ord, form + bias)))
    b, h, hk, d = 2, 4, 2, 5
    forms: dict[str, Array] = {}
    keep = np.ones((1, 1, 1, k), bool)
    if form == "keys":
        keep = rng.random((b, hk, 1, k)) < 0.6
        forms = {"mask": keep[:, :, 0]}
    elif form == "rows":
        keep = rng.random((b, h, q, k)) < 0.5
        keep[0, 1, : q // 2] = False
        forms = {"mask": keep}
    elif form == "intervals":
        start = rng.integers(0, q + 1, (b, hk, k), np.int32)
        end = (start + rng.integers(0, q + 1, start.shape)).astype(np.int32)
        rows = np.arange(q)[:, None]
        keep = (start[:, :, None] <= rows) & (rows < end[:, :, None])
        forms = {"start": start, "end": end}
    biases = {
        "none": None,
        "keys": rng.standard_normal((b, hk, 1, k), np.float32),
        "rows": rng.standard_normal((1, h, q, k), np.float32),
    }
    # q, k and v are not contiguous; the values repeat one head.
    query = rng.standard_normal((b, h, q, 2 * d), np.float32).transpose(0, 2, 1, 3)[..., ::2]
    key = rng.standard_normal((b, k, hk, d), np.float32)[:, ::-1]
    value = np.broadcast_to(rng.standard_normal((b, k, 1, d), np.float32), (b, k, hk, d))
    return Inputs(query, key, value, forms, keep, biases[bias], **options)


CASES = [
    make("none"),
    make("none", causal=True, bias="keys"),
    make("keys", softcap=1.5, bias="rows"),
    make("keys", causal=True, q=13, k=9, bias="keys"),
    make("rows", bias="keys"),
    make("rows", causal=True, q=1),
    make("intervals", causal=True, bias="keys"),
    make("intervals", softcap=0.7),
]


@pytest.mark.parametrize("inputs", CASES)
def test_forward(cpu: _core.Pack, inputs: Inputs) -> None:
    bias = None if inputs.bias is None else inputs.bias.astype(np.float64)
    qkv = (array.astype(np.float64) for array in (inputs.query, inputs.key, inputs.value))
    expected_out, expected_lse = formula(inputs, *qkv, bias)
    _, _, out, lse = compute(inputs, cpu)
    np.testing.assert_allclose(out, expected_out, atol=2e-6, rtol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("has_plan", [False, True])
@pytest.mark.parametrize("has_lse", [False, True])
@pytest.mark.parametrize("inputs", CASES)
def test_attend_is_plan_and_forward(
    cpu: _core.Pack, inputs: Inputs, has_lse: bool, has_plan: bool
) -> None:
    problem, plan, expected_out, expected_lse = compute(inputs, cpu)
    out, lse = np.full_like(expected_out, np.nan), np.full_like(expected_lse, np.nan)
    optional = as_tuple(lse) if has_lse else None, as_tuple(plan) if has_plan else None
    needed = problem.attend_bytes(has_lse, has_plan)
    guarded = np.full(needed + 16, 0xFF, np.uint8)  # NaN when read as float32
    problem.attend(as_tuple(out), *optional, as_tuple(guarded[:needed]))
    np.testing.assert_array_equal(out, expected_out)
    if has_lse:
        np.testing.assert_array_equal(lse, expected_lse)
    assert (guarded[needed:] == 0xFF).all()
    if needed:
        with pytest.raises(ValueError, match=rf"scratch .* at least {needed} bytes"):
            problem.attend(as_tuple(out), *optional, as_tuple(guarded[: needed - 1]))
        with pytest.raises(ValueError, match=rf"scratch is None.* at least {needed} bytes"):
            problem.attend(as_tuple(out), *optional, None)


@pytest.mark.parametrize("inputs", CASES)
def test_backward_against_differences(cpu: _core.Pack, inputs: Inputs) -> None:
    """The gradients along random directions equal the central differences of the formula."""
    rng = np.random.default_rng(7)
    problem, plan, out, lse = compute(inputs, cpu)
    dout = rng.standard_normal(out.shape, np.float32)
    dlse = np.where(np.isfinite(lse), rng.standard_normal(lse.shape, np.float32), 0)
    dlse = dlse.astype(np.float32)
    arrays = [inputs.query, inputs.key, inputs.value]
    if inputs.bias is not None:
        arrays.append(inputs.bias)
    gradients = [np.full(array.shape, np.nan, np.float32) for array in arrays]
    tensors = [as_tuple(gradient) for gradient in gradients]
    workspace = np.empty(problem.backward_workspace_bytes, np.uint8)
    problem.backward(
        *map(as_tuple, (dout, dlse, out, lse)),
        dict(zip(("query", "key", "value", "bias"), tensors, strict=False)),
        as_tuple(plan),
        as_tuple(workspace),
    )

    def loss(arguments: list[Array]) -> float:
        out, lse = formula(
            inputs, *arguments[:3], arguments[3] if inputs.bias is not None else None
        )
        return float((out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())

    point = [array.astype(np.float64) for array in arrays]
    for i, gradient in enumerate(gradients):
        for _ in range(3):
            step = 1e-5 * rng.standard_normal(gradient.shape)
            ends = [[*point[:i], point[i] + sign * step, *point[i + 1 :]] for sign in (1, -1)]
            expected = (loss(ends[0]) - loss(ends[1])) / 2e-5
            assert (gradient * step / 1e-5).sum() == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize(("b", "q", "k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_zero_sizes(cpu: _core.Pack, b: int, q: int, k: int) -> None:
    query, key = np.zeros((b, q, 4, 8), np.float32), np.zeros((b, k, 2, 8), np.float32)
    keep = np.ones((b, 1, q, k), bool)
    inputs = Inputs(query, key, key.copy(), {"mask": keep}, keep)
    problem, _, out, lse = compute(inputs, cpu)
    assert not out.any()
    assert (lse == -np.inf).all()
    scratch = np.empty(problem.attend_bytes(False, False), np.uint8)
    out.fill(np.nan)
    problem.attend(as_tuple(out), None, None, as_tuple(scratch))
    assert not out.any()


def test_varlen_is_each_sequence_alone(cpu: _core.Pack) -> None:
    rng = np.random.default_rng(3)
    cu_q, cu_k = np.array([0, 4, 4, 9], np.int32), np.array([0, 3, 5, 12], np.int32)
    query = rng.standard_normal((9, 4, 8), np.float32)
    key, value = rng.standard_normal((2, 12, 2, 8), np.float32)
    bias = rng.standard_normal((2, 1, 12), np.float32)
    lengths = {"cu_seqlens_q": as_tuple(cu_q), "cu_seqlens_k": as_tuple(cu_k)}
    tensors = [as_tuple(array) for array in (query, key, value)]
    options = {"max_seqlen_q": 5, "max_seqlen_k": 7, "scale": 0.4, "causal": True, "softcap": 0.0}
    problem = _core.Problem(cpu, *tensors, bias=as_tuple(bias), **lengths, **options)
    plan = np.zeros(problem.plan_bytes, np.uint8)
    problem.plan(as_tuple(plan), as_tuple(np.empty(problem.plan_workspace_bytes, np.uint8)))
    out, lse = np.empty_like(query), np.empty((4, 9), np.float32)
    workspace = np.empty(problem.forward_workspace_bytes, np.uint8)
    problem.forward(as_tuple(out), as_tuple(lse), as_tuple(plan), as_tuple(workspace))
    again, scratch = np.empty_like(out), np.empty(problem.attend_bytes(False, False), np.uint8)
    problem.attend(as_tuple(again), None, None, as_tuple(scratch))
    np.testing.assert_array_equal(again, out)

    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        keep = np.ones((1, 1, 1, 1), bool)
        alone = Inputs(query[None, rows], key[None, keys], value[None, keys], {}, keep, causal=True)
        expected = formula(
            alone, alone.query, alone.key, alone.value, bias[None, :, :, keys].astype(np.float64)
        )
        np.testing.assert_allclose(out[rows], expected[0][0], atol=2e-6, rtol=2e-5)
        np.testing.assert_allclose(lse[:, rows], expected[1][0], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_selection(cpu: _core.Pack, causal: bool) -> None:
    """Each row keeps the window best of its visible, allowed keys; ties go to the lower index."""
    rng = np.random.default_rng(11)
    b, hk, q, k, window = 2, 2, 10, 12, 3
    bias = rng.integers(-3, 4, (b, hk, k)).astype(np.float32)
    bias[0, 0, 4], bias[1, 1, 2] = -np.inf, np.nan
    mask = rng.random((b, 1, k)) < 0.8
    rows = np.arange(q)[:, None]
    visible = (np.arange(k) <= rows + k - q) if causal else np.ones((q, k), bool)
    expected = np.zeros((b, hk, q, k), bool)
    for i in np.ndindex(b, hk, q):
        scores = bias[i[0], i[1]]
        allowed = visible[i[2]] & mask[i[0], 0] & ~np.isnan(scores) & (scores != -np.inf)
        order = sorted(np.flatnonzero(allowed), key=lambda j: (-scores[j], j))
        expected[i][order[:window]] = True

    start, end = np.empty((2, b, hk, k), np.int32)
    selection = _core.Selection(
        cpu,
        as_tuple(bias),
        mask=as_tuple(mask),
        batch=b,
        heads=4,
        kv_heads=hk,
        queries=q,
        keys=k,
        window=window,
        causal=causal,
    )
    workspace = np.empty(selection.workspace_bytes, np.uint8)
    if causal:
        selection.intervals(as_tuple(start), as_tuple(end), as_tuple(workspace))
        keep = (start[:, :, None] <= rows) & (rows < end[:, :, None])
        np.testing.assert_array_equal(keep & visible, expected)
    else:
        with pytest.raises(ValueError, match="start and end are wanted, but causal is False"):
            selection.intervals(as_tuple(start), as_tuple(end), as_tuple(workspace))
        keep = np.empty((b, hk, 1, k), bool)
        selection.keep(as_tuple(keep), as_tuple(workspace))
        np.testing.assert_array_equal(keep[:, :, 0], expected[:, :, 0])
