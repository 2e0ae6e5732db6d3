# SPDX-License-Identifier: BSD-3-Clause
"""Masks of blocks in the core: what a pack gets, and what is refused."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flash_dmattn import _core

from .core_calls import HK, B, Call, H, K, Q, batch_call, refused, varlen_call, zeros
from .core_packs import Recording, as_tuple, compile_pack

# Blocks of 2 queries and 3 keys.
ROWS, COLUMNS = -(-Q // 2), -(-K // 3)


def numbers(batch: int = 1, heads: int = HK, rows: int = ROWS, columns: int = COLUMNS) -> Any:
    return zeros(batch, heads, rows, columns, dtype="int32")


def test_a_plan_of_blocks(pack: _core.Pack, recording: Recording) -> None:
    places, contents = numbers(), zeros(4, 2, 3, dtype="bool")
    call = batch_call()
    problem = call.problem(pack)
    problem.take_blocks(as_tuple(places), as_tuple(contents), 7, 4)
    assert problem.plan_bytes == 704
    plan = zeros(704, dtype="uint8")
    problem.plan(as_tuple(plan), None)
    blocks = recording.mask_blocks
    assert blocks.struct_size == ctypes.sizeof(blocks)
    assert (blocks.kept, blocks.partial) == (7, 4)
    strides = (HK * ROWS * COLUMNS, ROWS * COLUMNS, COLUMNS, 1)
    assert blocks.numbers.summary() == (places.ctypes.data, places.shape, strides)
    assert blocks.contents.summary()[:2] == (contents.ctypes.data, (4, 2, 3, 1))
    mask = recording.problem.mask
    assert mask.summary() == (places.ctypes.data, (1, HK, Q, K), (0, 0, 0, 0))
    assert mask.dtype == 4
    assert recording.plan.bytes == 704


def test_a_call_with_a_plan_of_blocks(pack: _core.Pack, recording: Recording) -> None:
    recording.set_next(plan_bytes=40)
    shape = np.broadcast_to(zeros(1, dtype="int32"), (1, H, Q, K))
    plan = zeros(100, dtype="uint8")
    problem = batch_call(mask=shape, given_plan=plan).problem(pack)
    assert problem.plan_bytes == 40
    out, lse = zeros(B, Q, H, 8), zeros(B, H, Q)
    problem.forward(as_tuple(out), as_tuple(lse), as_tuple(plan), None)
    assert recording.problem.mask.summary()[1:] == ((1, H, Q, K), (0, 0, 0, 0))
    assert recording.problem.mask.dtype == 4
    refused(lambda: batch_call(mask=shape).problem(pack), TypeError, ("attn_mask has dtype int32",))


@pytest.mark.parametrize(
    ("call", "blocks", "fragments"),
    [
        (batch_call(mask=zeros(1, 1, Q, K, dtype="bool")), {}, ("the call has another mask",)),
        (varlen_call(), {}, ("its sequences are packed",)),
        (batch_call(), {"numbers": numbers(heads=3)}, ("numbers has shape (1, 3, 3, 3)", "heads")),
        (batch_call(), {"numbers": numbers(batch=3)}, ("numbers has shape (3, 2, 3, 3)",)),
        (batch_call(), {"numbers": numbers(rows=2)}, ("3 blocks of queries and 3 blocks of keys",)),
        (batch_call(), {"numbers": numbers(columns=4)}, ("numbers has shape (1, 2, 3, 4)",)),
        (batch_call(), {"numbers": numbers()[0]}, ("numbers has shape (2, 3, 3)",)),
        (batch_call(), {"contents": zeros(1, 0, 3, dtype="bool")}, ("at least one pair",)),
        (batch_call(), {"contents": zeros(1, 2, 6, dtype="bool")[..., ::2]}, ("contiguous",)),
        (batch_call(), {"kept": -1}, ("kept is -1",)),
        (batch_call(), {"partial": -2}, ("partial is -2",)),
    ],
)
def test_wrong_blocks(
    pack: _core.Pack, call: Call, blocks: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    given = {"numbers": numbers(), "contents": zeros(0, 2, 3, dtype="bool"), "kept": 1}
    given |= {"partial": 0} | blocks
    tensors = (as_tuple(given["numbers"]), as_tuple(given["contents"]))
    problem = call.problem(pack)
    refused(
        lambda: problem.take_blocks(*tensors, given["kept"], given["partial"]),
        ValueError,
        fragments,
    )


def test_packs_without_plans_of_blocks(pack: _core.Pack, tmp_path: Path) -> None:
    assert pack.plans_blocks
    other = _core.load_pack(str(compile_pack(tmp_path / "libother.so", NO_BLOCKS=1)))
    assert not other.plans_blocks
    problem, contents = batch_call().problem(other), zeros(0, 2, 3, dtype="bool")
    refused(
        lambda: problem.take_blocks(as_tuple(numbers()), as_tuple(contents), 1, 0),
        NotImplementedError,
        ("kernel pack recording has no plans of blocks",),
    )
    shape = zeros(1, 1, Q, K, dtype="int32")
    call = batch_call(mask=shape, given_plan=zeros(9, dtype="uint8"))
    refused(lambda: call.problem(other), TypeError, ("attn_mask has dtype int32",))
