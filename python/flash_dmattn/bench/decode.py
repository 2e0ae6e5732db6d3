# SPDX-License-Identifier: BSD-3-Clause
"""One query against many keys, of which a key mask keeps few, in a CUDA graph as decoders run it.

A graph holds one call for each of several copies of the inputs, more than the L2 cache has room
for: each call finds its keys in memory, as in a model whose layers take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .cases import AGREEMENT, Case, Inputs, make_inputs
from .contestants.base import Contestant
from .contestants.entrants import ENTRANTS, attends_to
from .contestants.ours import FlashDmattn
from .engine import Method, Tick, disagreement, record_of, release_memory, unmeasured
from .parts import PackCall
from .records import Record, short_reason, summary
from .timing import Call, Timing, captured, timings
from .workloads import Workload

_MOST_COPIES = 16
_DEFAULT_L2 = 64 << 20


def run_decode(
    workload: Workload, method: Method, tick: Tick = lambda note: None
) -> Iterator[Record]:
    """Measure every contestant: making the mask, the call with its plan, and for ours its halves.

    ``tick`` runs once for each contestant.
    """
    case = workload.shape
    inputs = [make_inputs(replace(case, seed=case.seed + copy)) for copy in range(_copies(case))]
    decoding = _Decoding(workload, method, inputs)
    for name in workload.contestants:
        tick(f"{workload.name}: {name}")
        if method.deadline.passed:
            yield from unmeasured(workload, [name], "all", method.deadline.reason)
            continue
        yield from decoding.measure(name)
        release_memory()


def _copies(case: Case) -> int:
    if torch.device(case.device).type != "cuda" or case.window is None:
        return 2
    properties: Any = torch.cuda.get_device_properties(case.device)
    window = min(case.window, case.length)
    kept = 2 * case.batch * case.kv_heads * window * case.head_dim * case.torch_dtype.itemsize
    cache = int(getattr(properties, "L2_cache_size", _DEFAULT_L2))
    return min(-(-3 * cache // (2 * kept)), _MOST_COPIES)


@dataclass
class _Decoding:
    workload: Workload
    method: Method
    inputs: list[Inputs]
    expected: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)

    def measure(self, name: str) -> Iterator[Record]:
        """All quantities of one contestant, as far as it gets."""
        quantity = "forward"
        try:
            kind = ENTRANTS[name].kind
            contestants = [kind(self.workload.shape, each) for each in self.inputs]
            for contestant in contestants:
                contestant.prepare("forward")
            difference = self._compare(name, contestants[0])
            for quantity, calls in _calls(contestants).items():
                if quantity in self.workload.quantities:
                    fields = summary(self._graph_timing(calls), len(calls))
                    yield record_of(self.workload, name, quantity, difference=difference, **fields)
        except Exception as error:  # whatever it is, the others go on
            reason = short_reason(error)
            yield record_of(self.workload, name, quantity, value=None, reason=reason)

    def _compare(self, name: str, contestant: Contestant) -> float:
        (out,) = contestant.results("forward")
        mask = attends_to(name, self.workload.shape)
        first, theirs = self.expected.setdefault(mask, (name, out))
        return disagreement([out], [theirs], first, AGREEMENT[self.workload.shape.dtype])

    def _graph_timing(self, calls: list[Call]) -> Timing:
        def all_copies() -> None:
            for call in calls:
                call()

        all_copies()
        replay = captured(all_copies, self.workload.shape.device)
        return timings({"graph": replay}, self.method.clock, self.method.effort)["graph"]


def _calls(contestants: list[Contestant]) -> dict[str, list[Call]]:
    """The forward call first, since it says most; the others may fail, and then end the rest."""
    calls: dict[str, list[Call]] = {"forward": [partial(c.run, "forward") for c in contestants]}
    parts = [PackCall(c) for c in contestants if isinstance(c, FlashDmattn) and c.backend is None]
    if parts:
        calls["plan"] = [part.plan for part in parts]
        calls["forward_planned"] = [part.forward for part in parts]
    if contestants[0].bias is not None:
        calls["selection"] = [partial(c.prepare, "forward") for c in contestants]
        calls["forward_with_mask"] = [partial(c.prepare_and_run, "forward") for c in contestants]
    return calls
