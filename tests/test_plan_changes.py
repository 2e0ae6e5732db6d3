# SPDX-License-Identifier: BSD-3-Clause
"""A plan is refused after its inputs change, and its content never changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import (
    AttentionPlan,
    IntervalMask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
)
from support import Target, rand_bool, randn

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
IN_EACH_MODE = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def make_intervals(device: str) -> IntervalMask:
    start = torch.zeros(1, 1, 90, dtype=torch.int32, device=device)
    return IntervalMask(start, torch.full_like(start, 70), query_length=70, max_kept=90)


MASKS: dict[str, Callable[[str], Any]] = {
    "keys": lambda device: rand_bool(2, 90).to(device),
    "rows": lambda device: rand_bool(1, 1, 70, 90).to(device),
    "intervals": make_intervals,
}


def inputs(target: Target) -> tuple[Tensor, Tensor]:
    shapes = (2, 70, 4, 16), (2, 90, 2, 16)
    query, key = (randn(*shape, dtype=target.dtypes[0]).to(target.device) for shape in shapes)
    return query, key


@IN_EACH_MODE
@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_that_changes_makes_its_plan_useless(kind: str, mode: Any, target: Target) -> None:
    query, key = inputs(target)
    with mode():
        mask = MASKS[kind](target.device)
        plan = make_plan(query, key, mask, backend=target.backend)
        want = flash_dmattn_func(query, key, key, mask, backend=target.backend)
        for given in (None, mask):
            assert torch.equal(flash_dmattn_func(query, key, key, given, plan=plan), want)
        values = mask.end if kind == "intervals" else mask
        values.copy_(values.clone().flip(-1) if kind != "intervals" else values // 2)
        name = "attn_mask.end" if kind == "intervals" else "attn_mask"
        for given in (None, mask):
            with pytest.raises(ValueError, match=f"{name} was changed in place after plan was"):
                flash_dmattn_func(query, key, key, given, plan=plan)


def test_a_mask_that_changes_in_inference_mode_makes_its_plan_useless(target: Target) -> None:
    query, key = inputs(target)
    mask = MASKS["keys"](target.device)
    plan = make_plan(query, key, mask, backend=target.backend)
    with torch.inference_mode():
        mask[:, :40].logical_not_()
    with pytest.raises(ValueError, match="attn_mask was changed in place after plan was made"):
        flash_dmattn_func(query, key, key, plan=plan)


@IN_EACH_MODE
def test_bounds_that_change_make_their_plan_useless(mode: Any, target: Target) -> None:
    query, key = (t.flatten(0, 1) for t in inputs(target))
    with mode():
        bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (70, 90)]
        cu_seqlens_q, cu_seqlens_k = (t.to(target.device) for t in bounds)
        packing = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        packing |= {"max_seqlen_q": 71, "max_seqlen_k": 90}
        plan = make_plan(query, key, None, True, **packing, backend=target.backend)
        flash_dmattn_varlen_func(query, key, key, **packing, plan=plan)
        cu_seqlens_q[1] += 1
        with pytest.raises(ValueError, match="cu_seqlens_q was changed in place after plan was"):
            flash_dmattn_varlen_func(query, key, key, **packing, plan=plan)


@pytest.mark.parametrize("name", ["start", "end", "query_length", "max_kept"])
def test_a_plan_is_of_the_fields_that_its_mask_had(name: str, target: Target) -> None:
    query, key = inputs(target)
    mask = make_intervals(target.device)
    plan = make_plan(query, key, mask, backend=target.backend)
    held = getattr(mask, name)
    setattr(mask, name, held // 2 if isinstance(held, Tensor) else None)
    with pytest.raises(ValueError, match=f"attn_mask.{name} was replaced after plan was made"):
        flash_dmattn_func(query, key, key, plan=plan)
    setattr(mask, name, held)
    flash_dmattn_func(query, key, key, plan=plan)


def test_a_plan_is_of_what_it_was_made_for(target: Target) -> None:
    query, key = inputs(target)
    mask = MASKS["rows"](target.device)
    for name, value in (
        ("attn_mask", None),
        ("attn_mask", ~mask),
        ("attn_mask", make_intervals(target.device)),
        ("is_causal", True),
        ("backend", "auto"),
    ):
        plan = make_plan(query, key, mask, backend=target.backend)
        setattr(plan, name, value)
        with pytest.raises(ValueError, match=rf"{name}.* was replaced after plan was made"):
            flash_dmattn_func(query, key, key, plan=plan)
    plan = make_plan(query, key, backend=target.backend)
    plan.attn_mask = mask
    with pytest.raises(ValueError, match="attn_mask was replaced after plan was made"):
        flash_dmattn_func(query, key, key, plan=plan)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@IN_EACH_MODE
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_as_good_as_its_plan(how: str, kind: str, mode: Any, target: Target) -> None:
    query, key = inputs(target)
    with mode():
        mask = MASKS[kind](target.device)
        values = mask.end if kind == "intervals" else mask
        values.copy_(values.clone())  # this counts as a change
        plan = make_plan(query, key, mask, backend=target.backend)
        copied: AttentionPlan = COPIES[how](plan)
    with torch.no_grad():
        want = flash_dmattn_func(query, key, key, mask, backend=target.backend)
        assert torch.equal(flash_dmattn_func(query, key, key, plan=copied), want)
    own = copied.attn_mask
    with mode():
        values = own.end if isinstance(own, IntervalMask) else own
        assert isinstance(values, Tensor)
        values.zero_()
        for useless in (copied, COPIES[how](copied)):
            with pytest.raises(ValueError, match=r"was changed in place after plan was made"):
                flash_dmattn_func(query, key, key, plan=useless)


def test_a_copy_of_a_packed_plan_goes_with_copies_of_its_bounds(target: Target) -> None:
    query, key = (t.flatten(0, 1) for t in inputs(target))
    bounds = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (70, 90)]
    packing: dict[str, Any] = dict(
        zip(("cu_seqlens_q", "cu_seqlens_k"), (t.to(target.device) for t in bounds), strict=True)
    )
    packing |= {"max_seqlen_q": 70, "max_seqlen_k": 90}
    plan = make_plan(query, key, None, True, **packing, backend=target.backend)
    want = flash_dmattn_varlen_func(query, key, key, **packing, plan=plan)
    copied, same = copy.deepcopy((plan, packing))
    assert torch.equal(flash_dmattn_varlen_func(query, key, key, **same, plan=copied), want)


def test_what_a_plan_holds_is_not_written_to(target: Target) -> None:
    query, key = inputs(target)
    for kind in MASKS:
        plan = make_plan(query, key, MASKS[kind](target.device), backend=target.backend)
        want = flash_dmattn_func(query, key, key, plan=plan)
        plan.columns.fill_(255)
        assert torch.equal(flash_dmattn_func(query, key, key, plan=plan), want)
        with pytest.raises(AttributeError):
            plan.columns = torch.zeros_like(plan.columns)  # type: ignore[misc]


@pytest.mark.parametrize("how", ["as made", *COPIES])
@pytest.mark.parametrize("kind", ["rows", "none"])
def test_a_plan_of_inference_mode_serves_training(kind: str, how: str, target: Target) -> None:
    """A copy does too. A mask's plan must be copied outside of inference mode, for autograd."""
    query, key = inputs(target)
    mask = None if kind == "none" else MASKS[kind](target.device)
    with torch.inference_mode():
        plan = make_plan(query, key, mask, True, backend=target.backend)
    with torch.inference_mode(mask is None):
        plan = COPIES.get(how, lambda value: value)(plan)
    got, want = (query.clone().requires_grad_() for _ in range(2))
    flash_dmattn_func(got, key, key, plan=plan, deterministic=True).float().sum().backward()
    options = {"is_causal": True, "backend": target.backend, "deterministic": True}
    flash_dmattn_func(want, key, key, mask, **options).float().sum().backward()
    assert torch.equal(got.grad, want.grad)
