#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Checks wheels: their libraries, content, packs and metadata, by scripts/wheels/gates.

    scripts/check_wheel.py dist/flash_dmattn-*.whl
    scripts/check_wheel.py --complete --strict --report gates.json dist/flash_dmattn-*.whl

Needs the extra [gates]; a gate of another project that is not installed is skipped, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from wheels import targets
from wheels.gates import GATES, Result, Task, judge
from wheels.wheel_file import PACKAGE, Wheel, WheelError


def check(path: Path, profile: str | None, complete: bool, gates: list[str]) -> list[Result]:
    """Run gates on one wheel, printing what each found."""
    print(f"{path.name}:")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Wheel.unpack(path, Path(folder))
        manylinux = wheel.manylinux if profile is None else profile == "manylinux"
        task = Task(wheel, targets.load(), manylinux, complete)
        results = []
        for name in gates:
            result = judge(name, GATES[name], task)
            results.append(result)
            print(f"  {result.status:7} {name}" + (f": {result.skipped}" if result.skipped else ""))
            for failure in result.failures:
                print(f"{name}: {failure}", file=sys.stderr)
        return results


def report(path: Path, results: list[Result]) -> dict[str, object]:
    """Return what the report says of one wheel."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = Wheel.unpack(path, Path(folder))
        packs = wheel.folder / PACKAGE / "packs"
        return {
            "wheel": path.name,
            "size": path.stat().st_size,
            "packs": {pack.name: pack.stat().st_size for pack in sorted(packs.glob("*.so"))},
            "gates": {
                result.gate: {
                    "status": result.status,
                    "failures": list(result.failures),
                    "skipped": result.skipped,
                }
                for result in results
            },
        }


def main() -> int:
    """Parse the command line and check every wheel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    asked = parser.parse_args()
    if asked.list:
        for name, gate in GATES.items():
            print(f"{name:22} {(gate.__doc__ or '').partition(chr(10))[0]}")
        return 0
    if not asked.wheels:
        parser.error("no wheel was named")
    passed = True
    reports = []
    for path in asked.wheels:
        try:
            results = check(path, asked.profile, asked.complete, asked.only or list(GATES))
        except WheelError as error:
            print(f"check_wheel: {error}", file=sys.stderr)
            return 1
        passed &= not any(r.failures or (asked.strict and r.skipped) for r in results)
        reports.append(report(path, results))
    if asked.report:
        asked.report.write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    print("check_wheel: " + ("all gates passed" if passed else "a gate failed"))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
