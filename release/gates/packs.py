# SPDX-License-Identifier: BSD-3-Clause
"""Gates on the packs: they match their manifest, and a release has all of them."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from release.distributions import PACKAGE
from release.gates.verdict import Skipped, Task
from release.programs import cuda_version, find_cuobjdump, listed_code
from release.project import MANIFEST_SCHEMA, ReleaseError, abi_version
from release.targets import TABLE, version_numbers

_BUILT_FOR = ("name", "file", "device", "machine", "cuda", "arch", "code", "min_driver")
FIELDS = frozenset((*_BUILT_FOR, "head_dims", "kernels", "commit", "sha256", "size"))


def _rows(task: Task) -> list[dict[str, Any]]:
    """Return the rows of the manifest.

    Raises:
        ReleaseError: a row does not have the expected fields.
    """
    rows = task.wheel.packs
    for row in rows:
        if set(row) != FIELDS:
            differing = ", ".join(sorted(set(row) ^ FIELDS))
            raise ReleaseError(
                f"packs/manifest.json: {row.get('name')} differs in fields: {differing}"
            )
    return rows


def manifest(task: Task) -> Iterator[str]:
    """The manifest lists the packs in the wheel with their hashes, and agrees with the table."""
    wheel = task.wheel
    head = wheel.manifest
    for key, expected in (
        ("schema", MANIFEST_SCHEMA),
        ("version", wheel.metadata("METADATA", "Version")[0]),
        ("abi_version", abi_version()),
    ):
        if head.get(key) != expected:
            yield f"the manifest has {key} {head.get(key)!r}, not {expected!r}"
    table = wheel.contents.get(f"{PACKAGE}/targets.json", b"null")
    if json.loads(table) != json.loads(TABLE.read_bytes()):
        yield "targets.json is not the project's"

    rows = _rows(task)
    there = {name.rpartition("/")[2] for name in wheel.contents if wheel.is_pack(name)}
    listed = [row["file"] for row in rows]
    for file in sorted(there ^ set(listed)):
        yield f"{file} is {'not listed' if file in there else 'listed, but absent'}"
    if len(set(listed)) != len(listed):
        yield "the manifest lists a file twice"
    for row in rows:
        if row["file"] in there:
            yield from _check_row(task, row)


def _check_row(task: Task, row: dict[str, Any]) -> Iterator[str]:
    """Compare a pack's row with its file and the table."""
    name = row["name"]
    content = task.wheel.contents[f"{PACKAGE}/packs/{row['file']}"]
    expected: dict[str, Any] = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "machine": task.wheel.machine,
    }
    if row["device"] == "cuda":
        found = re.fullmatch(r"cu(\d+)-(sm\d+)", name)
        archs = {arch.name: arch for arch in task.table.archs}
        majors = {cuda.major: cuda for cuda in task.table.cuda}
        if found is None or found[1] not in majors or found[2] not in archs:
            yield f"{name} is no pack of the table"
            return
        expected["arch"] = found[2]
        expected["code"] = [archs[found[2]].code]
        expected["min_driver"] = task.table.min_driver(archs[found[2]], majors[found[1]])
        if not re.fullmatch(rf"{found[1]}\.\d+", str(row["cuda"])):
            yield f"{name} was built with CUDA {row['cuda']}"
    for key, value in expected.items():
        if row[key] != value:
            yield f"{name} has {key} {row[key]!r}, not {value!r}"


def device_code(task: Task) -> Iterator[str]:
    """A pack's machine code is for its arch only, and it has no PTX.

    Without a cuobjdump as new as the pack, the gate reads the pack's section .nv_fatbin. Neither
    the section nor an older cuobjdump tells 90a from 90: the gate then fails, or is skipped.
    """
    failed, undecided = False, []
    cuobjdump = find_cuobjdump()
    able = version_numbers(cuda_version(cuobjdump)) if cuobjdump else (0,)
    for row in _rows(task):
        name = f"{PACKAGE}/packs/{row['file']}"
        if name not in task.wheel.contents:
            continue  # the manifest gate reports it
        expected = set(row["code"])
        if cuobjdump and able >= version_numbers(row["cuda"] or "0"):
            with tempfile.TemporaryDirectory() as folder:
                library = Path(folder) / "pack.so"
                library.write_bytes(task.wheel.contents[name])
                found = listed_code(cuobjdump, library)
        else:
            found = set(task.libraries[name].device_code)
            if any(code.endswith(("a", "f")) for code in expected):
                undecided.append(str(row["name"]))
            expected = {code.rstrip("af") for code in expected}
        if found != expected:
            yield f"{row['name']} holds {_shown(found)}; its manifest says {_shown(expected)}"
            failed = True
    if undecided and not failed:
        raise Skipped(
            f"no cuobjdump as new as {', '.join(undecided)} (the extra [gates] has one): whether "
            "the code is of the arch's own kind, as sm_90a, is not known"
        )


def _shown(codes: set[str]) -> str:
    return ", ".join(sorted(codes)) or "no device code"


def same_kernels(task: Task) -> Iterator[str]:
    """Packs of one arch hold the same kernels for every CUDA major."""
    rows = [row for row in _rows(task) if row["device"] == "cuda"]
    for arch in sorted({str(row["arch"]) for row in rows}):
        kernels = {(row["kernels"], str(row["head_dims"])) for row in rows if row["arch"] == arch}
        if len(kernels) > 1:
            yield f"the packs of {arch} hold different kernels"


def complete(task: Task) -> Iterator[str]:
    """A release has every pack of the table, with all kernels, of one commit."""
    if not task.complete:
        return
    rows = _rows(task)
    names = {row["name"] for row in rows}
    wanted = {"cpu"}
    for cuda in task.table.cuda if task.wheel.system == "linux" else ():
        archs = task.table.released(cuda, task.wheel.machine)
        wanted |= {f"cu{cuda.major}-{arch.name}" for arch in archs}
    for name in sorted(wanted - names):
        yield f"the pack {name} is absent"
    for row in rows:
        if row["device"] == "cuda" and row["head_dims"] != sorted(task.table.head_dims):
            yield f"{row['name']} has the head dimensions {row['head_dims']} only"
        if row["commit"] is None or row["commit"].endswith("-dirty"):
            yield f"{row['name']} comes of no commit: {row['commit']}"
    commits = {str(row["commit"]) for row in rows}
    if len(commits) > 1:
        yield f"the packs come of different commits: {', '.join(sorted(commits))}"
