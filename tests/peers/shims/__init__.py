# SPDX-License-Identifier: BSD-3-Clause
"""The interfaces of other libraries on top of flash_dmattn, a module each, for their tests."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path


class NoCounterpartError(Exception):
    """A test asks for a feature without a counterpart; `peers.accepted` lists the accepted ones."""


def provide(name: str, **contents: object) -> types.ModuleType:
    """Make a module importable, also within packages that are not installed.

    Args:
        name: with dots; the packages above must be provided before.
        contents: of the module.
    """
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    module.__path__ = []
    module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
    sys.modules[name] = module
    package, _, last = name.rpartition(".")
    if package:
        setattr(sys.modules[package], last, module)
    return module


def provide_file(name: str, path: Path) -> types.ModuleType:
    """Import a file as a module of the given name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def public(module: types.ModuleType | str) -> dict[str, object]:
    """Return the functions and classes that a module defines itself."""
    module = sys.modules[module] if isinstance(module, str) else module
    return {
        name: value
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and name != "install"
    }
