# SPDX-License-Identifier: BSD-3-Clause
"""``python -m flash_dmattn``: report which pack serves each device of this machine, and why.

Options check that the packs compute correctly and that the installed files are intact.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import NoReturn

from . import selftest
from .loader import Loader, default_loader, verify
from .loader.report import make_report, render


class ExitCode(IntEnum):
    """Exit codes of the command; docs/packs.md explains each."""

    USABLE = 0
    NOT_USABLE = 1
    SELFTEST_FAILED = 2
    VERIFICATION_FAILED = 3
    USAGE = 64  # EX_USAGE of sysexits.h, since argparse's own 2 is taken


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None, loader: Loader = default_loader) -> int:
    """Print the report and return the exit code."""
    parser = _Parser(
        prog="python -m flash_dmattn",
        description="Show which kernel pack serves each device, and why.",
        epilog="Exit codes: 0 calls compute; 1 on a device they do not, or the environment is not "
        "valid; 2 the self-test failed; 3 a file is not as recorded.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--selftest", action="store_true", help="compare small problems with the formula in float64"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare the installed files with their recorded hashes",
    )
    options = parser.parse_args(arguments)

    report = make_report(loader)
    code = ExitCode.USABLE if report["usable"] else ExitCode.NOT_USABLE
    outcome = None
    if options.selftest:
        served = [(d["kind"], d["index"]) for d in report["devices"] if d["computes"]]
        outcome = selftest.run(served, loader.pack_for)
        if not outcome.passed:
            code = ExitCode.SELFTEST_FAILED
    checked = None
    if options.verify:
        checked = verify.verify(loader.candidates())
        if not verify.passed(checked):
            code = ExitCode.VERIFICATION_FAILED

    if options.json:
        report["verification"] = None if checked is None else verify.as_json(checked)
        report["selftest"] = None if outcome is None else outcome.as_json()
        report["exit_code"] = int(code)
        print(json.dumps(report, indent=2))
    else:
        print(render(report))
        if outcome is not None:
            print(f"\n{outcome}")
        if checked is not None:
            print(f"\n{verify.render(checked)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
