# SPDX-License-Identifier: BSD-3-Clause
"""The error of a device that no pack serves."""

from __future__ import annotations

from .trace import Trace

__all__ = ["NoPackError"]


class NoPackError(RuntimeError):
    """No kernel pack serves a device. The text has what was looked for, what was found, and what to
    do.

    Attributes:
        trace: the same, as data.
    """

    def __init__(self, trace: Trace) -> None:
        """Make the text of a trace in which nothing was chosen."""
        lines = [f"no kernel pack serves {trace.situation.device}", *trace.lines()]
        super().__init__("\n".join([*lines, f"fix: {trace.remedy}"]))
        self.trace = trace
