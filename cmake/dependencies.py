# SPDX-License-Identifier: BSD-3-Clause
"""Tells scikit-build-core the wheel's requirements, which depend on FDM_NANOBIND."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the requirements of the kind of module in FDM_NANOBIND; a linked one has none."""
    return {"dependencies": list(settings.get(os.environ.get("FDM_NANOBIND", "linked"), []))}


def dynamic_wheel(_: Mapping[str, Any]) -> dict[str, bool]:
    """Declare that a wheel's dependencies may differ from those in its sdist."""
    return {"dependencies": True}
