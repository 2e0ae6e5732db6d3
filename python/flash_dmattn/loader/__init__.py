# SPDX-License-Identifier: BSD-3-Clause
"""The kernel pack that serves a device, the backend of a call, and the reasons.

Importing this imports no torch and initializes no CUDA.
"""

from . import environment
from .candidates import Candidate
from .errors import FallbackWarning, NoPackError
from .resolver import Loader, default_loader, open_pack, pack_for, trace_for
from .trace import Entry, Trace

__all__ = [
    "Candidate",
    "Entry",
    "FallbackWarning",
    "Loader",
    "NoPackError",
    "Trace",
    "default_loader",
    "environment",
    "open_pack",
    "pack_for",
    "trace_for",
]
