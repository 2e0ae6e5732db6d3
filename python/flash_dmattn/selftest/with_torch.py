# SPDX-License-Identifier: BSD-3-Clause
"""The self-test with torch: the public functions, forward and backward, by the default backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from flash_dmattn.backends.base import Backend
from flash_dmattn.interface import flash_dmattn_func
from flash_dmattn.masks import IntervalMask
from flash_dmattn.record import AttentionInputs
from flash_dmattn.reference_arguments import attention_reference

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


class Problem(NamedTuple):
    """One call, and the gradient of its out."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    bias: torch.Tensor | None
    causal: bool
    dout: torch.Tensor


# Returns out, lse, and the gradients of query, key, value and, if given, of the bias.
Compute: TypeAlias = Callable[[Problem], tuple[torch.Tensor, ...]]


def compare(device: str, compute: Compute | None = None) -> Iterator[Comparison]:
    """Yield the comparisons of a device, such as ``cuda:0``.

    ``compute`` computes the problems; by default the public functions do.
    """
    for dtype in DTYPES["cpu" if device == "cpu" else "gpu"]:
        for case, mask, bias, causal in _cases(device):
            shapes = ((QUERIES, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
            inputs = [_random((BATCH, *s, HEAD_DIM), seed) for seed, s in enumerate(shapes)]
            if bias is not None:
                inputs.append(bias)
            leaves = [t.to(device, getattr(torch, dtype)) for t in inputs]
            exact = [t.double().requires_grad_() for t in leaves]
            dout = _random(tuple(leaves[0].shape), 9).to(device, leaves[0].dtype)
            query, key, value = leaves[:3]
            problem = Problem(query, key, value, mask, _last_if_bias(leaves, bias), causal, dout)
            found = (compute or _by_calls)(problem)
            query, key, value = exact[:3]
            with _one_thread():
                out, lse = attention_reference(
                    query, key, value, mask, _last_if_bias(exact, bias), causal=causal
                )
                wanted = torch.autograd.grad((out * dout.double()).sum(), exact)
            names = ("out", "lse", "dq", "dk", "dv", "dbias")
            for name, result, expected in zip(names, found, (out, lse, *wanted), strict=False):
                error = _relative_error(result, expected.detach())
                yield Comparison(device, case, dtype, name, error, TOLERANCES[dtype])


def _by_calls(problem: Problem) -> tuple[torch.Tensor, ...]:
    query, key, value, mask, bias, causal, dout = problem
    leaves = [t.requires_grad_() for t in (query, key, value, bias) if t is not None]
    out, lse = cast(
        "tuple[torch.Tensor, torch.Tensor]",
        flash_dmattn_func(query, key, value, mask, bias, is_causal=causal, return_lse=True),
    )
    # A scalar needs no explicit gradient. With one torch would import sympy to compare shapes.
    return out.detach(), lse.detach(), *torch.autograd.grad((out * dout).sum(), leaves)


def by_backend(backend: Backend) -> Compute:
    """Return a function that computes by a backend without dispatcher, autograd and loader."""

    def compute(problem: Problem) -> tuple[torch.Tensor, ...]:
        query, key, value, mask, bias, causal, dout = problem
        intervals = mask if isinstance(mask, IntervalMask) else None
        inputs = AttentionInputs(
            query,
            key,
            value,
            mask=mask if intervals is None else None,
            start=None if intervals is None else intervals.start,
            end=None if intervals is None else intervals.end,
            bias=bias,
            scale=query.shape[-1] ** -0.5,
            causal=causal,
        )
        results = backend.forward(inputs)
        flags = (True, True, True, bias is not None, False)
        gradients = backend.differentiate(inputs, results, flags, dout, None)
        out, lse, _ = results
        return out, lse, *(gradient for gradient in gradients if gradient is not None)

    return compute


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread. In small steps threads mostly wait for each other, and on a busy
    machine for CPU time.
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
    keys = keys[:, None, None]
    rows = (_random((BATCH, HEADS, QUERIES, KEYS), 4) > 1).to(device)
    yield "no mask", None, None, False
    yield "causal", None, None, True
    yield "key mask", keys, None, False
    yield "causal window", window, None, True
    yield "boolean mask", rows, None, False
    yield "bias", None, bias, True
    yield "window and bias", window, bias, True


def _last_if_bias(leaves: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else leaves[-1]


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value or to 1.

    Equal infinities have no difference.
    """
    found = found.double()
    difference = (found - wanted).abs().masked_fill(found == wanted, 0)
    size = wanted.masked_fill(wanted.isinf(), 0).abs().amax().clamp(min=1)
    return float(difference.amax() / size)
