# SPDX-License-Identifier: BSD-3-Clause
"""The backends: a kernel pack for the device, a portable backend that is requested by name, or
the plain PyTorch reference.
"""

from .base import Backend
from .choosing import (
    available_backends,
    check_backend_name,
    is_available,
    require_available,
    select_backend,
)

__all__ = [
    "Backend",
    "available_backends",
    "check_backend_name",
    "is_available",
    "require_available",
    "select_backend",
]
