# SPDX-License-Identifier: BSD-3-Clause
"""Each name in a slow target's subset must be a test's: a stale name would select nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from subsets import COLLECTED, SUBSETS


@pytest.mark.parametrize("name", SUBSETS)
def test_subset_names_tests(name: str, request: pytest.FixtureRequest) -> None:
    config = request.config
    names = config.stash[COLLECTED].get(name)
    if names is None:
        pytest.skip("the target is not here")
    folders = [Path(argument).resolve() for argument in config.args]
    if folders != [Path(__file__).parent] or config.getoption("lf") or config.getoption("ignore"):
        pytest.skip("only part of the tests was collected")
    missing = SUBSETS[name] - names
    assert not missing
