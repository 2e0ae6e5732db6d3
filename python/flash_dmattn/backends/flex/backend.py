# SPDX-License-Identifier: BSD-3-Clause
"""Attention by PyTorch's FlexAttention: compiled on GPUs, in its plain form on CPUs."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from flash_dmattn.backends import device_packs
from flash_dmattn.backends.base import Backend, lse_dtype, lse_shape
from flash_dmattn.backends.shapes import check_attention, refuse_float64_bias
from flash_dmattn.record import AttentionInputs, Gradients, SelectionInputs

from . import sinks

TORCH_FLOOR = (2, 6)
_DEVICES = ("cuda", "cpu")
_GPU_DTYPES = (torch.float16, torch.bfloat16)
# The compiled code computes indices into a mask or bias in 32 bits.
_MAX_ELEMENTS = (1 << 31) - 1


def why_unavailable(device_type: str | None) -> str | None:
    """Say why FlexAttention cannot run on a type of device, or here at all; None if it can."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        return (
            f"it needs the FlexAttention of torch {floor} or newer, and this is torch "
            f"{torch.__version__}; pip install 'torch>={floor}'"
        )
    if device_type not in (None, *_DEVICES):
        return f"it runs on {' and '.join(_DEVICES)} tensors, but query is on {device_type}"
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        return (
            "torch.compile needs Triton on a GPU, and it is not installed; pip install triton, in "
            "the version that this torch asks for"
        )
    return None


class FlexBackend(Backend):
    """Runs calls by FlexAttention. It has no plans: each pass makes its own block mask."""

    name = "flex"

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Return 0: there are no plans."""
        return 0

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Check the inputs, and return an empty tensor."""
        _check(inputs)
        return inputs.query.new_empty(0, dtype=torch.uint8)

    def describe(self, inputs: AttentionInputs, *_: Any) -> str:
        """Check the inputs; the description is empty."""
        _check(inputs)
        return "{}"

    def forward(
        self, inputs: AttentionInputs, *, zeroed: bool = False
    ) -> tuple[Tensor, Tensor, None]:
        """Compute the scores of the blocks that keep any key."""
        from . import passes

        _check(inputs)
        query = inputs.query
        if not _has_scores(inputs):
            lse = query.new_full(lse_shape(query), -torch.inf, dtype=lse_dtype(inputs))
            return query.new_zeros(query.shape), lse, None
        out, lse = passes.forward(_detached(inputs))
        if inputs.sink is not None:
            out = sinks.with_sink(inputs.sink.detach(), out, lse)
        return out, lse, None

    def backward(
        self,
        inputs: AttentionInputs,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        kept: Tensor | None,
        wanted: tuple[str, ...],
    ) -> Gradients:
        """Compute FlexAttention's gradients; on a CPU, those of the formula."""
        from . import passes

        if not _has_scores(inputs):
            return {name: torch.zeros_like(getattr(inputs, name)) for name in wanted}
        if dlse is None:
            dlse = torch.zeros_like(lse)
        return passes.backward(_detached(inputs), dout, dlse, out, lse, wanted)

    def select_intervals(self, inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
        """Select by the device's pack, or by the reference."""
        return device_packs.selecting_backend(inputs.bias.device).select_intervals(inputs)

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Select by the device's pack, or by the reference."""
        return device_packs.selecting_backend(inputs.bias.device).select_keep(inputs)


def _check(inputs: AttentionInputs) -> None:
    check_attention(inputs)
    refuse_float64_bias(inputs, "flex")
    if inputs.query.device.type == "cpu":
        return
    if inputs.query.dtype not in _GPU_DTYPES:
        raise TypeError(
            f"query has dtype {inputs.query.dtype}, but must have dtype "
            f"{' or '.join(map(str, _GPU_DTYPES))} on a GPU"
        )
    for name, tensor in (("attn_mask", inputs.mask), ("attn_bias", inputs.bias)):
        if tensor is not None and tensor.numel() > _MAX_ELEMENTS:
            raise NotImplementedError(
                f"{name} has shape {tuple(tensor.shape)}, but backend='flex' reads tensors of up "
                "to 2^31 - 1 elements; use backend=None, or an IntervalMask"
            )


def _has_scores(inputs: AttentionInputs) -> bool:
    keys = inputs.key.shape[0] if inputs.packed else inputs.key.numel()
    return bool(inputs.query.numel() and keys)


def _detached(inputs: AttentionInputs) -> AttentionInputs:
    tensors = (t.detach() if isinstance(t, Tensor) else t for t in inputs)
    return AttentionInputs(*tensors)  # type: ignore[arg-type]
