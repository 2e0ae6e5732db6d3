# SPDX-License-Identifier: BSD-3-Clause
"""Draws the pictures of masks and plans of the documentation, from the installed package.

"python -m benchmarks render" draws those of measurements. Needs the extra [bench].
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import masks, plans

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


def main() -> int:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(prog="python -m docs_tools", description=__doc__)
    parser.add_argument("--output", type=Path, default=FIGURES, help="another folder")
    options = parser.parse_args()
    for picture in (*masks.PICTURES, *plans.PICTURES):
        print(picture(options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
