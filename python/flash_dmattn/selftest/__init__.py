# SPDX-License-Identifier: BSD-3-Clause
"""Comparison of small problems with the formula in float64, on each device that computes.

With torch the public functions run, forward and backward, by the default backend. With only NumPy
the cpu pack is called through the core.
"""

from .outcome import TOLERANCES, Comparison, Outcome
from .running import run

__all__ = ["TOLERANCES", "Comparison", "Outcome", "run"]
