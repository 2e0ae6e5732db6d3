# SPDX-License-Identifier: BSD-3-Clause
"""The keys that later queries can still see, in memory of fixed size."""

from .kept_keys import KeptKeys

__all__ = ["KeptKeys"]
