# SPDX-License-Identifier: BSD-3-Clause
"""Small problems on each device on which calls compute, compared with the formula in float64.

With torch the public functions run, forward and backward, by whatever computes calls that do not
say. With NumPy alone the cpu pack is called through the core.
"""

from .outcome import TOLERANCES, Comparison, Outcome
from .running import run

__all__ = ["TOLERANCES", "Comparison", "Outcome", "run"]
