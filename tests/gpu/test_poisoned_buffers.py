# SPDX-License-Identifier: BSD-3-Clause
"""Plans, workspaces and results that hold NaN before a call, with guard bytes around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drawn.buffers import poisoned_buffers
from drawn.calls import assert_same_bits
from flash_dmattn import dynamic_mask
from support import HALF_TYPES, Target

from .kinds import KINDS, Draw


def test_results_do_not_depend_on_what_buffers_hold(
    kind: str, pack_target: Target, seed: int
) -> None:
    call = KINDS[kind](Draw(seed, HALF_TYPES[seed % 2])).to(pack_target.device)
    want = call.results(deterministic=True)
    with poisoned_buffers() as poisoned:
        got = call.results(deterministic=True)
    # All results must lie in poisoned memory.
    assert all(poisoned.holds(got[name]) for name in got if name != "dbias")
    # Paged keys have no mask and no gradients here, so only out and lse are allocated.
    assert kind == "paged" or len(poisoned.blocks) > len(got), "no plan and no workspace among them"
    assert_same_bits(got, want)
    assert poisoned.guards_are_whole(), "bytes beside a buffer have been written"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_selections_do_not_depend_on_what_buffers_hold(
    rows: bool,
    causal: bool,
    pack_target: Target,
    seed: int,
) -> None:
    draw = Draw(seed, torch.bfloat16)
    queries, keys = draw.size(1, 70), draw.size(1, 3000)
    bias = draw.randn(2, 3, queries if rows else 1, keys).to(pack_target.device)
    arguments = (bias, draw.size(0, 600), causal)
    want = dynamic_mask(*arguments, query_length=queries, key_length=keys)
    with poisoned_buffers() as poisoned:
        got = dynamic_mask(*arguments, query_length=queries, key_length=keys)
    results = [got] if isinstance(got, Tensor) else [got.start, got.end]
    assert all(poisoned.holds(result) for result in results)
    assert torch.equal(*(m if isinstance(m, Tensor) else m.to_bool(queries) for m in (got, want)))
    assert poisoned.guards_are_whole(), "bytes beside a buffer have been written"
