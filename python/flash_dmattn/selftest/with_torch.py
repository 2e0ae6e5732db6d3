# SPDX-License-Identifier: BSD-3-Clause
"""The self-test where torch is there: the public functions, forward and backward, by whatever
computes calls that do not say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch

from flash_dmattn.interface import flash_dmattn_func
from flash_dmattn.masks import IntervalMask
from flash_dmattn.reference import attention_reference

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

DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("float16", "bfloat16")}


def compare(device: str) -> Iterator[Comparison]:
    """Yield the comparisons of a device, such as ``cuda:0``."""
    for dtype in DTYPES["cpu" if device == "cpu" else "gpu"]:
        for case, mask, bias, causal in _cases(device):
            shapes = ((QUERIES, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
            inputs = [_random((BATCH, *s, HEAD_DIM), seed) for seed, s in enumerate(shapes)]
            if bias is not None:
                inputs.append(bias)
            leaves = [t.to(device, getattr(torch, dtype)).requires_grad_() for t in inputs]
            exact = [t.detach().double().requires_grad_() for t in leaves]
            query, key, value, leaf_bias = *leaves[:3], _last(leaves, bias)
            out, lse = cast(
                "tuple[torch.Tensor, torch.Tensor]",
                flash_dmattn_func(
                    query,
                    key,
                    value,
                    mask,
                    leaf_bias,
                    is_causal=causal,
                    return_lse=True,
                ),
            )
            query, key, value, leaf_bias = *exact[:3], _last(exact, bias)
            dout = _random(tuple(out.shape), 9).to(device, out.dtype)
            # A scalar needs no given gradient, for which torch imports sympy to compare shapes.
            found = torch.autograd.grad((out * dout).sum(), leaves)
            with _one_thread():
                wanted_out, wanted_lse = attention_reference(
                    query, key, value, mask, leaf_bias, causal=causal
                )
                wanted = torch.autograd.grad((wanted_out * dout.double()).sum(), exact)
            pairs = [("out", out, wanted_out), ("lse", lse, wanted_lse)]
            pairs += zip(("dq", "dk", "dv", "dbias"), found, wanted, strict=False)
            for name, result, expected in pairs:
                error = _relative_error(result.detach(), expected.detach())
                yield Comparison(device, case, dtype, name, error, TOLERANCES[dtype])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: in small steps, threads mostly wait for each other, and on a busy
    machine for a turn.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cases(device: str) -> Iterator[tuple[str, Any, torch.Tensor | None, bool]]:
    """Yield name, mask, bias and causality."""
    bias = _random((BATCH, KV_HEADS, 1, KEYS), 3)
    first_row = torch.arange(KEYS, dtype=torch.int32, device=device) - (KEYS - QUERIES)
    window = IntervalMask(
        first_row.clamp(min=0).expand(1, 1, KEYS), (first_row + WINDOW).expand(1, 1, KEYS)
    )
    place: dict[str, Any] = {"dtype": torch.int64, "device": device}
    keys = torch.arange(KEYS, **place) < torch.tensor([[KEYS], [KEYS // 2]], **place)
    rows = (_random((BATCH, HEADS, QUERIES, KEYS), 4) > 1).to(device)
    yield "no mask", None, None, False
    yield "causal", None, None, True
    yield "key mask", keys, None, False
    yield "causal window", window, None, True
    yield "boolean mask", rows, None, False
    yield "bias", None, bias, True
    yield "window and bias", window, bias, True


def _last(leaves: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else leaves[-1]


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference over the largest value, or over 1.

    Equal infinities do not differ.
    """
    found = found.double()
    difference = (found - wanted).abs().masked_fill(found == wanted, 0)
    size = wanted.masked_fill(wanted.isinf(), 0).abs().amax().clamp(min=1)
    return float(difference.amax() / size)
