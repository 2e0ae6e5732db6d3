# SPDX-License-Identifier: BSD-3-Clause
"""One mask in different forms, for which kernels use different plans: the same results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from drawn.calls import Call, assert_same_bits
from drawn.judge import expected
from flash_dmattn import IntervalMask, dynamic_mask
from support import HALF_TYPES, Target

from .kinds import Draw, Sizes, dense, random_intervals, with_dropped_keys

Forms = dict[str, dict[str, Any]]


def rows_of(mask: Tensor, sizes: Sizes) -> Tensor:
    """Write the mask out for every query."""
    return mask.expand(*mask.shape[:2], sizes.queries, sizes.keys).contiguous()


def everything(call: Call, sizes: Sizes, draw: Draw) -> Forms:
    ones = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    keys = ones.expand(1, 1, 1, sizes.keys).contiguous()
    zeros = torch.zeros(1, 1, sizes.keys, dtype=torch.int32)
    return {
        "none": {},
        "one": {"mask": ones},
        "keys": {"mask": keys},
        "padding": {"mask": keys[:, 0, 0].expand(sizes.batch, -1)},
        "intervals": {"mask": IntervalMask(zeros, zeros + sizes.queries)},
        "rows": {"mask": rows_of(ones, sizes)},
        "all keys selected": {"bias": call.bias, "window": sizes.keys},
    }


def causal(call: Call, sizes: Sizes, draw: Draw) -> Forms:
    offset = sizes.keys - sizes.queries
    tril = rows_of(torch.ones(1, 1, 1, 1, dtype=torch.bool), sizes).tril(offset)
    prefix = IntervalMask.prefix_lm(torch.zeros(1, dtype=torch.int32), sizes.queries, sizes.keys)
    nearest = IntervalMask.sliding_window(None, 0, sizes.queries, sizes.keys)
    return {
        "none": {"causal": True},
        "keys": {"causal": True, "mask": torch.ones(1, 1, 1, sizes.keys, dtype=torch.bool)},
        "prefix": {"mask": prefix},
        "sliding window": {"mask": nearest},
        "both": {"causal": True, "mask": nearest},
        "rows": {"mask": tril},
        "rows and none": {"causal": True, "mask": tril},
        "all keys selected": {"causal": True, "window": sizes.keys},
    }


def some_keys(call: Call, sizes: Sizes, draw: Draw) -> Forms:
    call.mask = torch.ones(1, 1, 1, sizes.keys, dtype=torch.bool)
    keys = with_dropped_keys(draw, call).mask
    kept = keys.flatten()
    padding = IntervalMask.from_key_padding(kept[None], sizes.queries)
    return {
        "keys": {"mask": keys},
        "of each batch": {"mask": keys.expand(sizes.batch, -1, -1, -1)},
        "of each head": {"mask": keys.expand(-1, sizes.heads, -1, -1).contiguous()},
        "intervals": {"mask": padding},
        "rows": {"mask": rows_of(keys, sizes)},
        "all that are no NaN": {"mask": None, "window": sizes.keys},
    }


def kept_intervals(call: Call, sizes: Sizes, draw: Draw) -> Forms:
    shape = (sizes.batch, sizes.kv_heads, sizes.keys)
    mask = random_intervals(draw, shape, sizes.queries)
    per_head = (t.repeat_interleave(sizes.group, 1) for t in (mask.start, mask.end))
    return {
        "intervals": {"mask": mask},
        "of each query head": {"mask": IntervalMask(*per_head)},
        "rows": {"mask": mask.to_bool(sizes.queries)},
    }


def window(call: Call, sizes: Sizes, draw: Draw) -> Forms:
    width = draw.size(1, 100)
    chosen = dynamic_mask(
        call.bias,
        width,
        True,
        query_length=sizes.queries,
        key_length=sizes.keys,
        backend="reference",
    )
    return {
        "window_size": {"causal": True, "window": width},
        "intervals": {"mask": chosen},
        "causal intervals": {"causal": True, "mask": chosen},
        "rows": {"mask": chosen.to_bool(sizes.queries)},
    }


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("forms_of", [everything, causal, some_keys, kept_intervals, window])
def test_forms_of_one_mask(
    forms_of: Any, dtype: torch.dtype, pack_target: Target, seed: int
) -> None:
    draw = Draw(seed, dtype)
    call, sizes = dense(draw)
    call.bias = draw.randn(1, sizes.kv_heads, 1, sizes.keys)
    calls = {
        form: dataclasses.replace(call, **changes)
        for form, changes in forms_of(call, sizes, draw).items()
    }
    want = expected(next(iter(calls.values())))
    for form, one in calls.items():
        placed = one.to(pack_target.device)
        got = placed.results(deterministic=True)
        try:
            want.check(got)
        except AssertionError as error:
            raise AssertionError(f"{form}: {error}") from error
        assert_same_bits(placed.results(deterministic=True), got)
