#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Assembles a wheel: the core and the cpu pack are built here, CUDA packs are taken as they are.

    scripts/assemble_wheel.py --packs packs/cu12 packs/cu13 --output dist

With --profile manylinux the wheel is retagged by auditwheel, which refuses unless it was built in
an image of that policy; needs auditwheel (the extra [gates]). The wheel's path is printed last.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

from wheels import targets
from wheels.builds import BuildError, assemble


def main() -> int:
    """Parse the command line, build, and print the wheel's path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packs", nargs="*", type=Path, default=[], help="folders of packs")
    parser.add_argument("--output", required=True, type=Path, help="folder for the wheel")
    parser.add_argument("--profile", default="linux", choices=["linux", "manylinux"])
    parser.add_argument(
        "--no-isolation", action="store_true", help="use the installed build requirements"
    )
    asked = parser.parse_args()
    limits = targets.load().wheel if asked.profile == "manylinux" else None
    try:
        isolate = not asked.no_isolation
        print(assemble(asked.packs, asked.output, limits, platform.machine(), isolate))
    except BuildError as error:
        print(f"assemble_wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
