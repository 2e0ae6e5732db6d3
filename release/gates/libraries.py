# SPDX-License-Identifier: BSD-3-Clause
"""Gates on the shared libraries: dependencies, exports and hardening."""

from __future__ import annotations

import re
from collections.abc import Iterator

from release.gates.verdict import Task
from release.project import pack_symbol
from release.targets import version_numbers

# The libraries that every machine of a wheel's tag has: the parts of glibc; macOS's C and C++
# libraries; Windows' kernel and C library.
_SYSTEM = {
    "linux": re.compile(r"(libc|libm|libdl|libpthread|librt|ld-linux-[a-z0-9-]+)\.so(\.\d+)+"),
    "macos": re.compile(r"/usr/lib/(libSystem\.B|libc\+\+\.1|libc\+\+abi)\.dylib"),
    "windows": re.compile(r"(kernel32|ntdll|ucrtbase|api-ms-win-[a-z0-9-]+)\.dll", re.IGNORECASE),
}
# The libraries that only the core may need. It shares C++ objects with nanobind's backend. Packs
# have a C interface and link the C++ library statically, so that they run where it is older.
_CORE = {
    "linux": re.compile(r"(libstdc\+\+|libgcc_s)\.so(\.\d+)+"),
    "macos": re.compile(r"(?!)"),
    "windows": re.compile(r"(python3|vcruntime140(_1)?|msvcp140)\.dll", re.IGNORECASE),
}


def needed(task: Task) -> Iterator[str]:
    """Libraries need only the system's C library, the core also C++'s; not CUDA or torch."""
    system = task.wheel.system
    for name, library in task.libraries.items():
        for other in library.needed:
            of_core = _CORE[system].fullmatch(other) and not task.wheel.is_pack(name)
            if not _SYSTEM[system].fullmatch(other) and not of_core:
                yield f"{name} needs {other}, which is not on every machine"


def symbol_versions(task: Task) -> Iterator[str]:
    """Libraries run on the oldest system that the tag admits."""
    limits = task.table.wheel
    oldest = re.search(r"macosx_(\d+)_(\d+)_", task.wheel.tag)
    for name, library in task.libraries.items():
        if oldest and version_numbers(library.versions.get("macOS", "999")) > (
            int(oldest[1]),
            int(oldest[2]),
        ):
            yield f"{name} needs macOS {library.versions.get('macOS')}; the tag is {oldest[0]}"
    highest = {"GLIBC": limits.glibc, "GLIBCXX": limits.glibcxx, "CXXABI": limits.cxxabi}
    if not task.manylinux:
        return
    for name, library in task.libraries.items():
        for family, limit in highest.items():
            found = library.versions.get(family, "0")
            if version_numbers(found) > version_numbers(limit):
                yield f"{name} needs {family}_{found}; {limits.policy} ends at {family}_{limit}"


def run_path(task: Task) -> Iterator[str]:
    """The only run path is $ORIGIN, the library's own folder."""
    for name, library in task.libraries.items():
        for path in library.run_paths:
            if path != "$ORIGIN":
                yield f"{name} has the run path {path}"


def exports(task: Task) -> Iterator[str]:
    """A pack exports one function, an extension module only its initialisation."""
    for name, library in task.libraries.items():
        if task.wheel.is_pack(name):
            expected = (pack_symbol(),)
        else:
            expected = (f"PyInit_{name.rpartition('/')[2].partition('.')[0]}",)
        if library.exports != expected:
            shown = ", ".join([*library.exports[:5], *(["..."] if library.exports[5:] else [])])
            count = len(library.exports)
            yield f"{name} exports {count} symbols ({shown}), not {expected[0]} alone"


def hardening(task: Task) -> Iterator[str]:
    """Stack protectors, no executable stack, no writable code or function table, no debug info."""
    for name, library in task.libraries.items():
        for weakness in library.weaknesses:
            yield f"{name} {weakness}"


def machine(task: Task) -> Iterator[str]:
    """Libraries are for the machine in the wheel's tag, and are the core or packs."""
    for name, library in task.libraries.items():
        if library.machine != task.wheel.machine:
            yield f"{name} is for {library.machine}, the tag says {task.wheel.machine}"
        if not task.wheel.is_pack(name) and name != task.wheel.core:
            yield f"{name} is neither the core nor a pack"
