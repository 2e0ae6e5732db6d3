# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the core from many threads at once."""

import subprocess
import sys
from pathlib import Path

from concurrent_calls import comparisons, in_threads

SCRIPT = Path(__file__).resolve().parents[1] / "concurrent_calls.py"


def test_threads_find_what_one_alone_finds():
    alone = comparisons()
    assert [comparison for comparison in alone if not comparison.passed] == []
    assert [results for results in in_threads() if results != alone] == []


def test_threads_that_race_for_the_first_use():
    """Run in a new process, which has not chosen a pack yet."""
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong, 0 threads differ" in done.stdout
