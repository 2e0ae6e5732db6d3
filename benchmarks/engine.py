# SPDX-License-Identifier: BSD-3-Clause
"""Runs a workload: agreement of what does the same work, then times, then memory.

One query against many keys is measured as decoders run it: on a GPU in a CUDA graph with one call
for each of several copies of the inputs, more than the L2 cache has room for. Each call finds its
keys in memory, as in a model whose layers take turns.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .cases import AGREEMENT, PASSES, Case, Inputs, Pass, make_inputs
from .contestants import Contestant, FlashDmattn
from .entrants import ENTRANTS, Make, attends_to
from .memory import in_fresh_process, peak_extra_memory
from .quantities import QUANTITIES
from .results import Record, Step, short_reason
from .timing import Call, Clock, host_samples, in_turns, summary
from .workloads import Workload

_MOST_COPIES = 16
_DEFAULT_L2 = 64 << 20
# Small enough to be free, large enough to start every thread: the warm-up before memory is read.
_WARM_UP_LENGTH = 128


def groups(workload: Workload) -> list[list[str]]:
    """The contestants that are timed in turns, then each that is timed alone."""
    names, decode = workload.contestants, workload.shape.queries is not None
    together = [name for name in names if not (decode or ENTRANTS[name].alone)]
    alone = [[name] for name in names if name not in together]
    return ([together] if together else []) + alone


@dataclass
class Measurement:
    """A workload that is measured group by group, ``seconds`` for each contestant and quantity."""

    workload: Workload
    clock: Clock
    seconds: float
    agreed: dict[tuple[str, Pass], tuple[str, list[torch.Tensor]]] = field(default_factory=dict)

    def steps(self) -> Iterator[Step]:
        """One for each group."""
        for names in groups(self.workload):
            title = f"{self.workload.name}: {', '.join(names)}"
            yield Step(title, partial(self._run, names), partial(unmeasured, self.workload, names))

    @functools.cached_property
    def inputs(self) -> list[Inputs]:
        """Those of the calls, and in decoding copies of them with other numbers."""
        case = self.workload.shape
        return [make_inputs(replace(case, seed=case.seed + i)) for i in range(_copies(case))]

    def _run(self, names: list[str]) -> list[Record]:
        return _Group(self).run(names)


def unmeasured(workload: Workload, names: Iterable[str], reason: str) -> list[Record]:
    """A record of the reason for each contestant of which nothing is measured."""
    return [record_of(workload, name, "all", reason=reason) for name in names]


def record_of(workload: Workload, name: str, quantity: str, **fields: Any) -> Record:
    """A record with what a workload and a contestant's name tell."""
    mask = attends_to(name, workload.shape)
    return Record(workload.name, name, ENTRANTS[name].role, mask, quantity, **fields)


