# SPDX-License-Identifier: BSD-3-Clause
"""Rows of packed tensors that belong to no sequence, as in padding to a multiple.

If bounds cannot be read without waiting, such rows are not refused. Their results and gradients are
0, whatever the memory held before, and they do not change the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import IntervalMask, dynamic_mask, flash_dmattn_varlen_func
from support import HALF_TYPES, Target, randn, reads_float64

TOTAL, LONGEST = 320, 160
BOUNDS = [(0, 60, 200, 263), (3, 100, 250), (150, 150, 180, 320), (250, 320), (0,), (7,), (0, 0)]
NAMES = ("query", "key", "value", "attn_bias")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, or with integers that are no valid index."""

    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 0x7F)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def call(bounds: tuple[int, ...], window: int | None, target: Target) -> dict[str, Any]:
    """Return the arguments of a call with rows before the first bound and after the last."""
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=target.device)
    query, key, value = (
        randn(TOTAL, heads, 16, seed=seed).to(target.device, HALF_TYPES[1]).requires_grad_()
        for seed, heads in enumerate((2, 1, 1))
    )
    return {
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": LONGEST,
        "max_seqlen_k": LONGEST,
        "is_causal": True,
        "attn_bias": randn(1, 1, TOTAL, seed=5).to(target.device).requires_grad_(),
        "window_size": window,
        "return_lse": True,
        "backend": target.backend,
    }


def rows_of(name: str, tensor: Tensor) -> Tensor:
    """Return a view with the packed rows as the first dimension."""
    return tensor.movedim(-1 if name in ("lse", "attn_bias") else 0, 0)


def results(arguments: dict[str, Any]) -> dict[str, Tensor]:
    out, lse = flash_dmattn_varlen_func(**arguments)
    gradients = torch.autograd.grad(out.float().cos().sum(), [arguments[name] for name in NAMES])
    found = {"out": out, "lse": lse, **dict(zip(NAMES, gradients, strict=True))}
    return {name: rows_of(name, tensor.detach()) for name, tensor in found.items()}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "bounds, window",
    [*((bounds, 32) for bounds in BOUNDS), ((3, 100, 250), None), ((0,), None)],
    ids=str,
)
def test_rows_of_no_sequence(
    bounds: tuple[int, ...], window: int | None, unread_target: Target
) -> None:
    check(call(bounds, window, unread_target), bounds)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("bounds", [(3, 100, 250), (0,)], ids=str)
def test_rows_of_no_sequence_beside_a_float64_bias(
    bounds: tuple[int, ...], unread_target: Target
) -> None:
    if not reads_float64(unread_target):
        pytest.skip("its kernels read no float64")
    arguments = call(bounds, None, unread_target)
    bias = arguments["attn_bias"].detach().double() - 7e5
    check({**arguments, "attn_bias": bias.requires_grad_()}, bounds)


def check(arguments: dict[str, Any], bounds: tuple[int, ...]) -> None:
    """Compare with a call on the sequences' rows alone; the other rows must be empty."""
    got = results(arguments)
    used = slice(bounds[0], bounds[-1])
    for name, rows in got.items():
        nothing = -torch.inf if name == "lse" else 0
        assert (rows[: used.start] == nothing).all(), name
        assert (rows[used.stop :] == nothing).all(), name
        assert rows[used].isfinite().all(), name
    for name in NAMES:
        part = rows_of(name, arguments[name].detach())[used]
        arguments[name] = (part.movedim(0, -1) if name == "attn_bias" else part).requires_grad_()
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        arguments[name] = arguments[name] - bounds[0]
    for name, want in results(arguments).items():
        torch.testing.assert_close(got[name][used], want, atol=2e-2, rtol=2e-2, msg=name)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_selection_of_keys_in_no_sequence(bounds: tuple[int, ...], unread_target: Target) -> None:
    bias = randn(2, 1, TOTAL).to(unread_target.device)

    def selected(first: int, last: int) -> IntervalMask:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=bias.device) - first
        mask = dynamic_mask(
            bias[:, :, first:last],
            20,
            True,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=LONGEST,
            max_seqlen_k=LONGEST,
            backend=unread_target.backend,
        )
        assert isinstance(mask, IntervalMask)
        return mask

    got, want = selected(0, TOTAL), selected(bounds[0], bounds[-1])
    for one, other in ((got.start, want.start), (got.end, want.end)):
        assert torch.equal(one[..., bounds[0] : bounds[-1]], other)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "wrong",
    [(0, 10, 1000), (-300, 10, 60), (0, 50, 20), (500, 600), (0, 0, 320), (-(2**31), 2**31 - 1, 5)],
    ids=str,
)
def test_wrong_bounds_are_no_indices(wrong: tuple[int, ...], unread_target: Target) -> None:
    """On a GPU an index out of range ends all of the process's GPU work."""
    for names in (("cu_seqlens_q",), ("cu_seqlens_k",), ("cu_seqlens_q", "cu_seqlens_k")):
        arguments = call(tuple(range(0, 20 * len(wrong), 20)), 7, unread_target)
        bounds = torch.tensor(wrong, dtype=torch.int32, device=unread_target.device)
        arguments |= dict.fromkeys(names, bounds)
        arguments |= {"max_seqlen_q": 32, "max_seqlen_k": 40}
        for rows in results(arguments).values():
            assert len(rows.cpu()) == TOTAL


@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_backends_that_read_the_bounds_refuse_such_rows(backend: str) -> None:
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        with pytest.raises(ValueError, match="cu_seqlens_q ends with 263, but must end with"):
            flash_dmattn_varlen_func(**call((0, 263), None, Target(device, backend)))
