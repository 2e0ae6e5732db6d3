# SPDX-License-Identifier: BSD-3-Clause
"""Features that the oldest supported torch and transformers lack."""

from __future__ import annotations

import torch

from release import targets

COMPILES = targets.load().compiling_torch
WHY_NOT_TRACED = f"torch.compile and torch.export trace every call from torch {COMPILES} on"


def is_older(torch_version: str, floor: str) -> bool:
    """Return whether a torch is older than a version."""
    release, *_ = torch_version.split("+")
    return targets.version_numbers(".".join(release.split(".")[:2])) < targets.version_numbers(
        floor
    )


def why_not_traced() -> str:
    """Return the reason to skip tests of traced calls, or ""."""
    return WHY_NOT_TRACED if is_older(torch.__version__, COMPILES) else ""


def why_nothing_forgotten() -> str:
    """Return the reason why caches of transformers keep every key, or ""."""
    from transformers import DynamicCache

    has = hasattr(DynamicCache, "activate_past_recording")
    return "" if has else "this transformers takes drafts back from caches without saying so first"