def release_memory() -> None:
    """Give back what failed or finished contestants held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _copies(case: Case) -> int:
    """So many that their kept keys and values are 1.5 times the L2 cache."""
    if case.queries is None or case.window is None or torch.device(case.device).type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(case.device)
    window = min(case.window, case.length)
    kept = 2 * case.batch * case.kv_heads * window * case.head_dim * case.torch_dtype.itemsize
    cache = int(getattr(properties, "L2_cache_size", _DEFAULT_L2))
    return min(-(-3 * cache // (2 * kept)), _MOST_COPIES)


@dataclass
class _Group:
    """Contestants that are measured together, each once for every copy of the inputs."""

    of: Measurement
    entered: dict[str, list[Contestant]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    differences: dict[tuple[str, str], float] = field(default_factory=dict)

    def run(self, names: Iterable[str]) -> list[Record]:
        wanted, shape = self.of.workload.quantities, self.of.workload.shape
        for name in names:
            make = ENTRANTS[name].make
            step = partial(_made, make, shape, self.of.inputs)
            made = self._attempt(name, wanted[0], step)
            if made:
                self.entered[name] = made
        for which in PASSES:
            taken = [q for q in wanted if QUANTITIES[q].which == which]
            # A mask is made in the same way for both passes.
            checked = set(taken) - {"selection"}
            for name in list(self.entered) if taken else []:
                ready = partial(self._ready, name, which, check=bool(checked))
                if self._attempt(name, which if checked else taken[0], ready) is None:
                    del self.entered[name]
            for quantity in taken:
                if quantity.startswith("memory"):
                    self._memory(quantity)
                else:
                    self._time(quantity)
        return self.records

    def _ready(self, name: str, which: Pass, check: bool) -> bool:
        """Make the masks, and compare with the first contestant that attends to the same."""
        for contestant in self.entered[name]:
            contestant.prepare(which)
        if check:
            results = self.entered[name][0].results(which)
            key = (attends_to(name, self.of.workload.shape), which)
            if key not in self.of.agreed:
                self.of.agreed[key] = self._expected(name, results, which)
            first, expected = self.of.agreed[key]
            allowed = AGREEMENT[self.of.workload.shape.dtype]
            self.differences[name, which] = disagreement(results, expected, first, allowed)
        return True

    def _expected(
        self, name: str, results: list[torch.Tensor], which: Pass
    ) -> tuple[str, list[torch.Tensor]]:
        """The first one's own results; ours where it runs by itself, after all the others."""
        if not ENTRANTS[name].compiled:
            return name, results
        ours = FlashDmattn(self.of.workload.shape, self.of.inputs[0])
        ours.prepare(which)
        return "flash_dmattn", ours.results(which)

    def _attempt(self, name: str, quantity: str, step: Callable[[], Any]) -> Any:
        """The step's result; None and a record of the reason where it fails."""
        try:
            return step()
        except Exception as error:  # whatever it is, the others go on
            self._record(name, quantity, reason=short_reason(error))
            return None

    def _time(self, quantity: str) -> None:
        calls: dict[str, Call] = {}
        for name, copies in self.entered.items():
            call = self._attempt(name, quantity, partial(_one_call, copies, quantity))
            if call:
                calls[name] = call
        if quantity == "host":
            for name, call in calls.items():
                samples = self._attempt(name, quantity, partial(host_samples, call))
                if samples:
                    self._record(name, quantity, **summary(samples))
            return
        clock, decode = self.of.clock, self.of.workload.shape.queries is not None
        sample = clock.replay if decode else clock.sample
        for name, found in in_turns(calls, sample, self.of.seconds).items():
            if isinstance(found, Exception):
                self._record(name, quantity, reason=short_reason(found))
            else:
                self._record(name, quantity, **summary(found, len(self.of.inputs)))

    def _memory(self, quantity: str) -> None:
        case = self.of.workload.shape
        for name, (contestant, *_) in self.entered.items():
            if quantity == "memory_with_mask" and contestant.bias is None:
                continue
            step = partial(_peak, contestant, quantity)
            if not case.device.startswith("cuda"):  # the allocator is the system's
                threads = torch.get_num_threads()
                step = partial(in_fresh_process, fresh_peak, asdict(case), name, quantity, threads)
            peak = self._attempt(name, quantity, step)
            if peak is not None:
                self._record(name, quantity, value=float(peak), samples=1)

    def _record(self, name: str, quantity: str, **fields: Any) -> None:
        difference = self.differences.get((name, quantity))
        self.records.append(
            record_of(self.of.workload, name, quantity, difference=difference, **fields)
        )


def _made(make: Make, shape: Case, inputs: list[Inputs]) -> list[Contestant]:
    return [make(shape, each) for each in inputs]


def _one_call(copies: list[Contestant], quantity: str) -> Call | None:
    """One call that makes the call of each copy; None where there is no such thing."""
    calls = [call for call in (copy.call(quantity) for copy in copies) if call is not None]
    if len(calls) == 1:
        return calls[0]

    def each() -> None:
        for call in calls:
            call()

    return each if calls else None


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


def fresh_peak(case: dict[str, Any], name: str, quantity: str, threads: int) -> int:
    """Peak extra bytes of a contestant's call, in a process that has done nothing else."""
    torch.set_num_threads(threads)
    shape, make = Case(**case), ENTRANTS[name].make
    small = replace(shape, length=min(shape.length, _WARM_UP_LENGTH))
    make(small, make_inputs(small)).prepare_and_run(QUANTITIES[quantity].which)
    return _peak(make(shape, make_inputs(shape)), quantity)


def _peak(contestant: Contestant, quantity: str) -> int:
    which = QUANTITIES[quantity].which
    call = contestant.prepare_and_run
    if quantity != "memory_with_mask":
        contestant.prepare(which)
        call = contestant.run
    return peak_extra_memory(partial(call, which), contestant.case.device)
