# SPDX-License-Identifier: BSD-3-Clause
"""One query against many keys, of which a key mask keeps few, in a CUDA graph as decoders run it.

A graph holds one call for each of several copies of the inputs, more than the L2 cache has room
for: each call finds its keys in memory, as in a model whose layers take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..cases import Case, Inputs, Pass, make_inputs
from ..contestants import Contestant, FlashDmattn, SdpaGrouped, select
from ..runner import AGREEMENT
from ..timing import Clock
from .clock import Call, Effort, captured, timings
from .contestants import ENTRANTS
from .parts import PackCall
from .records import Record, short_reason, summary
from .runner import Tick, disagreement, release_memory
from .workloads import Workload

_MOST_COPIES = 16
_DEFAULT_L2 = 64 << 20


class _MaskedSdpa(SdpaGrouped):
    """SDPA on the key mask and bias as one additive row."""

    def prepare(self, which: Pass) -> None:
        assert self.bias is not None
        mask = select(self.case, self.bias)
        assert isinstance(mask, torch.Tensor)
        bias = self.bias.detach()
        self.additive = torch.where(mask.view_as(bias), bias, -torch.inf)


_KINDS: dict[str, type[Contestant]] = {
    **{
        name: ENTRANTS[name].kind
        for name in ("key_mask", "dense_flash", "dense_cudnn", "compact_flash", "compact_cudnn")
    },
    "sdpa": _MaskedSdpa,
}
_MASKS = {"sdpa": ENTRANTS["key_mask"].mask}


def run_decode(
    workload: Workload, clock: Clock, effort: Effort, tick: Tick = lambda note: None
) -> Iterator[Record]:
    """Measure every contestant: the call with its plan, and for ours its halves."""
    case = workload.shape
    inputs = [_inputs(workload, copy) for copy in range(_copies(case))]
    expected: dict[str, tuple[str, torch.Tensor]] = {}
    for name in workload.contestants:
        tick(f"{workload.name}: {name}")
        entrant = ENTRANTS[name]
        for quantity, outcome in _measure(name, workload, inputs, clock, effort, expected).items():
            yield Record(
                case=workload.name,
                contestant=name,
                role=entrant.kind.role,
                mask=_MASKS.get(name, entrant.mask),
                quantity=quantity,
                **outcome,
            )
        release_memory()


def _copies(case: Case) -> int:
    if torch.device(case.device).type != "cuda" or case.window is None:
        return 2
    properties: Any = torch.cuda.get_device_properties(case.device)
    kept = 2 * case.batch * case.kv_heads * case.window * case.head_dim * case.torch_dtype.itemsize
    cache = int(getattr(properties, "L2_cache_size", _DEFAULT_L2))
    return min(-(-3 * cache // (2 * kept)), _MOST_COPIES)


def _inputs(workload: Workload, copy: int) -> Inputs:
    every = make_inputs(replace(workload.shape, seed=workload.shape.seed + copy))
    rows = workload.queries
    return replace(
        every, query=every.query[:, :rows].clone(), grad_out=every.grad_out[:, :rows].clone()
    )


def _measure(
    name: str,
    workload: Workload,
    inputs: list[Inputs],
    clock: Clock,
    effort: Effort,
    expected: dict[str, tuple[str, torch.Tensor]],
) -> dict[str, dict[str, Any]]:
    outcomes: dict[str, dict[str, Any]] = {}
    quantity = "forward"
    try:
        contestants = [_KINDS[name](workload.shape, each) for each in inputs]
        for contestant in contestants:
            contestant.prepare("forward")
        difference = _compare(name, contestants[0], expected, workload.shape.dtype)
        for quantity, calls in _calls(contestants).items():
            if quantity in workload.quantities:
                timing = _graph_timing(calls, workload.shape.device, clock, effort)
                outcomes[quantity] = {**summary(timing, len(calls)), "difference": difference}
    except Exception as error:  # whatever it is, the others go on
        outcomes[quantity] = {"value": None, "reason": short_reason(error)}
    return outcomes


def _compare(
    name: str,
    contestant: Contestant,
    expected: dict[str, tuple[str, torch.Tensor]],
    dtype: str,
) -> float:
    (out,) = contestant.results("forward")
    first, theirs = expected.setdefault(_MASKS.get(name, ENTRANTS[name].mask), (name, out))
    return disagreement([out], [theirs], first, AGREEMENT[dtype])


def _calls(contestants: list[Contestant]) -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = {
        "forward": [partial(contestant.run, "forward") for contestant in contestants]
    }
    parts = [PackCall(c) for c in contestants if isinstance(c, FlashDmattn)]
    if parts:
        calls["plan"] = [part.plan for part in parts]
        calls["forward_planned"] = [part.forward for part in parts]
    return calls


def _graph_timing(calls: list[Call], device: str, clock: Clock, effort: Effort) -> Any:
    def all_copies() -> None:
        for call in calls:
            call()

    all_copies()
    replay = captured(all_copies, device)
    return timings({"graph": replay}, clock, effort)["graph"]
