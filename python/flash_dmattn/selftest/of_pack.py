# SPDX-License-Identifier: BSD-3-Clause
"""The self-test of a single pack before it serves calls."""

from __future__ import annotations

from flash_dmattn._core import Pack
from flash_dmattn.backends.pack import PackBackend
from flash_dmattn.loader import messages

from .with_torch import by_backend, compare


def first_failure(pack: Pack, device: str) -> str:
    """Return the first wrong result of a pack on a device, such as ``cuda:0``; "" if none is."""
    for row in compare(device, by_backend(PackBackend(pack))):
        if not row.passed:
            return messages.TRIAL_DIFFERS.format(row=row)
    return ""
