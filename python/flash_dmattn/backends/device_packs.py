# SPDX-License-Identifier: BSD-3-Clause
"""The backend of the kernel pack that serves a device."""

from __future__ import annotations

import torch

from flash_dmattn import loader

from .base import Backend
from .reference import ReferenceBackend


def pack_backend(device: torch.device) -> Backend:
    """Return the backend of the pack that serves a device; NoPackError if there is none."""
    pack = loader.pack_for(device.type, device.index)
    # It needs the core, which the loader has just found in this installation.
    from .pack import PackBackend

    return PackBackend(pack)


def selecting_backend(device: torch.device) -> Backend:
    """Return the backend that selects keys for a backend that cannot select."""
    try:
        return pack_backend(device)
    except loader.NoPackError:
        return ReferenceBackend()
