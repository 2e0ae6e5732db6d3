# SPDX-License-Identifier: BSD-3-Clause
"""The input of gates, and the collection of their results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from elftools.common.exceptions import ELFError

from release import mach_o, portable_executable
from release.binaries import Library, read_library
from release.distributions import Wheel
from release.project import ReleaseError
from release.targets import Table


class Skipped(Exception):  # noqa: N818 (it is no error)
    """The gate cannot run here; the text says why."""


@dataclass(frozen=True)
class Task:
    """A wheel and the requirements on it.

    Attributes:
        wheel: the wheel to check.
        table: the targets of releases.
        manylinux: it must conform to the manylinux policy of the table.
        complete: it must hold every pack of a release.
    """

    wheel: Wheel
    table: Table
    manylinux: bool
    complete: bool

    @cached_property
    def libraries(self) -> dict[str, Library]:
        """The shared libraries by their path in the wheel."""
        contents = self.wheel.contents
        names = [name for name in contents if re.search(r"\.so(\.\d+)*$|\.(dylib|dll|pyd)$", name)]
        try:
            return {name: read(contents[name]) for name in names}
        except ELFError as error:
            raise ReleaseError(
                f"one of {', '.join(names)} cannot be read as ELF: {error}"
            ) from error


def read(content: bytes) -> Library:
    """Read a library of any system."""
    if content.startswith(mach_o.MAGIC):
        return mach_o.read_mach_o(content)
    if content.startswith(portable_executable.MAGIC):
        return portable_executable.read_portable_executable(content)
    return read_library(content)


Gate: TypeAlias = Callable[[Task], Iterator[str]]


@dataclass(frozen=True)
class Result:
    """The result of one gate.

    Attributes:
        gate: its name.
        failures: one line each.
        skipped: why it could not run; "" if it ran.
    """

    gate: str
    failures: tuple[str, ...]
    skipped: str = ""

    @property
    def status(self) -> str:
        """``failed``, ``skipped`` or ``passed``."""
        return "failed" if self.failures else "skipped" if self.skipped else "passed"


def judge(name: str, gate: Gate, task: Task) -> Result:
    """Run one gate. A wheel that it cannot read fails."""
    try:
        return Result(name, tuple(gate(task)))
    except Skipped as reason:
        return Result(name, (), str(reason))
    except ReleaseError as error:
        return Result(name, (str(error),))
