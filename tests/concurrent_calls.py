# SPDX-License-Identifier: BSD-3-Clause
"""The self-test of the cpu pack in many threads at once: each thread must get the results of one.

It needs only NumPy, so it runs on every Python, including one without a GIL: ``python
tests/concurrent_calls.py``.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from flash_dmattn.loader import pack_for
from flash_dmattn.selftest.outcome import Comparison
from flash_dmattn.selftest.with_numpy import compare

THREADS = 8


def comparisons() -> tuple[Comparison, ...]:
    """Run the self-test's problems; the first call also chooses the pack."""
    return tuple(compare(pack_for("cpu")))


def in_threads(count: int = THREADS) -> list[tuple[Comparison, ...]]:
    """Start all threads together and return their results."""
    barrier = threading.Barrier(count)

    def one() -> tuple[Comparison, ...]:
        barrier.wait()
        return comparisons()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(one) for _ in range(count)]]


def main() -> int:
    """Compare the results; the threads run first, so that they also race for the first use."""
    found = in_threads()
    alone = comparisons()
    wrong = [comparison for comparison in alone if not comparison.passed]
    differing = sum(results != alone for results in found)
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(
        f"Python {sys.version.split()[0]}, {'with' if has_gil else 'without'} a GIL: "
        f"{len(alone)} comparisons in {THREADS} threads, {len(wrong)} wrong, "
        f"{differing} threads differ, {pack_for('cpu').features}"
    )
    return 1 if wrong or differing else 0


if __name__ == "__main__":
    sys.exit(main())
