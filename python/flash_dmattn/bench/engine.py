# SPDX-License-Identifier: BSD-3-Clause
"""Runs a workload: agreement of what does the same work, then times, then memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .cases import AGREEMENT, Inputs, Pass, make_inputs
from .contestants.base import Contestant
from .contestants.entrants import ENTRANTS, attends_to
from .contestants.ours import FlashDmattn
from .parts import PackCall
from .peak import MEMORY_PASSES, measure_peak, peak_in_fresh_process
from .records import Record, short_reason, summary
from .timing import Call, Clock, Deadline, Effort, host_timing, timings
from .workloads import Workload

Tick = Callable[[str], object]

_TRAINING = {
    "backward",
    "forward_backward",
    "end_to_end",
    "memory_forward_backward",
    "memory_with_mask",
}
_INFERENCE = {
    "plan",
    "forward",
    "forward_planned",
    "forward_with_mask",
    "host",
    "memory_forward",
}


@dataclass
class Method:
    """How everything is measured.

    ``fresh_memory`` takes memory in a new process each, where no earlier call has left some to
    reuse: needed on CPUs, where the allocator is the system's.
    """

    clock: Clock
    effort: Effort
    fresh_memory: bool = False
    deadline: Deadline = field(default_factory=Deadline)


def groups(workload: Workload) -> list[list[str]]:
    """The contestants that are timed in turns, then each that is timed alone."""
    together = [name for name in workload.contestants if not ENTRANTS[name].alone]
    alone = [[name] for name in workload.contestants if ENTRANTS[name].alone]
    return ([together] if together else []) + alone


def run_workload(
    workload: Workload, method: Method, tick: Tick = lambda note: None
) -> Iterator[Record]:
    """Measure every quantity of every contestant; ``tick`` runs once for each group."""
    inputs = make_inputs(workload.shape)
    agreed: dict[tuple[str, Pass], tuple[str, list[torch.Tensor]]] = {}
    for names in groups(workload):
        tick(f"{workload.name}: {', '.join(names)}")
        if method.deadline.passed:
            yield from unmeasured(workload, names, "all", method.deadline.reason)
            continue
        group = _Group(workload, inputs, method, agreed)
        yield from group.run(names)
        del group
        release_memory()


def unmeasured(
    workload: Workload, names: Iterable[str], quantity: str, reason: str
) -> list[Record]:
    """A record of the reason for each contestant of which nothing is measured."""
    return [record_of(workload, name, quantity, value=None, reason=reason) for name in names]


def record_of(workload: Workload, name: str, quantity: str, **fields: Any) -> Record:
    """A record with what a workload and a contestant's name tell."""
    return Record(
        case=workload.name,
        contestant=name,
        role=ENTRANTS[name].kind.role,
        mask=attends_to(name, workload.shape),
        quantity=quantity,
        **fields,
    )


