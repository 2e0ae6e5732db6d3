# SPDX-License-Identifier: BSD-3-Clause
"""parallel_forgetting_attn against the formula and flash-linear-attention's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flash_dmattn.integrations import parallel_forgetting_attn
from support import Target, assert_accurate, randn

BOUNDS = [0, 17, 18, 50]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def tensors(dtype: torch.dtype, batch: int, gate_heads: int) -> dict[str, Tensor]:
    return {
        "q": randn(batch, 50, 4, 16, seed=1, dtype=dtype),
        "k": randn(batch, 50, 2, 16, seed=2, dtype=dtype),
        "v": randn(batch, 50, 2, 16, seed=3, dtype=dtype),
        "g": logsigmoid(2 * randn(batch, 50, gate_heads, seed=4)),
    }


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    heads = q.shape[2]
    k, v, g = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v, g))
    total = g.cumsum(1).transpose(1, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores + (total.unsqueeze(-1) - total.unsqueeze(-2))
    i = torch.arange(q.shape[1])
    seen = i <= i[:, None]
    if window_size is not None:
        seen &= i > i[:, None] - window_size
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens.cpu(), i, right=True)
        seen &= document == document[:, None]
    scores = scores.masked_fill(~seen, -torch.inf).to(q.dtype)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(scores, -1), v)


def results(compute: Any, given: dict[str, Tensor], device: str, **settings: Any) -> dict[str, Any]:
    leaves = {name: t.detach().to(device).requires_grad_() for name, t in given.items()}
    out = compute(**leaves, **settings)
    dout = randn(*out.shape, seed=5).to(out)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: t.detach().cpu() for name, t in {"out": out, **named}.items()}


@pytest.mark.parametrize("gate_heads", [2, 4])
@pytest.mark.parametrize("settings", [{}, {"scale": 0.4}, {"window_size": 5}, {"prune": -300.0},
                                      {"prune": -300.0, "window_size": 7}])  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_equals_the_formula(
    packed: bool, settings: dict[str, Any], gate_heads: int, device: str
) -> None:
    plain = {name: value for name, value in settings.items() if name != "prune"}
    for dtype in Target(device, device).dtypes:
        given = tensors(dtype, 1 if packed else 2, gate_heads)
        exact = {name: t.double() for name, t in given.items()}
        bounds = torch.tensor(BOUNDS) if packed else None  # int64, as in flash-linear-attention
        on_device = None if bounds is None else bounds.to(device)
        assert_accurate(
            results(parallel_forgetting_attn, given, device, cu_seqlens=on_device, **settings),
            results(formula, exact, "cpu", cu_seqlens=bounds, **plain),
            results(formula, given, "cpu", cu_seqlens=bounds, **plain),
        )


@pytest.mark.parametrize("settings", [{}, {"scale": 0.4}])
def test_equals_their_own_formula(settings: dict[str, Any]) -> None:
    naive = pytest.importorskip("fla.ops.forgetting_attn.naive").naive_forgetting_attn
    given = tensors(torch.float32, 2, 4)
    got = results(parallel_forgetting_attn, given, "cpu", **settings)
    for name, value in results(naive, given, "cpu", **settings).items():
        torch.testing.assert_close(got[name], value, atol=2e-5, rtol=1e-4, msg=name)


def test_equals_their_kernels() -> None:
    if not torch.cuda.is_available():
        pytest.skip("their kernels need a GPU")
    parallel = pytest.importorskip("fla.ops.forgetting_attn.parallel").parallel_forgetting_attn
    given = tensors(torch.bfloat16, 2, 4)
    exact = {name: t.double() for name, t in given.items()}
    assert_accurate(
        results(parallel_forgetting_attn, given, "cuda"),
        results(formula, exact, "cpu"),
        results(parallel, given, "cuda"),
    )


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"head_first": True}, ValueError, r"head_first must be False: q, k and v are \(B, N, he"),
        ({"g": torch.zeros(2, 4, 50)}, ValueError, r"g must have shape \(B, N, \{H\|Hk\}\) = \(2"),
        ({"q": torch.zeros(50, 4, 16)}, ValueError, r"q must have shape \(B, N, heads, D\)"),
        (
            {"k": torch.zeros(2, 49, 4, 16)},
            ValueError,
            r"k must have .* \(2, 50\), as q, got \(2, 4",
        ),
        (
            {"v": torch.zeros(1, 50, 4, 16)},
            ValueError,
            r"v must have .* \(2, 50\), as q, got \(1, 5",
        ),
        ({"cu_seqlens": torch.tensor([0, 50])}, ValueError, "q must have a batch of 1 with cu_se"),
        # Earlier versions have cu_seqlens in the place of window_size.
        ({"window_size": torch.tensor([0, 50])}, TypeError, "window_size must be an integer"),
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
    ],
)
def test_wrong_calls(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        parallel_forgetting_attn(**{**tensors(torch.float32, 2, 4), **changes})
