# SPDX-License-Identifier: BSD-3-Clause
"""Selection functions and their operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch_state
from .backends import select_backend
from .backends.base import interval_shape, keep_shape
from .operators import define, without_negation
from .record import SELECTION, SelectionInputs

_INPUTS = f"{SELECTION.text}, str backend"
_TENSOR_COUNT = SELECTION.tensor_count


def select_intervals(inputs: SelectionInputs, backend: str) -> tuple[Tensor, Tensor]:
    """Return start and end, int32 ``(b, h, K)``."""
    if dispatch_state.is_idle(inputs[:_TENSOR_COUNT]):
        return select_backend(inputs.bias.device, backend).select_intervals(inputs)
    start, end = torch.ops.flash_dmattn.select_intervals.default(*inputs, backend)
    return start, end


def select_keep(inputs: SelectionInputs, backend: str) -> Tensor:
    """Return bool in the broadcast shape of bias and mask."""
    if dispatch_state.is_idle(inputs[:_TENSOR_COUNT]):
        return select_backend(inputs.bias.device, backend).select_keep(inputs)
    keep: Tensor = torch.ops.flash_dmattn.select_keep.default(*inputs, backend)
    return keep


def _select_intervals(*arguments: Any) -> tuple[Tensor, Tensor]:
    *plain, backend = map(without_negation, arguments)
    inputs = SelectionInputs(*plain)
    return select_backend(inputs.bias.device, backend).select_intervals(inputs)


def _select_intervals_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = SelectionInputs(*arguments[:-1])
    shape = interval_shape(inputs)
    start, end = (inputs.bias.new_empty(shape, dtype=torch.int32) for _ in range(2))
    return start, end


def _select_keep(*arguments: Any) -> Tensor:
    *plain, backend = map(without_negation, arguments)
    inputs = SelectionInputs(*plain)
    return select_backend(inputs.bias.device, backend).select_keep(inputs)


def _select_keep_fake(*arguments: Any) -> Tensor:
    inputs = SelectionInputs(*arguments[:-1])
    return inputs.bias.new_empty(keep_shape(inputs), dtype=torch.bool)


define(
    "select_intervals",
    (_INPUTS, "(Tensor start, Tensor end)"),
    _select_intervals,
    _select_intervals_fake,
)
define("select_keep", (_INPUTS, "Tensor"), _select_keep, _select_keep_fake)
