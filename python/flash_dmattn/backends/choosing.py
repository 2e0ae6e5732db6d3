# SPDX-License-Identifier: BSD-3-Clause
"""The backends by name, and which of them can run here. The loader chooses between packs."""

from __future__ import annotations

import torch

from flash_dmattn import loader
from flash_dmattn.checks import described
from flash_dmattn.loader import environment, resolver

from . import portable
from .base import Backend
from .device_packs import pack_backend
from .reference import ReferenceBackend

_PACK_BACKENDS = ("cuda", "cpu")
_KNOWN_BACKENDS = (*_PACK_BACKENDS, *portable.NAMES, "reference")


def select_backend(device: torch.device, name: str) -> Backend:
    """Return the backend that serves a device.

    Args:
        device: of the tensors.
        name: "auto", or one of `available_backends`.

    Raises:
        ValueError: an unknown name, or a pack's backend for tensors of another device.
        RuntimeError: the name needs a kernel pack and none serves the device, or a portable
            backend cannot run on it; the text gives the reason and the remedy.
    """
    return resolver.default_loader.backend_for(name, device, _make_backend)


def _make_backend(name: str, device: torch.device, default: str) -> Backend:
    if name == "reference":
        return ReferenceBackend()
    if name in portable.NAMES:
        return portable.load(name, device.type, default)
    if name != "auto":
        check_backend_name(name)
        _check_device(name, device.type, default)
    return pack_backend(device)


def check_backend_name(name: str) -> None:
    """Raise ValueError, with the nearest name, if no backend has this name."""
    if isinstance(name, str) and name in _KNOWN_BACKENDS:
        return
    got = described(name)
    raise ValueError(
        f"backend must be None, 'auto' or one of {', '.join(map(repr, _KNOWN_BACKENDS))}, got "
        f"{got}.{environment.did_you_mean(got, _KNOWN_BACKENDS)}"
    )


def _check_device(name: str, device_type: str, default: str) -> None:
    if name != device_type:
        raise ValueError(
            f"backend={name!r} runs on {name} tensors, but query is on {device_type}; move the "
            f"tensors, or use {default}, which follows the device"
        )


def is_available(name: str) -> bool:
    """Say whether a backend can run here. This may look at devices."""
    if name == "reference":
        return True
    if name in portable.NAMES:
        return portable.why_unavailable(name) is None
    if name not in _PACK_BACKENDS or (name == "cuda" and not torch.cuda.is_available()):
        return False
    try:
        loader.pack_for(name)
    except loader.NoPackError:
        return False
    return True


def require_available(name: str) -> None:
    """Raise RuntimeError if a known backend cannot run here."""
    if name in portable.NAMES:
        portable.require(name)
    elif not is_available(name):
        raise RuntimeError(
            f"backend {name!r} is not available here; available are "
            f"{', '.join(available_backends())}. `python -m flash_dmattn` shows why"
        )


def available_backends() -> list[str]:
    """Return the names of the backends that can run here, in order of preference."""
    return [name for name in _KNOWN_BACKENDS if is_available(name)]
