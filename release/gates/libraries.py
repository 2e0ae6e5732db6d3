# SPDX-License-Identifier: BSD-3-Clause
"""Gates on the shared libraries: nothing that a machine may lack, nothing that others see."""

from __future__ import annotations

import re
from collections.abc import Iterator

from release.distributions import PACKAGE
from release.gates.verdict import Task
from release.project import pack_symbol
from release.targets import version_numbers

# The parts of glibc, which is on every machine that a wheel's tag admits.
_GLIBC = re.compile(r"(libc|libm|libdl|libpthread|librt|ld-linux-[a-z0-9-]+)\.so(\.\d+)+")
# The core shares objects of libstdc++ with nanobind's backend. Packs have a C interface: they
# link it statically, and so run where it is older.
_CXX = re.compile(r"(libstdc\+\+|libgcc_s)\.so(\.\d+)+")


def needed(task: Task) -> Iterator[str]:
    """Libraries need glibc only, the core also libstdc++: nothing of CUDA, and no torch."""
    for name, library in task.libraries.items():
        for other in library.needed:
            shared_cxx = _CXX.fullmatch(other) and not task.wheel.is_pack(name)
            if not _GLIBC.fullmatch(other) and not shared_cxx:
                yield f"{name} needs {other}, which is not on every machine"


def symbol_versions(task: Task) -> Iterator[str]:
    """No symbol is newer than the policy of manylinux wheels allows."""
    limits = task.table.wheel
    highest = {"GLIBC": limits.glibc, "GLIBCXX": limits.glibcxx, "CXXABI": limits.cxxabi}
    if not task.manylinux:
        return
    for name, library in task.libraries.items():
        for family, limit in highest.items():
            found = library.versions.get(family, "0")
            if version_numbers(found) > version_numbers(limit):
                yield f"{name} needs {family}_{found}; {limits.policy} ends at {family}_{limit}"


def run_path(task: Task) -> Iterator[str]:
    """Libraries are looked for where the system has them, or beside the one that needs them."""
    for name, library in task.libraries.items():
        for path in library.run_paths:
            if path != "$ORIGIN":
                yield f"{name} has the run path {path}"


def exports(task: Task) -> Iterator[str]:
    """A pack exports one function, an extension module its initialisation."""
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
    """No executable stack, no writable code or function table, no debug information."""
    for name, library in task.libraries.items():
        if library.text_relocations:
            yield f"{name} has text relocations"
        if library.executable_stack:
            yield f"{name} asks for an executable stack"
        if library.lazy_binding:
            yield f"{name} is not linked with -z now"
        if library.debug:
            yield f"{name} has debug information; it was not stripped"


def machine(task: Task) -> Iterator[str]:
    """Libraries are of the machine in the wheel's tag, and where this project puts them."""
    for name, library in task.libraries.items():
        if library.machine != task.wheel.machine:
            yield f"{name} is for {library.machine}, the tag says {task.wheel.machine}"
        if not task.wheel.is_pack(name) and name != f"{PACKAGE}/_core.abi3.so":
            yield f"{name} is neither the core nor a pack"
