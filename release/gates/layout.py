# SPDX-License-Identifier: BSD-3-Clause
"""Gates on the content and the names of a wheel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from release.distributions import PACKAGE
from release.gates.verdict import Task
from release.project import PROJECT, ROOT
from release.sbom import BILL, bill_of_libraries

_MEGABYTE = 10**6
_REQUIRED = (
    "__init__.py",
    "packs/manifest.json",
    "py.typed",
    "targets.json",
)


def tag(task: Task) -> Iterator[str]:
    """The name and the metadata agree on one cp310-abi3 tag of a supported machine."""
    wheel = task.wheel
    inside = wheel.metadata("WHEEL", "Tag")
    if inside != [wheel.tag]:
        yield f"the WHEEL file says {', '.join(inside)}, the file's name {wheel.tag}"
    floor = "cp" + task.table.pythons[0].replace(".", "")
    policy = task.table.wheel.policy if task.manylinux else "linux"
    platforms = [f"{policy}_{row.machine}" for row in task.table.platforms]
    platforms += [row.tag for row in task.table.cpu_platforms]
    tags = [f"{floor}-abi3-{platform}" for platform in platforms]
    if wheel.tag not in tags:
        yield f"the tag is {wheel.tag}, not {' or '.join(tags)}"
    version = wheel.metadata("METADATA", "Version")
    if wheel.path.name.split("-")[1:2] != version:
        yield f"the metadata has version {version}, the name is {wheel.path.name}"


def abi3_only(task: Task) -> Iterator[str]:
    """No module's name is of one Python version; abi3audit does not check names."""
    for name in task.wheel.contents:
        if re.search(r"\.cpython-\d+[^/]*\.so$|\.cp\d+[^/]*\.(so|pyd)$", name):
            yield f"{name} is made for one version of Python"


def content(task: Task) -> Iterator[str]:
    """The wheel holds only the package, without leftovers of builds and tools."""
    wheel = task.wheel
    strangers = {name.partition("/")[0] for name in wheel.contents} - {PACKAGE, wheel.dist_info}
    for name in sorted(strangers):
        yield f"the top level holds {name}"
    for name in (wheel.core, wheel.cpu_pack, *(f"{PACKAGE}/{name}" for name in _REQUIRED)):
        if name not in wheel.contents:
            yield f"{name} is absent"
    for name in wheel.contents:
        if re.search(r"__pycache__|\.py[co]$|\.(c|cc|cpp|cu|cuh|h|o|a|cmake)$|/\.", name):
            yield f"{name} does not belong into a wheel"


def licences(task: Task) -> Iterator[str]:
    """Every licence file of the project is in the metadata folder, unchanged, and declared."""
    wheel = task.wheel
    names = [path.name for path in ROOT.glob("LICENSE*")]
    if not wheel.metadata("METADATA", "License-Expression"):
        yield "the metadata has no License-Expression"
    for name in names:
        file = f"{wheel.dist_info}/licenses/{name}"
        if file not in wheel.contents:
            yield f"{file} is absent"
        elif wheel.contents[file] != (ROOT / name).read_bytes():
            yield f"{file} differs from {name} of the project"
        if name not in wheel.metadata("METADATA", "License-File"):
            yield f"the metadata has no License-File {name}"


def materials(task: Task) -> Iterator[str]:
    """The wheel contains the bill of its libraries, with their hashes and linked runtimes."""
    wheel = task.wheel
    name = f"{wheel.dist_info}/sboms/{BILL}"
    if name not in wheel.contents:
        yield f"{name} is absent"
        return
    listed = json.loads(wheel.contents[name])
    version = wheel.metadata("METADATA", "Version")[0]
    if listed != bill_of_libraries(PROJECT, version, wheel.cores, wheel.packs):
        yield f"{name} is not the bill of the core and of the packs in the manifest"


def sizes(task: Task) -> Iterator[str]:
    """The wheel and each pack stay below the table's limits, in millions of bytes."""
    limits = task.table.wheel
    size = task.wheel.path.stat().st_size
    if size > limits.max_wheel_mb * _MEGABYTE:
        yield f"the wheel has {size / _MEGABYTE:.1f} MB; at most {limits.max_wheel_mb} are allowed"
    for pack in task.wheel.packs:
        if problem := task.table.oversize(pack):
            yield problem
