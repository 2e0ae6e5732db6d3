# SPDX-License-Identifier: BSD-3-Clause
"""The environment variables of flash_dmattn: one table of what is allowed; docs/install.md tells
what each does.
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
    """An environment variable has the prefix of flash_dmattn, but no meaning."""


class Variable(NamedTuple):
    """One environment variable."""

    name: str  # with its prefix
    values: tuple[str, ...]  # that are allowed; empty if the value is free, such as a path
    default: str  # what `get` returns if the variable is unset or empty; "" is "not given"


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
        InvalidVariableError: the value is not allowed; the message names the allowed ones and the
            nearest.
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


# What is behind os.environ, where Python has it there: for a name that is absent os.environ raises
# and catches two errors, a microsecond each.
_encoded = getattr(os.environ, "_data", None)
_ENCODED_NAMES = {name: os.fsencode(name) for name in ENVIRONMENT}


def is_given(name: str) -> bool:
    """Say whether a variable of the table is set; in a moment, for what every call asks."""
    if _encoded is None:
        return name in os.environ
    return _ENCODED_NAMES[name] in _encoded


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean '...'?``, or nothing if no choice is like the word, ignoring case."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return messages.DID_YOU_MEAN.format(near=repr(by_lower[near[0]])) if near else ""


def variables_set(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with the prefix of flash_dmattn and their values, known or not."""
    source = os.environ if environ is None else environ
    return {name: source[name] for name in sorted(source) if name.startswith(PREFIX)}


def invalid(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each variable of the table whose value is not allowed."""
    return list(filter(None, (_problem(name, environ) for name in ENVIRONMENT)))


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each variable that has the prefix of flash_dmattn but no meaning, with
    the nearest that has one.
    """
    return [
        messages.UNKNOWN_VARIABLE.format(name=name) + did_you_mean(name, ENVIRONMENT)
        for name in variables_set(environ)
        if name not in ENVIRONMENT
    ]


def check_values(environ: Mapping[str, str] | None = None) -> None:
    """Raise InvalidVariableError for the first variable whose value is not allowed, also for one
    that would not matter: a value that does nothing is one that its user is wrong about.
    """
    for name in ENVIRONMENT:
        get(name, environ)


def check_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Warn about each variable that has the prefix of flash_dmattn but no meaning."""
    for text in unknown(environ):
        warnings.warn(text, UnknownVariableWarning, stacklevel=2)


def check_cpu_simd(level: str, environ: Mapping[str, str] | None = None) -> None:
    """Compare FLASH_DMATTN_CPU_SIMD with the level at which the cpu pack runs.

    Raises:
        InvalidVariableError: it asks for another level. For one that the CPU lacks, the pack takes
            the widest that it has.
    """
    name = "FLASH_DMATTN_CPU_SIMD"
    wanted, values = get(name, environ), ENVIRONMENT[name].values
    if wanted in ("auto", level):
        return
    allowed = values[: values.index(level) + 1] if level in values else values[:1]
    raise InvalidVariableError(
        messages.NO_SIMD.format(name=name, allowed=", ".join(allowed), value=repr(wanted))
    )
