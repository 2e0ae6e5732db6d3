# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

import copy
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

pytest.importorskip("elftools", reason="pyelftools is not installed (the extra [gates] has it)")

from release import targets
from release.distributions import Wheel
from release.gates import GATES, Result, Task, judge
from release.targets import Table

from .small_wheel import SmallWheel, compiler, good_wheel

# The tests' environment need not be active: its cmake and ninja come before older ones.
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]

Judge: TypeAlias = Callable[..., Result]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> SmallWheel:
    if compiler() is None:
        pytest.skip("no C compiler")
    return good_wheel(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def wheel(compiled: SmallWheel, tmp_path: Path) -> SmallWheel:
    """Return a good wheel for a test to spoil."""
    spoiled = copy.deepcopy(compiled)
    spoiled.workspace = tmp_path / "libraries"
    return spoiled


@pytest.fixture
def run_gate() -> Judge:
    """Return a function that runs one gate on a saved wheel."""

    def run(gate: str, path: Path, *, complete: bool = False, table: Table | None = None) -> Result:
        content = Wheel.read(path)
        task = Task(content, table or targets.load(), content.manylinux, complete)
        return judge(gate, GATES[gate], task)

    return run
