# SPDX-License-Identifier: BSD-3-Clause
"""Helpers for tests of calls that bypass torch's dispatcher."""

from __future__ import annotations

import pytest

from flash_dmattn import dispatch_state
from flash_dmattn.backends import torch_memory

HAS_DIRECT_CALLS = dispatch_state.IS_READABLE and torch_memory.CORE_READS_TENSORS
needs_direct_calls = pytest.mark.skipif(
    not HAS_DIRECT_CALLS,
    reason="this torch does not tell its state, or has no C exchange API of DLPack",
)
