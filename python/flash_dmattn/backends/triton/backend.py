# SPDX-License-Identifier: BSD-3-Clause
"""Attention by Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_dmattn.backends.base import Backend, lse_shape, out_rest_bytes
from flash_dmattn.backends.interval_selection import select_intervals
from flash_dmattn.backends.reference import ReferenceBackend
from flash_dmattn.backends.shapes import check_attention, refuse_float64_bias
from flash_dmattn.record import AttentionInputs, Gradients, SelectionInputs

from .forward_pass import run_forward
from .gradients import gradients
from .key_mass import key_mass
from .launch import on_device
from .layout import plan_layout
from .make_plan import write_plan
from .problem import Problem, describe


class TritonBackend(Backend):
    """Runs calls in Triton, compiled for the GPU, or interpreted on a CPU.

    No call synchronizes with the device. No two programs add to the same memory, so equal inputs
    give equal bits.
    """

    name = "triton"

    def plan_bytes(self, inputs: AttentionInputs) -> int:
        """Return the size of a plan in bytes."""
        return plan_layout(inputs).plan_bytes

    def kept_bytes(self, inputs: AttentionInputs) -> int:
        """Return the size in bytes of a new plan and of out's rounding residual."""
        return super().kept_bytes(inputs) + out_rest_bytes(inputs)

    def make_plan(self, inputs: AttentionInputs, *, zeroed: bool) -> Tensor:
        """Convert the mask to columns."""
        problem = _checked_problem(inputs)
        return _make_plan(problem, self.plan_bytes(inputs), zeroed=zeroed)

    def forward(
        self, inputs: AttentionInputs, *, zeroed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the forward pass; make a plan first if none is given."""
        problem, size = _checked_problem(inputs), self.kept_bytes(inputs)
        if inputs.given_plan is None:
            plan = kept = _make_plan(problem, size, zeroed=zeroed)
        else:
            plan, kept = inputs.given_plan, _allocate(inputs.query, size, zeroed=zeroed)
        out, lse = _compute_forward(problem, plan, _view_out_rest(kept, inputs))
        return out, lse, kept if size else None

    def attend(self, call: Any, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Run the forward pass without keeping data for a backward pass."""
        problem, plan = _checked_problem(call), call.given_plan
        if plan is None:
            plan = _make_plan(problem, self.plan_bytes(call), zeroed=False)
        out, lse = _compute_forward(problem, plan, None)
        return out, lse if need_lse else None

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
        """Run the backward pass on the plan of forward."""
        problem = describe(inputs)
        if kept is None:
            kept = inputs.query.new_empty(0, dtype=torch.uint8)
        plan = kept if inputs.given_plan is None else inputs.given_plan
        out_rest = _view_out_rest(kept, inputs)
        with on_device(out.device):
            return gradients(problem, plan, dout, dlse, out, out_rest, lse, wanted)

    def key_mass(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """Run the kernel that sums the probabilities of each key."""
        problem, plan = _checked_problem(inputs), inputs.given_plan
        if plan is None:
            plan = _make_plan(problem, self.plan_bytes(inputs), zeroed=False)
        with on_device(lse.device):
            return key_mass(problem, plan, lse)

    def describe(self, inputs: AttentionInputs, *_: Any) -> str:
        """Check the inputs; the description is empty."""
        _checked_problem(inputs)
        return "{}"

    def key_mass_reads_plan(self, inputs: AttentionInputs) -> bool:
        """Return True: the kernel reads the plan."""
        return True

    def key_mass_kernel(self, inputs: AttentionInputs) -> str:
        """Return the name of the kernel."""
        return "key_mass_kernel"

    def select_intervals(self, inputs: SelectionInputs) -> tuple[Tensor, Tensor]:
        """Select for a bias that is the same for every query, in plain PyTorch."""
        return select_intervals(inputs)

    def select_keep(self, inputs: SelectionInputs) -> Tensor:
        """Select for each row of bias, in plain PyTorch: a sort of each row."""
        return ReferenceBackend().select_keep(inputs)


def _checked_problem(inputs: AttentionInputs) -> Problem:
    # On devices other than a CPU, reading the cu_seqlens would synchronize.
    check_attention(inputs, read_lengths=inputs.query.device.type == "cpu")
    refuse_float64_bias(inputs, "triton")
    return describe(inputs)


def _allocate(query: Tensor, size: int, *, zeroed: bool) -> Tensor:
    allocate = torch.zeros if zeroed else torch.empty
    return allocate(size, dtype=torch.uint8, device=query.device)


def _make_plan(problem: Problem, size: int, *, zeroed: bool) -> Tensor:
    """Return a buffer that begins with a plan."""
    query = problem.inputs.query
    plan = _allocate(query, size, zeroed=zeroed)
    with on_device(query.device):
        write_plan(problem, plan)
    return plan


def _view_out_rest(kept: Tensor, inputs: AttentionInputs) -> Tensor | None:
    """Return out's rounding residual, the last part of the kept bytes."""
    size = out_rest_bytes(inputs)
    if not size:
        return None
    return kept[kept.numel() - size :].view(torch.int8).view(inputs.query.shape)


def _compute_forward(
    problem: Problem, plan: Tensor, out_rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse, and write out_rest."""
    query = problem.inputs.query
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(lse_shape(query), dtype=torch.float32, device=query.device)
    if problem.inputs.cu_seqlens_q is not None:  # no kernel writes rows outside all sequences
        out.zero_()
        lse.fill_(-torch.inf)
        if out_rest is not None:
            out_rest.zero_()
    with on_device(query.device):
        run_forward(problem, plan, out, lse, out_rest)
    return out, lse
