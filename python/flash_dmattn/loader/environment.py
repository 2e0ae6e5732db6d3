# SPDX-License-Identifier: BSD-3-Clause
"""The environment variables of flash_dmattn: one table, from which validation, messages and
documentation come.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import messages

__all__ = [
    "ENVIRONMENT",
    "InvalidVariableError",
    "UnknownVariableWarning",
    "Variable",
    "check_cpu_simd",
    "check_unknown",
    "check_values",
    "get",
    "invalid",
    "is_given",
    "markdown_table",
    "unknown",
    "variables_set",
]

PREFIX = "FLASH_DMATTN_"


class InvalidVariableError(ValueError):
    """An environment variable has a value that is not allowed."""


class UnknownVariableWarning(UserWarning):
    """An environment variable has the prefix of flash_dmattn, but no meaning."""


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: with its prefix.
        values: the allowed values; empty if the value is free, such as a path.
        default: what `get` returns if the variable is unset or empty; "" stands for "not given".
        meaning: one sentence for the documentation.
    """

    name: str
    values: tuple[str, ...]
    default: str
    meaning: str


_VARIABLES = (
    Variable(
        "FLASH_DMATTN_LIBRARY_PATH",
        (),
        "",
        "Load exactly this kernel pack file, for the kind of device that it was built for.",
    ),
    Variable("FLASH_DMATTN_CUDA", ("12", "13"), "", "Use only packs built by this CUDA major."),
    Variable(
        "FLASH_DMATTN_ARCH",
        ("80", "86", "89", "90", "100", "120"),
        "",
        "Use only packs built for this GPU architecture.",
    ),
    Variable(
        "FLASH_DMATTN_UNTRIED",
        ("0", "1"),
        "0",
        "With `1`, packs also serve GPUs of a compute capability on which they were never run.",
    ),
    Variable(
        "FLASH_DMATTN_BACKEND",
        ("auto", "cuda", "cpu", "triton", "flex", "reference"),
        "auto",
        "The backend of calls without `backend=`; `auto` follows the device of the tensors.",
    ),
    Variable(
        "FLASH_DMATTN_FALLBACK",
        ("warn", "error"),
        "warn",
        "What happens if no pack serves a device, or the best pack is damaged: warn and use plain "
        "PyTorch or the next pack; or raise.",
    ),
    Variable(
        "FLASH_DMATTN_LOG",
        ("off", "info", "debug"),
        "off",
        "Print to stderr how a pack was chosen (`info`), and from which facts (`debug`).",
    ),
    Variable(
        "FLASH_DMATTN_CPU_SIMD",
        ("auto", "baseline", "avx2", "avx512"),
        "auto",
        "The widest SIMD level that the cpu pack uses; one that the CPU lacks is an error.",
    ),
    Variable(
        "FLASH_DMATTN_DETERMINISTIC",
        ("0", "1"),
        "0",
        "The meaning of `deterministic=None`: with `1`, equal inputs give equal bits.",
    ),
)

ENVIRONMENT: Mapping[str, Variable] = {variable.name: variable for variable in _VARIABLES}


def get(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the value of a variable of the table, or its default if it is unset or empty.

    Raises:
        KeyError: the table has no such name.
        InvalidVariableError: the value is not allowed; the message names the allowed ones and the
            nearest.
    """
    variable = ENVIRONMENT[name]
    value = (os.environ if environ is None else environ).get(name, "").strip()
    if not value:
        return variable.default
    if variable.values and value not in variable.values:
        text = messages.BAD_VALUE.format(
            name=name, allowed=", ".join(variable.values), value=repr(value)
        )
        raise InvalidVariableError(text + did_you_mean(value, variable.values))
    return value


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
    found = []
    for name in ENVIRONMENT:
        try:
            get(name, environ)
        except InvalidVariableError as error:
            found.append(str(error))
    return found


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
        InvalidVariableError: it asks for another level; the pack takes the widest that the CPU has
            in place of one that it lacks.
    """
    name = "FLASH_DMATTN_CPU_SIMD"
    wanted, values = get(name, environ), ENVIRONMENT[name].values
    if wanted in ("auto", level):
        return
    allowed = values[: values.index(level) + 1] if level in values else values[:1]
    raise InvalidVariableError(
        messages.NO_SIMD.format(name=name, allowed=", ".join(allowed), value=repr(wanted))
    )


def markdown_table() -> str:
    """Return the table for the documentation."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for variable in _VARIABLES:
        values = ", ".join(f"`{value}`" for value in variable.values) or "a path"
        default = f"`{variable.default}`" if variable.default else "not set"
        lines.append(f"| `{variable.name}` | {values} | {default} | {variable.meaning} |")
    return "\n".join(lines) + "\n"
