# SPDX-License-Identifier: BSD-3-Clause
"""The error of a device that no pack serves, and the warning of a slower path."""

from __future__ import annotations

import sys
import warnings

from . import messages
from .trace import Trace

__all__ = [
    "FallbackWarning",
    "LibraryFileError",
    "NoPackError",
    "passed_over_text",
    "plain_pytorch_text",
    "truncated",
    "warn",
]

# The packages whose frames a warning skips to name the line that called; torch calls back.
_NO_CALLERS = ("flash_dmattn", "torch")


class NoPackError(RuntimeError):
    """No kernel pack serves a device. The text has what was looked for, what was found, and what to
    do.

    Attributes:
        trace: the same, as data.
    """

    def __init__(self, trace: Trace) -> None:
        """Make the text of a trace in which nothing was chosen."""
        lines = [messages.NO_PACK.format(device=trace.situation.device), *trace.lines()]
        super().__init__("\n".join([*lines, f"fix: {trace.remedy}"]))
        self.trace = trace


class LibraryFileError(RuntimeError):
    """A file that must not be given to the system's loader."""


class FallbackWarning(RuntimeWarning):
    """Something slower, or something else than was installed for the purpose, computes."""


def plain_pytorch_text(device: str, error: NoPackError) -> str:
    """Return the warning that plain PyTorch computes on a device."""
    return f"{messages.PLAIN_PYTORCH.format(device=device)}\n{error}"


def passed_over_text(trace: Trace) -> str:
    """Return the warning about damaged packs that were passed over; "" if there are none."""
    if trace.chosen is None or not trace.passed_over:
        return ""
    text = messages.PASSED_OVER.format(chosen=trace.chosen.name, device=trace.situation.device)
    lines = [text, *(str(entry) for entry in trace.passed_over)]
    return "\n".join([*lines, f"fix: {trace.remedy_of(trace.passed_over)}"])


def truncated(path: str, size: int, needed: int) -> LibraryFileError:
    """Return the error of a file that ends before what its headers tell of."""
    return LibraryFileError(messages.TRUNCATED.format(path=path, size=size, needed=needed))


def warn(text: str) -> None:
    """Give a FallbackWarning that names the line of the user's program that called."""
    level, frame = 1, sys._getframe(0)
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in _NO_CALLERS
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FallbackWarning, stacklevel=level)
