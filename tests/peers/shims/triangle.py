# SPDX-License-Identifier: BSD-3-Clause
"""cuequivariance_torch: only its triangle attention has a counterpart."""

from __future__ import annotations

from pathlib import Path

from flash_dmattn.integrations import triangle_attention

from . import provide


def install(files: Path) -> None:
    """Make the module that tests import.

    Args:
        files: the folder of the test, which needs no helper of cuEquivariance.
    """
    provide("cuequivariance_torch", triangle_attention=triangle_attention)
