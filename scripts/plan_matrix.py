#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Prints what CI builds and tests as one line of JSON, from cmake/targets.json."""

from __future__ import annotations

import argparse
import json
import sys

from wheels import matrix, targets


def main() -> int:
    """Parse the command line and print the plan."""
    table = targets.load()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="the subset that a change is tried on")
    parser.add_argument(
        "--machine", action="append", default=[], choices=[row.machine for row in table.platforms]
    )
    asked = parser.parse_args()
    print(json.dumps(matrix.plan(table, asked.machine, asked.small)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
