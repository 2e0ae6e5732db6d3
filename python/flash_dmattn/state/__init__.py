# SPDX-License-Identifier: BSD-3-Clause
"""All that later queries can see of the keys so far: the window's keys, in memory of fixed size."""

from .kept_keys import KeptKeys

__all__ = ["KeptKeys"]
