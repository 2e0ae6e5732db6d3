# SPDX-License-Identifier: BSD-3-Clause
"""Checks of installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

__all__ = ["is_flash_dmattn_available", "is_transformers_available", "require_transformers"]


def is_flash_dmattn_available() -> bool:
    """Say whether flash_dmattn can compute here. On CPUs and GPUs it needs only PyTorch."""
    return importlib.util.find_spec("torch") is not None


def is_transformers_available() -> bool:
    """Say whether transformers is installed in a version with the interfaces used here."""
    if importlib.util.find_spec("transformers") is None:
        return False
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return True
    return _release(installed) >= _release(_declared_floor())


def require_transformers() -> None:
    """Raise ImportError, with the required version, unless transformers is available."""
    if is_transformers_available():
        return
    raise ImportError(
        f"flash_dmattn.integrations needs transformers >= {_declared_floor()}: "
        f"pip install 'transformers>={_declared_floor()}'"
    )


def _declared_floor() -> str:
    """Return the lowest version that the package's own metadata allows."""
    try:
        declared = importlib.metadata.requires("flash-dmattn") or []
    except importlib.metadata.PackageNotFoundError:
        return "0"
    for requirement in declared:
        if found := re.match(r"transformers\s*\(?>=\s*([\d.]+)", requirement):
            return found[1]
    return "0"


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
