# SPDX-License-Identifier: BSD-3-Clause
"""Tensors saved for the backward pass must not change before it; autograd reports a change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from flash_dmattn import IntervalMask, flash_dmattn_func, flash_dmattn_varlen_func
from support import Target, rand_bool, randn

CHANGED = pytest.raises(RuntimeError, match="modified by an inplace operation")
# Direct calls, and calls by the operators, which a profiler enforces.
ROUTES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "direct": contextlib.nullcontext,
    "operators": torch.autograd.profiler.profile,
}


def tensors(target: Target, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return non-leaf tensors: they require a gradient and may change in place."""
    return [
        randn(*shape, dtype=target.dtypes[0], seed=seed).to(target.device).requires_grad_() * 1
        for seed, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("form", ["rows", "intervals"])
def test_dense(
    form: str, route: Callable[[], AbstractContextManager[object]], target: Target
) -> None:
    names = ("query", "key", "value", "bias", "sink", "mask", "out", "lse", "nothing")
    for name in names:
        query, key, value, bias, sink = tensors(
            target, (1, 9, 4, 16), (1, 11, 2, 16), (1, 11, 2, 16), (1, 2, 1, 11), (4,)
        )
        start = torch.zeros(1, 1, 11, dtype=torch.int32, device=target.device)
        mask = rand_bool(1, 1, 9, 11).to(target.device)
        given = mask if form == "rows" else IntervalMask(start, start + 9)
        options = {"sink": sink, "return_lse": True, "backend": target.backend}
        with route():
            out, lse = flash_dmattn_func(query, key, value, given, bias, **options)
            saved = {"query": query, "key": key, "value": value, "bias": bias, "sink": sink}
            saved |= {"mask": mask if form == "rows" else given.end, "out": out, "lse": lse}
            loss = (out.float() * 2).sum() + lse.sum()
            if name == "nothing":
                loss.backward()
                continue
            with torch.no_grad():
                saved[name].copy_(saved[name].clone())
            with CHANGED:
                loss.backward()


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_packed(
    name: str, route: Callable[[], AbstractContextManager[object]], target: Target
) -> None:
    query, key, value = tensors(target, (10, 4, 16), (12, 2, 16), (12, 2, 16))
    saved = {
        f"cu_seqlens_{which}": torch.tensor(bounds, dtype=torch.int32, device=target.device)
        for which, bounds in (("q", [0, 4, 10]), ("k", [0, 5, 12]))
    }
    with route():
        out = flash_dmattn_varlen_func(
            query, key, value, **saved, max_seqlen_q=6, max_seqlen_k=7, backend=target.backend
        )
        saved[name].add_(0)
        with CHANGED:
            out.float().sum().backward()
