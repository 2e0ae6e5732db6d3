# SPDX-License-Identifier: BSD-3-Clause
"""The error for a device without a pack, and warnings of slower paths."""

from __future__ import annotations

import sys
import warnings

from . import messages
from .trace import Trace


class NoPackError(RuntimeError):
    """No kernel pack serves a device. The text lists what was searched and found, and the remedy;
    ``trace`` has the same as data.
    """

    def __init__(self, trace: Trace) -> None:
        """Make the text from a trace without a chosen pack."""
        heading = messages.NO_PACK.format(device=trace.situation.device)
        super().__init__("\n".join([heading, *trace.lines(), f"fix: {trace.remedy}"]))
        self.trace = trace


class LibraryFileError(RuntimeError):
    """A file that must not be passed to the system's loader."""


class FallbackWarning(RuntimeWarning):
    """A slower path, or another one than was installed for the purpose, computes."""


class UntestedWarning(UserWarning):
    """A pack serves a GPU on which only its self-test has been run."""


def plain_pytorch_text(device: str, error: NoPackError) -> str:
    """Return the warning that plain PyTorch computes on a device."""
    return f"{messages.PLAIN_PYTORCH.format(device=device)}\n{error}"


def passed_over_text(trace: Trace) -> str:
    """Return the warning about damaged packs that were skipped; "" if there are none."""
    damaged = trace.passed_over
    if trace.chosen is None or not damaged:
        return ""
    text = messages.PASSED_OVER.format(chosen=trace.chosen.name, device=trace.situation.device)
    return "\n".join([text, *map(str, damaged), f"fix: {trace.remedy_of(damaged)}"])


def check_machine(path: str, machine: str, built: str | None, form: str, number: str) -> None:
    """Raise unless a shared library was built for a machine.

    Args:
        path: of the library.
        machine: such as ``x86_64``.
        built: the machine that it was built for; None if only its number is known.
        form: the file format, which defines the number.
        number: as text.
    """
    if built is None:
        built = messages.UNKNOWN_MACHINE.format(form=form, number=number)
    if built != machine:
        raise LibraryFileError(
            messages.FOREIGN_LIBRARY.format(path=path, built=built, machine=machine)
        )


def truncated(path: str, size: int, needed: int) -> LibraryFileError:
    """Return the error for a file that is shorter than its headers require."""
    return LibraryFileError(messages.TRUNCATED.format(path=path, size=size, needed=needed))


def warn(text: str, category: type[Warning] = FallbackWarning) -> None:
    """Give a warning at the line of the user's program that called, not at a line of flash_dmattn
    or torch.
    """
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").partition(".")[0] in ("flash_dmattn", "torch")
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
