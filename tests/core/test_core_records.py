# SPDX-License-Identifier: BSD-3-Clause
"""The call records: declared in Python, read by the core field by field."""

from __future__ import annotations

from typing import Any

import pytest

from flash_dmattn import _core

from .core_calls import batch_call, refused, to_core

FIELDS = _core.ATTENTION_FIELDS
COUNT = f"{len(FIELDS)} fields"


def values(**changes: Any) -> tuple[Any, ...]:
    """Return all fields of a valid call."""
    named = {name: to_core(value) for name, value in batch_call().arguments.items()}
    defaults = {
        "max_seqlen_q": 0,
        "max_seqlen_k": 0,
        "deterministic": False,
        "max_kept": 0,
        "window": -1,
        "keep_last": 0,
        "keep_first": 0,
        "keeps_runs": False,
    }
    return tuple({**dict.fromkeys(FIELDS), **defaults, **named, **changes}[n] for n in FIELDS)


def test_the_core_reads_the_fields_that_python_declares() -> None:
    pytest.importorskip("torch")
    from flash_dmattn.record import AttentionInputs, SelectionInputs

    assert AttentionInputs._fields == _core.ATTENTION_FIELDS
    assert SelectionInputs._fields == _core.SELECTION_FIELDS


def test_a_problem_by_position(pack: _core.Pack) -> None:
    assert (
        _core.Problem(pack, *values(), threads=2).plan_bytes
        == batch_call().problem(pack).plan_bytes
    )
    _core.check_attention(values(), 1)


WRONG = [
    (lambda pack: _core.Problem(pack, *values(), 1), [COUNT, "by position"]),
    (lambda pack: _core.Problem(pack, *values()[:3], maks=None), ["maks", "1 are unknown"]),
    (lambda pack: _core.Problem(pack, *values()[:4], mask=None), ["by position too"]),
    (lambda pack: _core.Problem(pack, *values(causal=3)), ["causal is of type int", "a boolean"]),
    (lambda pack: _core.Problem(pack, *values(scale="1")), ["scale is of type str", "a number"]),
    (
        lambda pack: _core.Problem(pack, *values(max_seqlen_q=1 << 70)),
        ["max_seqlen_q", "out of range", "an integer of 64 bits"],
    ),
    (lambda _: _core.Call(values()[1:]), ["a tuple of", COUNT]),
    (lambda _: _core.check_attention([1, 2], 1), ["a tuple of", COUNT]),
    (lambda _: _core.check_selection((), 1), ["a tuple of 13 fields", "window"]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "fragments"), WRONG)
def test_wrong_records(pack: _core.Pack, call: Any, fragments: list[str]) -> None:
    refused(lambda: call(pack), TypeError, tuple(fragments))


def test_gradients_have_the_names_of_fields(pack: _core.Pack) -> None:
    call = batch_call()
    query, lse = call.arguments["query"], call.arguments["query"][..., 0].transpose(0, 2, 1).copy()
    given = [to_core(query), None, to_core(query), to_core(lse)]
    with pytest.raises(
        ValueError, match=r"gradients are wanted of .*'mask'.*query, key, value, bias, sink and"
    ):
        call.problem(pack).backward(*given, {"mask": to_core(query)}, None, None)
