# SPDX-License-Identifier: BSD-3-Clause
"""Checks wheels before they are published: one function for each guarantee.

A gate yields a line for each failure, and raises `Skipped` if it cannot run. Needs the extra
[gates]. A gate that runs another project's tool is skipped if the tool is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from release import targets
from release.distributions import Wheel
from release.gates import layout, libraries, packs, tools
from release.gates.verdict import Gate, Result, Task, judge
from release.project import ReleaseError

GATES: Mapping[str, Gate] = {
    "needed": libraries.needed,
    "symbol-versions": libraries.symbol_versions,
    "run-path": libraries.run_path,
    "exports": libraries.exports,
    "hardening": libraries.hardening,
    "machine": libraries.machine,
    "tag": layout.tag,
    "abi3-only": layout.abi3_only,
    "content": layout.content,
    "licences": layout.licences,
    "materials": layout.materials,
    "sizes": layout.sizes,
    "manifest": packs.manifest,
    "device-code": packs.device_code,
    "same-kernels": packs.same_kernels,
    "complete": packs.complete,
    "auditwheel": tools.auditwheel,
    "abi3audit": tools.abi3audit,
    "check-wheel-contents": tools.check_wheel_contents,
    "twine": tools.twine,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument(
        "--profile", choices=["linux", "manylinux"], help="by default what the tag promises"
    )
    parser.add_argument(
        "--complete", action="store_true", help="a release: every pack, with every kernel"
    )
    parser.add_argument("--strict", action="store_true", help="a skipped gate is a failure")
    parser.add_argument("--report", type=Path, help="write what was found as JSON")
    parser.add_argument("--only", action="append", choices=sorted(GATES), help="only this gate")
    parser.add_argument("--list", action="store_true", help="list the gates")


def run(options: argparse.Namespace) -> None:
    """Check every wheel."""
    if options.list:
        for name, gate in GATES.items():
            print(f"{name:22} {(gate.__doc__ or '').partition(chr(10))[0]}")
        return
    if not options.wheels:
        raise ReleaseError("no wheel was named")
    passed = True
    reports = []
    for path in options.wheels:
        wheel = Wheel.read(path)
        manylinux = wheel.manylinux if not options.profile else options.profile == "manylinux"
        task = Task(wheel, targets.load(), manylinux, options.complete)
        print(f"{path.name}:")
        results = check(task, options.only or list(GATES))
        passed &= not any(r.failures or (options.strict and r.skipped) for r in results)
        reports.append(report(wheel, results))
    if options.report:
        options.report.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    if not passed:
        raise ReleaseError("a gate failed")
    print("release gates: all gates passed")


def check(task: Task, gates: list[str]) -> list[Result]:
    """Run gates on one wheel, printing what each found."""
    results = []
    for name in gates:
        result = judge(name, GATES[name], task)
        results.append(result)
        print(f"  {result.status:7} {name}" + (f": {result.skipped}" if result.skipped else ""))
        for failure in result.failures:
            print(f"{name}: {failure}", file=sys.stderr)
    return results


def report(wheel: Wheel, results: list[Result]) -> dict[str, object]:
    """Return the report of one wheel."""
    return {
        "wheel": wheel.path.name,
        "size": wheel.path.stat().st_size,
        "packs": {
            name.rpartition("/")[2]: len(content)
            for name, content in wheel.contents.items()
            if wheel.is_pack(name)
        },
        "gates": {
            result.gate: {
                "status": result.status,
                "failures": list(result.failures),
                "skipped": result.skipped,
            }
            for result in results
        },
    }
