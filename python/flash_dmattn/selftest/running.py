# SPDX-License-Identifier: BSD-3-Clause
"""The self-test of every device on which calls compute."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from .outcome import Comparison, Outcome


def run(served: Iterable[tuple[str, int]], pack_for: Callable[[str, int], Any]) -> Outcome:
    """Test every device, given as kind and index; without torch, the pack of ``pack_for``.

    An exception, which a call would raise, too, is recorded as the reason for an untested device.
    """
    comparisons: list[Comparison] = []
    untested: list[str] = []
    for kind, index in served:
        device = kind if kind == "cpu" else f"{kind}:{index}"
        try:
            reason = _cannot_test(kind)
            if reason:
                untested.append(f"{device}: {reason}")
            elif importlib.util.find_spec("torch") is not None:
                from .with_torch import compare as compare_calls

                comparisons += compare_calls(device)
            else:
                from .with_numpy import compare as compare_pack

                comparisons += compare_pack(pack_for(kind, index))
        except Exception as error:
            untested.append(f"{device}: {type(error).__name__}: {error}")
    if not comparisons and not untested:
        untested.append("on no device above a call computes")
    return Outcome(tuple(comparisons), tuple(untested))


def _cannot_test(kind: str) -> str:
    """Return why a kind of device cannot be tested; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        if kind != "cpu":
            return "needs PyTorch: python -m pip install torch"
        if importlib.util.find_spec("numpy") is None:
            return "needs PyTorch or NumPy: python -m pip install torch"
        return ""
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the device"
    return ""
