# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for a GPU in `python -m release records`, which records the GPU of the tests.

Every Python program of the jobs imports this file. It changes no other program.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def report() -> dict[str, Any]:
    """Return the part of a self-test's report that a record uses."""
    pack = f"cu{os.environ['FLASH_DMATTN_CUDA']}-sm90"
    return {
        "devices": [
            {
                "kind": "cuda",
                "name": "no GPU: a rehearsal",
                "capability": [9, 0],
                "pack": {"name": pack},
            }
        ],
        "versions": {"torch": "of the rehearsal"},
        "cuda": {"driver": "of the rehearsal"},
    }


if sys.orig_argv[1:4] == ["-m", "release", "records"]:
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 # as `python -m` does later
    from release import records

    records.self_test = report
