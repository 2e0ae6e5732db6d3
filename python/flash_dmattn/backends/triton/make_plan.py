# SPDX-License-Identifier: BSD-3-Clause
"""Making plans from masks, and the backward pass's order of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.plan import compact_kernel, list_intervals_kernel, list_rows_kernel
from .launch import blocks, launch
from .layout import INTERVALS, LIST_ROWS, RANGE, Layout, PlanViews, plan_views
from .problem import Problem

_STEP_KEYS = 1024  # keys of a program's step
_STEP_ROW_KEYS = 128  # keys of a step, each with the rows of a tile
# The backward pass takes kept keys in buckets of this size. Within a bucket, the keys that are kept
# until the latest rows come first, so that similar rows keep the keys of a block.
_BUCKET_KEYS = 1024
_INT32_MAX = 2**31 - 1


def write_plan(problem: Problem, plan: Tensor) -> None:
    """Write the plan of a call to the given memory."""
    inputs, layout = problem.inputs, problem.layout
    if layout.kind == RANGE or problem.rows == 0:
        return
    views = plan_views(layout, plan)
    mask = inputs.mask
    flags = {"CAUSAL": inputs.causal, "VARLEN": inputs.packed}
    arguments = problem.arguments | views._asdict()
    each = layout.lists * layout.sequences
    tiles = each * blocks(problem.queries, LIST_ROWS)
    if layout.kind == INTERVALS:
        if inputs.start is not None and inputs.end is not None:
            arguments |= {"start": inputs.start.contiguous(), "end": inputs.end.contiguous()}
            arguments["mask"] = None
        elif mask is not None:
            per_key = mask.expand(*mask.shape[:-1], layout.list_keys).contiguous()
            arguments |= {"start": None, "end": None, "mask": per_key.view(torch.uint8)}
        intervals = inputs.start is not None
        launch(compact_kernel, each, arguments, INTERVALS=intervals, BLOCK_KEYS=_STEP_KEYS, **flags)
        del flags["CAUSAL"]
        launch(list_intervals_kernel, tiles, arguments, BLOCK_KEYS=_STEP_KEYS, **flags)
    elif mask is not None:
        arguments |= {
            "mask": mask.view(torch.uint8),
            "mask_batch": mask.stride(0) if mask.dim() == 4 else 0,
            "mask_head": mask.stride(-3),
            "mask_row": mask.stride(-2),
            "mask_key": mask.stride(-1) if mask.shape[-1] > 1 else 0,
        }
        launch(
            list_rows_kernel,
            tiles,
            arguments,
            BLOCK_KEYS=_STEP_ROW_KEYS,
            num_warps=8,
            **flags,
        )


def ordered_keys(problem: Problem, views: PlanViews) -> Tensor | None:
    """Return each list's kept keys in the order of the backward pass, int32 ``(lists, K)``.

    Entries beyond the number of kept keys of a sequence are arbitrary.
    """
    inputs, layout = problem.inputs, problem.layout
    if views.kept is None or views.past is None or views.kept_count is None:
        return None
    shape = (layout.lists, layout.list_keys)
    kept, past = views.kept.view(shape), views.past.view(shape)
    if inputs.start is None:
        return kept  # all rows keep them, or all rows from the causal limit on
    place, begin, count = _places(layout, inputs.cu_seqlens_k, views.kept_count)
    within = place - begin
    valid = (within >= 0) & (within < count)  # False for keys outside all sequences
    # Invalid entries or bounds must not give indices out of range.
    last = past.gather(1, (kept + begin).clamp(0, max(layout.list_keys - 1, 0)))
    bucket = begin + within // _BUCKET_KEYS * _BUCKET_KEYS
    rank = torch.where(valid, _INT32_MAX - last.long(), _INT32_MAX + 1)
    order = (bucket.long() * (1 << 32) + rank).sort(dim=1, stable=True).indices
    return kept.gather(1, order)


def _places(
    layout: Layout, cu_seqlens_k: Tensor | None, kept_count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each place of a list, the begin of its sequence, and its sequence's kept keys."""
    count = kept_count.view(layout.lists, layout.sequences)
    place = torch.arange(layout.list_keys, device=count.device)
    if cu_seqlens_k is None:
        return place, torch.zeros_like(place), count
    last = layout.sequences - 1
    sequence = (torch.searchsorted(cu_seqlens_k, place, right=True) - 1).clamp(0, max(last, 0))
    if last < 0:
        return place, torch.zeros_like(place), count.new_zeros(layout.lists, 1)
    return place, cu_seqlens_k.long()[sequence], count[:, sequence]
