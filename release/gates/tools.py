# SPDX-License-Identifier: BSD-3-Clause
"""Gates that run tools of other projects."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

from release.gates.verdict import Skipped, Task
from release.targets import version_numbers


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this Python's environment."""
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"{module.replace('_', '-')} is not installed (the extra [gates] has it)")
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )


def _complaint(done: subprocess.CompletedProcess[str]) -> Iterator[str]:
    """Yield the output of a failed program as one line."""
    if done.returncode != 0:
        yield " ".join((done.stdout + done.stderr).split())[-1000:]


def auditwheel(task: Task) -> Iterator[str]:
    """auditwheel confirms the policy in the tag, and has no library to graft."""
    if task.wheel.system != "linux":
        return
    done = _run("auditwheel", "show", "--json", str(task.wheel.path))
    if done.returncode != 0:
        yield from _complaint(done)
        return
    found = json.loads(done.stdout)
    for name in sorted(found["external_libs"]):
        yield f"it would have to carry {name}"
    if task.manylinux:
        platform = str(found["overall_tag"])
        declared = task.table.wheel.policy.removeprefix("manylinux_").replace("_", ".")
        deserved = platform.removeprefix("manylinux_").removesuffix(f"_{task.wheel.machine}")
        if not platform.startswith("manylinux_") or (
            version_numbers(deserved.replace("_", ".")) > version_numbers(declared)
        ):
            yield f"it deserves the tag {platform} only, not {task.wheel.tag}"


def abi3audit(task: Task) -> Iterator[str]:
    """The extension modules use only the stable ABI of the tag's Python."""
    done = _run("abi3audit", "--strict", "--verbose", str(task.wheel.path))
    yield from _complaint(done)


def check_wheel_contents(task: Task) -> Iterator[str]:
    """No unexpected content. Ignores W002, which reports equal, empty __init__.py files."""
    done = _run("check_wheel_contents", "--no-config", "--ignore", "W002", str(task.wheel.path))
    yield from _complaint(done)


def twine(task: Task) -> Iterator[str]:
    """Package indexes accept the metadata."""
    yield from _complaint(_run("twine", "check", "--strict", str(task.wheel.path)))
