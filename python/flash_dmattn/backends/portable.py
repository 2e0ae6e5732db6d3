# SPDX-License-Identifier: BSD-3-Clause
"""The backends that are compiled at run time and used only on request.

Each has a function ``why_unavailable(device_type)``: None if it can compute on this type of device
(for device_type None: on any type of device), else the reason and the remedy. The module of a
backend's class is imported at its first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from .base import Backend


class _Entry(NamedTuple):
    availability: str  # the module of why_unavailable
    module: str
    class_name: str


# In order of preference.
_TABLE = {
    "triton": _Entry("triton.availability", "triton.backend", "TritonBackend"),
    "flex": _Entry("flex.backend", "flex.backend", "FlexBackend"),
}

NAMES = tuple(_TABLE)


def why_unavailable(name: str, device_type: str | None = None) -> str | None:
    """Say why a backend cannot run on a type of device, or here at all; None if it can."""
    try:
        module = _module(_TABLE[name].availability)
    except ImportError as error:
        return str(error)
    reason: str | None = module.why_unavailable(device_type)
    return reason


def require(name: str, device_type: str | None = None, default: str = "backend=None") -> None:
    """Raise RuntimeError, with the reason and the remedy, if a backend cannot run.

    ``default`` is the text of the setting that requests no specific backend.
    """
    reason = why_unavailable(name, device_type)
    if reason is not None:
        raise RuntimeError(
            f"backend {name!r} is not available here: {reason}. {default} follows the device of "
            "the tensors"
        )


def load(name: str, device_type: str, default: str) -> Backend:
    """Return a backend for tensors on a type of device; RuntimeError as in `require`."""
    require(name, device_type, default)
    entry = _TABLE[name]
    backend: Backend = getattr(_module(entry.module), entry.class_name)()
    return backend


def _module(path: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{path}")
