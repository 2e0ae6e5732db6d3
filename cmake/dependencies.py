# SPDX-License-Identifier: BSD-3-Clause
"""What the wheel requires, for scikit-build-core: that depends on where nanobind's half of the
module is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the requirements of the module that FDM_NANOBIND names; none of the linked one."""
    return {"dependencies": list(settings.get(os.environ.get("FDM_NANOBIND", "linked"), []))}


def dynamic_wheel(_: Mapping[str, Any]) -> dict[str, bool]:
    """Tell that a wheel may require other distributions than the sdist that it is made from."""
    return {"dependencies": True}
