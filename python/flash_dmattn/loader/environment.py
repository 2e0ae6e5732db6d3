# SPDX-License-Identifier: BSD-3-Clause
"""The environment variables of flash_dmattn, with their allowed values. docs/environment.md
explains each.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from . import messages

PREFIX = "FLASH_DMATTN_"


class InvalidVariableError(ValueError):
    """An environment variable has a value that is not allowed."""


class UnknownVariableWarning(UserWarning):
    """An unknown environment variable has the prefix of flash_dmattn."""


class Variable(NamedTuple):
    """One environment variable."""

    name: str  # with its prefix
    values: tuple[str, ...]  # the allowed ones; empty if any value is allowed, such as a path
    default: str  # what `get` returns if the variable is unset or empty; "" means "not given"


_VARIABLES = (
    Variable("FLASH_DMATTN_LIBRARY_PATH", (), ""),
    Variable("FLASH_DMATTN_CUDA", ("12", "13"), ""),
    Variable("FLASH_DMATTN_ARCH", ("80", "86", "89", "90", "100", "110", "120"), ""),
    Variable("FLASH_DMATTN_UNTRIED", ("0", "1"), "0"),
    Variable(
        "FLASH_DMATTN_BACKEND", ("auto", "cuda", "cpu", "triton", "flex", "reference"), "auto"
    ),
    Variable("FLASH_DMATTN_FALLBACK", ("warn", "error"), "warn"),
    Variable("FLASH_DMATTN_LOG", ("off", "info", "debug"), "off"),
    Variable("FLASH_DMATTN_CPU_SIMD", ("auto", "baseline", "avx2", "avx512"), "auto"),
    Variable("FLASH_DMATTN_DETERMINISTIC", ("0", "1"), "0"),
)

ENVIRONMENT: Mapping[str, Variable] = {variable.name: variable for variable in _VARIABLES}


def get(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the value of a variable of the table, or its default if it is unset or empty.

    Raises:
        KeyError: the table has no such name.
        InvalidVariableError: the value is not allowed; the message has the allowed values and the
            nearest one.
    """
    problem = _problem(name, environ)
    if problem:
        raise InvalidVariableError(problem)
    return _value(name, environ) or ENVIRONMENT[name].default


def _value(name: str, environ: Mapping[str, str] | None) -> str:
    return (os.environ if environ is None else environ).get(name, "").strip()


def _problem(name: str, environ: Mapping[str, str] | None) -> str:
    value, values = _value(name, environ), ENVIRONMENT[name].values
    if not values or value in ("", *values):
        return ""
    text = messages.BAD_VALUE.format(name=name, allowed=", ".join(values), value=repr(value))
    return text + did_you_mean(value, values)


# The dictionary of os.environ, if this Python has it. For an absent name os.environ raises and
# catches two errors, which take a microsecond each.
_encoded = getattr(os.environ, "_data", None)
_ENCODED_NAMES = {name: os.fsencode(name) for name in ENVIRONMENT}


def is_given(name: str) -> bool:
    """Say whether a variable of the table is set. Fast, because every call uses it."""
    if _encoded is None:
        return name in os.environ
    return _ENCODED_NAMES[name] in _encoded


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean '...'?``, or "" if no choice is similar to the word, ignoring case."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return messages.DID_YOU_MEAN.format(near=repr(by_lower[near[0]])) if near else ""


def variables_set(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return all variables with the prefix of flash_dmattn, also unknown ones, and their values."""
    source = os.environ if environ is None else environ
    return {name: source[name] for name in sorted(source) if name.startswith(PREFIX)}


def invalid(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each variable of the table whose value is not allowed."""
    return list(filter(None, (_problem(name, environ) for name in ENVIRONMENT)))


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each unknown variable with the prefix of flash_dmattn, with the nearest
    known name.
    """
    return [
        messages.UNKNOWN_VARIABLE.format(name=name) + did_you_mean(name, ENVIRONMENT)
        for name in variables_set(environ)
        if name not in ENVIRONMENT
    ]


def check_values(environ: Mapping[str, str] | None = None) -> None:
    """Raise InvalidVariableError for the first variable whose value is not allowed.

    Variables without effect on the call are checked, too, because their user expects an effect.
    """
    for name in ENVIRONMENT:
        get(name, environ)


def check_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Warn about each unknown variable that has the prefix of flash_dmattn."""
    for text in unknown(environ):
        warnings.warn(text, UnknownVariableWarning, stacklevel=2)


def check_cpu_simd(level: str, environ: Mapping[str, str] | None = None) -> None:
    """Compare FLASH_DMATTN_CPU_SIMD with the level at which the cpu pack runs.

    Raises:
        InvalidVariableError: it requests another level. The pack replaces a level that the CPU
            lacks by the widest available one.
    """
    name = "FLASH_DMATTN_CPU_SIMD"
    wanted, values = get(name, environ), ENVIRONMENT[name].values
    if wanted in ("auto", level):
        return
    allowed = values[: values.index(level) + 1] if level in values else values[:1]
    raise InvalidVariableError(
        messages.NO_SIMD.format(name=name, allowed=", ".join(allowed), value=repr(wanted))
    )
