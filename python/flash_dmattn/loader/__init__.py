# SPDX-License-Identifier: BSD-3-Clause
"""Which kernel pack serves a device, what computes a call, and why.

Importing this imports no torch and initializes no CUDA.
"""

from . import environment
from .candidates import Candidate
from .errors import FallbackWarning, NoPackError
from .process import default_loader, open_pack, pack_for, trace_for
from .resolver import Loader
from .trace import Accepted, Entry, Refused, Trace

__all__ = [
    "Accepted",
    "Candidate",
    "Entry",
    "FallbackWarning",
    "Loader",
    "NoPackError",
    "Refused",
    "Trace",
    "default_loader",
    "environment",
    "open_pack",
    "pack_for",
    "trace_for",
]
