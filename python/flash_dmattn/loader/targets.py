# SPDX-License-Identifier: BSD-3-Clause
"""The table of GPU archs and CUDA majors: an installed copy of cmake/targets.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from . import messages

SCHEMA = 1


class InstallationError(RuntimeError):
    """A required file of the installation is missing or invalid."""


class Targets(NamedTuple):
    """The GPU archs of packs, and the drivers and CUDA versions that they need."""

    # By compute capability, such as 8.9: the archs that run on it, in order of preference.
    preference: Mapping[str, tuple[str, ...]]
    # By compute capability: "run" if the tests have passed on such a GPU; "tiles" if they have
    # passed with its tiles on a GPU of another capability; "self-test" as "tiles", but a self-test
    # must pass before a pack serves; otherwise "none".
    record: Mapping[str, str]
    # By CUDA major, such as 12: the oldest NVIDIA driver that runs its packs.
    min_driver: Mapping[str, str]
    # By arch, if it needs a newer driver: that driver, and the CUDA that this driver runs.
    arch_driver: Mapping[str, tuple[str, str]] = MappingProxyType({})


def find_targets(directories: Iterable[Path]) -> Targets:
    """Read ``targets.json`` from the first directory that has it.

    Raises:
        InstallationError: no directory has it, or it is invalid.
    """
    paths = [directory / "targets.json" for directory in directories]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise InstallationError(messages.NO_TABLE.format(paths=" or ".join(map(str, paths))))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data.get("schema")
        if found != SCHEMA:
            raise InstallationError(messages.TABLE_SCHEMA.format(found=found, known=SCHEMA))
        return Targets(
            preference={cc: tuple(archs) for cc, archs in data["preference"].items()},
            record={cc: str(data["record"][cc]) for cc in data["preference"]},
            min_driver={major: str(row["min_driver"]) for major, row in data["cuda"].items()},
            arch_driver={
                arch: (str(row["min_driver"]), str(row["min_cuda"]))
                for arch, row in data.get("archs", {}).items()
                if "min_driver" in row
            },
        )
    except json.JSONDecodeError as error:
        raise InstallationError(messages.TABLE_JSON.format(path=path, error=error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InstallationError(messages.TABLE_FIELDS.format(error=repr(error))) from error
