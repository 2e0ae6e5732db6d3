# SPDX-License-Identifier: BSD-3-Clause
"""Wrong calls of every public function raise our own exception with the argument's name, and never
crash.

First each argument alone gets each wrong value of its kind. Then hypothesis draws calls with
several wrong arguments; ``--hypothesis-profile=search`` draws many more.
"""

from __future__ import annotations

import re
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import BaseTorchFunctionMode

import flash_dmattn
from entry_points import ENTRIES, Entry
from wrong_values import KINDS, SECRET

_ALLOWED = (TypeError, ValueError, NotImplementedError, RuntimeError)
_LONGEST = 600
_PACKAGE = str(Path(flash_dmattn.__file__).parent)


def wrong_values(entry: Entry, argument: str) -> dict[str, Any]:
    wrong = KINDS[entry.kinds[argument]](entry.good.get(argument))
    return {kind: value for kind, value in wrong.items() if (argument, kind) not in entry.right}


def complaint(entry: Entry, changed: dict[str, Any]) -> str | None:
    """Return the defect in a wrong call's outcome, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry.call(**{**entry.good, **changed})
    except Exception as error:
        text = str(error)
        if not isinstance(error, _ALLOWED):
            return f"{type(error).__name__}: {text[:200]}"
        names = {entry.also_named.get(name, name) for name in changed} | set(changed)
        if not any(name in text for name in names):
            return f"names none of {', '.join(names)}: {text[:200]}"
        if not re.search(r"\b(must|needs?|cannot|but|not)\b", text):
            return f"does not say what is allowed: {text[:200]}"
        if len(text) > _LONGEST or str(SECRET) in text:
            return f"prints what it was given: {text[:200]}"
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_PACKAGE):
            return f"is not of ours: {text[:200]}"
        return None
    return "is accepted"


@pytest.mark.parametrize("name", ENTRIES)
def test_good_calls_are_good(name: str) -> None:
    entry = ENTRIES[name]
    assert entry.good.keys() - entry.kinds.keys() <= _ONLY_GIVEN
    entry.call(**entry.good)


# Tried with other values if these are wrong only together with another argument.
_ONLY_GIVEN = frozenset({"tensor", "hidden_states", "query_layer", "key_layer", "value_layer",
                         "block_size", "key"})  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_one_wrong_argument(name: str) -> None:
    entry = ENTRIES[name]
    found = [
        f"{argument} = {kind}: {what}"
        for argument in entry.kinds
        for kind, value in wrong_values(entry, argument).items()
        if (what := complaint(entry, {argument: value})) is not None
    ]
    assert not found, f"{len(found)} calls of {name}:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["flash_dmattn_func", "flash_dmattn_varlen_func", "pages"])
def test_tensors_without_dimensions_that_the_dispatcher_passes_on(name: str) -> None:
    """Under a mode, every call uses torch's dispatcher and memory."""
    entry, kind = ENTRIES[name], "of no dimensions"
    with BaseTorchFunctionMode():
        found = [
            f"{argument}: {what}"
            for argument in entry.kinds
            if kind in (wrong := wrong_values(entry, argument))
            and (what := complaint(entry, {argument: wrong[kind]})) is not None
        ]
    assert not found, "\n".join(found)


@given(st.data())
def test_several_wrong_arguments(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(ENTRIES)), "call")
    entry = ENTRIES[name]
    arguments = data.draw(
        st.lists(st.sampled_from(list(entry.kinds)), min_size=1, max_size=4, unique=True),
        "arguments",
    )
    changed = {}
    for argument in arguments:
        values = wrong_values(entry, argument)
        changed[argument] = values[data.draw(st.sampled_from(list(values)), argument)]
    what = complaint(entry, changed)
    assert what is None, f"{name}: {what}"