def release_memory() -> None:
    """Give back what failed or finished contestants held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def disagreement(
    results: list[torch.Tensor], expected: list[torch.Tensor], whose: str, allowed: float
) -> float:
    """Return the largest difference, relative to the largest value of each tensor.

    Raises:
        ArithmeticError: it is larger than allowed.
    """
    difference = max(
        ((ours.float() - theirs.float()).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(results, expected, strict=True)
    )
    if not difference <= allowed:
        raise ArithmeticError(
            f"differs from {whose} by {difference:.1e} of the largest value, allowed is {allowed}"
        )
    return difference


@dataclass
class _Group:
    workload: Workload
    inputs: Inputs
    method: Method
    agreed: dict[tuple[str, Pass], tuple[str, list[torch.Tensor]]]
    entered: dict[str, Contestant] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    differences: dict[tuple[str, str], float] = field(default_factory=dict)

    def run(self, names: Iterable[str]) -> list[Record]:
        wanted = self.workload.quantities
        for name in names:
            self._require(name, wanted[0], partial(self._enter, name))
        if "selection" in wanted:
            self._time("selection", {n: partial(c.prepare, "forward") for n, c in self._masked()})
        if _INFERENCE & set(wanted):
            self._forward(wanted)
        if _TRAINING & set(wanted):
            self._training(wanted)
        for quantity in MEMORY_PASSES:
            if quantity in wanted:
                self._memory(quantity)
        return self.records

    def _enter(self, name: str) -> None:
        contestant = ENTRANTS[name].kind(self.workload.shape, self.inputs)
        contestant.prepare("forward")
        self.entered[name] = contestant

    def _masked(self) -> list[tuple[str, Contestant]]:
        """Those that make a mask."""
        return [(n, c) for n, c in self.entered.items() if c.bias is not None]

    def _forward(self, wanted: tuple[str, ...]) -> None:
        self._check("forward")
        if "forward" in wanted:
            self._time("forward", {n: partial(c.run, "forward") for n, c in self.entered.items()})
        if "forward_with_mask" in wanted:
            calls = {n: partial(c.prepare_and_run, "forward") for n, c in self._masked()}
            self._time("forward_with_mask", calls)
        if {"plan", "forward_planned"} & set(wanted):
            self._halves(wanted)
        if "host" in wanted:
            for name, contestant in list(self.entered.items()):
                if contestant.role == "ours":
                    timing = self._attempt(name, "host", partial(self._host, contestant))
                    if timing is not None:
                        self._record(name, "host", **summary(timing))

    def _halves(self, wanted: tuple[str, ...]) -> None:
        parts: dict[str, PackCall] = {}
        for name, contestant in self.entered.items():
            if isinstance(contestant, FlashDmattn) and contestant.backend is None:
                call = self._attempt(name, "plan", partial(PackCall, contestant))
                if call is not None and call.has_plan:
                    parts[name] = call
        if "plan" in wanted:
            self._time("plan", {name: call.plan for name, call in parts.items()})
        if "forward_planned" in wanted:
            for name, call in parts.items():
                self._attempt(name, "forward_planned", call.plan)
            self._time("forward_planned", {name: call.forward for name, call in parts.items()})

    def _host(self, contestant: Contestant) -> Any:
        for leaf in contestant.leaves:
            leaf.requires_grad_(False)  # as tensors are where no gradient is wanted
        try:
            with torch.no_grad():
                return host_timing(contestant.attend, self.workload.shape.device)
        finally:
            for leaf in contestant.leaves:
                leaf.requires_grad_()

    def _training(self, wanted: tuple[str, ...]) -> None:
        for name, contestant in list(self.entered.items()):
            self._require(name, "forward_backward", partial(contestant.prepare, "forward_backward"))
        self._check("forward_backward")
        if "forward_backward" in wanted:
            calls = {n: partial(c.run, "forward_backward") for n, c in self.entered.items()}
            self._time("forward_backward", calls)
        if "end_to_end" in wanted:
            steps = {n: partial(c.prepare_and_run, "forward_backward") for n, c in self._masked()}
            self._time("end_to_end", steps)
        if "backward" in wanted:
            recorded = {
                name: self._attempt(name, "backward", partial(_recorded, contestant))
                for name, contestant in list(self.entered.items())
            }
            self._time("backward", {n: call for n, call in recorded.items() if call is not None})
            recorded.clear()

    def _check(self, which: Pass) -> None:
        """Compare with the first contestant that attends to the same; who differs is out."""
        for name, contestant in list(self.entered.items()):
            self._require(name, which, partial(self._compare, name, contestant, which))

    def _compare(self, name: str, contestant: Contestant, which: Pass) -> None:
        results = contestant.results(which)
        key = (attends_to(name, self.workload.shape), which)
        if key not in self.agreed:
            self.agreed[key] = self._expected(name, results, which)
        first, expected = self.agreed[key]
        allowed = AGREEMENT[self.workload.shape.dtype]
        self.differences[name, which] = disagreement(results, expected, first, allowed)

    def _expected(
        self, name: str, results: list[torch.Tensor], which: Pass
    ) -> tuple[str, list[torch.Tensor]]:
        """The first one's own results; ours where it runs by itself, after all the others."""
        if not ENTRANTS[name].compiled:
            return name, results
        ours = FlashDmattn(self.workload.shape, self.inputs)
        ours.prepare(which)
        return "flash_dmattn", ours.results(which)

    def _require(self, name: str, quantity: str, step: Callable[[], object]) -> None:
        """A step without which nothing else of the contestant is worth measuring."""
        try:
            step()
        except Exception as error:  # whatever it is, the others go on
            self._record(name, quantity, value=None, reason=short_reason(error))
            self.entered.pop(name, None)

    def _attempt(self, name: str, quantity: str, step: Callable[[], Any]) -> Any:
        """The step's result; None and a record of the reason where it fails."""
        try:
            return step()
        except Exception as error:
            self._record(name, quantity, value=None, reason=short_reason(error))
            return None

    def _time(self, quantity: str, calls: Mapping[str, Call]) -> None:
        calls = {name: call for name, call in calls.items() if name in self.entered}
        clock, effort = self.method.clock, self.method.effort
        try:
            taken = timings(calls, clock, effort) if calls else {}
        except Exception:  # one of them: each by itself, to know which
            taken = None
        if taken is None:
            release_memory()
            taken = {}
            for name, call in calls.items():
                single = partial(timings, {name: call}, clock, effort)
                taken.update(self._attempt(name, quantity, single) or {})
        for name, timing in taken.items():
            self._record(name, quantity, **summary(timing))

    def _memory(self, quantity: str) -> None:
        with_mask = quantity == "memory_with_mask"
        for name, contestant in list(self.entered.items()):
            if with_mask and contestant.bias is None:
                continue
            measure: Callable[[], int] = partial(measure_peak, contestant, quantity)
            if self.method.fresh_memory:
                measure = partial(peak_in_fresh_process, self.workload.shape, name, quantity)
            peak = self._attempt(name, quantity, measure)
            if peak is not None:
                self._record(name, quantity, value=float(peak), samples=1)

    def _record(self, name: str, quantity: str, **fields: Any) -> None:
        difference = self.differences.get((name, quantity))
        self.records.append(
            record_of(self.workload, name, quantity, difference=difference, **fields)
        )


def _recorded(contestant: Contestant) -> Call:
    """The backward pass alone, of a forward pass that was recorded before."""
    out = contestant.attend()
    return partial(
        torch.autograd.grad, out, contestant.leaves, contestant.grad_out, retain_graph=True
    )
