# SPDX-License-Identifier: BSD-3-Clause
"""What is measured: times in seconds, on the device but for ``host``, and memory in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .cases import Pass

_UNITS = {"ms": 1e-3, "us": 1e-6, "MiB": float(1 << 20)}


@dataclass(frozen=True)
class Quantity:
    """A quantity's meaning, the head of its column, its unit there, and the pass that it is of."""

    about: str
    head: str
    which: Pass = "forward"
    unit: str = "ms"

    @property
    def scale(self) -> float:
        """What one unit is in seconds or bytes."""
        return _UNITS[self.unit]

    def cell(self, value: float) -> str:
        """The number as a cell of a table."""
        digits = {"ms": 3, "us": 1, "MiB": 0}[self.unit]
        return f"{value / self.scale:.{digits}f}"


_BOTH: Pass = "forward_backward"
QUANTITIES = {
    "selection": Quantity("making the mask from the bias", "mask ms"),
    "plan": Quantity("the plan alone", "plan ms"),
    "forward": Quantity("forward, plan included", "fwd ms"),
    "forward_planned": Quantity("forward with a plan made before", "plan reused ms"),
    "forward_with_mask": Quantity("making the mask, and forward", "mask+fwd ms"),
    "backward": Quantity("backward, with the bias's gradient if there is a bias", "bwd ms", _BOTH),
    "forward_backward": Quantity("forward and backward", "fwd+bwd ms", _BOTH),
    "end_to_end": Quantity("making the mask, forward and backward", "all ms", _BOTH),
    "host": Quantity("host time of a forward call without gradients", "host us", unit="us"),
    "memory_forward": Quantity("peak extra memory of forward", "fwd MiB", unit="MiB"),
    "memory_forward_backward": Quantity(
        "peak extra memory of forward and backward", "fwd+bwd MiB", _BOTH, "MiB"
    ),
    "memory_with_mask": Quantity("the same with making the mask", "with mask MiB", _BOTH, "MiB"),
}
DECODE_QUANTITIES = ("selection", "plan", "forward", "forward_planned", "forward_with_mask")

GENERATE_QUANTITIES = {
    "prefill_attention": Quantity(
        "making masks, and the attention function, while the prompt is read",
        "prefill, attention ms",
    ),
    "decode_attention": Quantity(
        "making masks, and the attention function, while tokens are generated",
        "decoding, attention ms",
    ),
    "attention": Quantity("making masks, and the attention function, of both", "attention ms"),
    "prefill": Quantity("reading the prompt, the whole model", "prefill ms"),
    "decode": Quantity("generating the tokens, the whole model", "decoding ms"),
    "generate": Quantity("both, the whole model", "all ms"),
    "memory_generate": Quantity("peak extra memory of both", "extra MiB", unit="MiB"),
}
TRAIN_QUANTITIES = {
    "train_step": Quantity("forward, backward and AdamW of a whole model", "step ms"),
    "memory_train": Quantity("peak memory of a step, beyond weights", "extra MiB", unit="MiB"),
}
COLUMNS = {**QUANTITIES, **GENERATE_QUANTITIES, **TRAIN_QUANTITIES}
