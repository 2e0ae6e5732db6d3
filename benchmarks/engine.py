# SPDX-License-Identifier: BSD-3-Clause
"""Runs a workload: agreement of contestants with the same work, then times, then memory.

One query against many keys is measured as decoders run it. On a GPU that is a CUDA graph with one
call for each of several copies of the inputs, whose total exceeds the L2 cache. So each call reads
its keys from memory, as in a model with several layers.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .cases import AGREEMENT, PASSES, Case, Inputs, Pass, make_inputs
from .contestants import Contestant, FlashDmattn
from .entrants import ENTRANTS, attends_to
from .memory import in_fresh_process, peak_extra_memory
from .pairs import PairFlashDmattn
from .results import Record, Step, short_reason
from .sets import Workload
from .tables import QUANTITIES
from .timing import Call, Clock, host_samples, in_turns, summary

_MOST_COPIES = 16
_DEFAULT_L2 = 64 << 20
# The warm-up before memory is read: small enough to be free, large enough to start all threads.
_WARM_UP_LENGTH = 128


def groups(workload: Workload) -> list[list[str]]:
    """Return the contestants that are timed in turns, then each that is timed alone."""
    names, decode = workload.contestants, workload.shape.queries is not None
    together = [name for name in names if not (decode or ENTRANTS[name].alone)]
    alone = [[name] for name in names if name not in together]
    return ([together] if together else []) + alone


@dataclass
class Measurement:
    """Measures a workload group by group, ``seconds`` for each contestant and quantity."""

    workload: Workload
    clock: Clock
    seconds: float
    # By mask and pass: the first contestant and its results, the reference of later ones.
    agreed: dict[tuple[str, Pass], tuple[str, list[torch.Tensor]]] = field(default_factory=dict)

    def steps(self) -> Iterator[Step]:
        """Yield a step for each group."""
        for names in groups(self.workload):
            title = f"{self.workload.name}: {', '.join(names)}"
            missing = partial(_unmeasured, self.workload, names)
            yield Step(title, partial(self._measure, names), missing)

    @functools.cached_property
    def inputs(self) -> list[Inputs]:
        """The inputs of the calls; for decoding also copies with other numbers."""
        case = self.workload.shape
        return [make_inputs(replace(case, seed=case.seed + i)) for i in range(_copies(case))]

    def _measure(self, names: Sequence[str]) -> list[Record]:
        group, inputs, wanted = _Group(self), self.inputs, self.workload.quantities
        for name in names:
            group.attempt(name, wanted[0], partial(group.enter, name, inputs))
        for which in PASSES:
            taken = [quantity for quantity in wanted if QUANTITIES[quantity].which == which]
            for name in list(group.entered) if taken else []:
                # Both passes make the mask in the same way.
                compare = taken != ["selection"]
                ready = partial(group.prepare, name, which, compare)
                if not group.attempt(name, which if compare else taken[0], ready):
                    del group.entered[name]
            for quantity in taken:
                (group.memory if quantity.startswith("memory") else group.time)(quantity)
        return group.records


def _unmeasured(workload: Workload, names: Iterable[str], reason: str) -> list[Record]:
    return [_record(workload, name, "all", reason=reason) for name in names]


def _record(workload: Workload, name: str, quantity: str, **fields: Any) -> Record:
    mask = attends_to(name, workload.shape)
    return Record(workload.name, name, ENTRANTS[name].role, mask, quantity, **fields)


def release_memory() -> None:
    """Release the memory of failed or finished contestants."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _copies(case: Case) -> int:
    """Return a number of copies whose kept keys and values exceed 1.5 times the L2 cache."""
    if case.queries is None or case.window is None or torch.device(case.device).type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(case.device)
    window = min(case.window, case.length)
    kept = 2 * case.batch * case.kv_heads * window * case.head_dim * case.torch_dtype.itemsize
    cache = int(getattr(properties, "L2_cache_size", _DEFAULT_L2))
    return min(-(-3 * cache // (2 * kept)), _MOST_COPIES)


@dataclass
class _Group:
    """Contestants that are measured together, each with an instance per copy of the inputs."""

    of: Measurement
    entered: dict[str, list[Contestant]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    differences: dict[tuple[str, str], float] = field(default_factory=dict)

    def attempt(self, name: str, quantity: str, step: Callable[[], Any]) -> Any:
        """Return the step's result; on failure record the reason, and return None."""
        try:
            return step()
        except Exception as error:  # continue with the others after any error
            self._record(name, quantity, reason=short_reason(error))
            return None

    def enter(self, name: str, inputs: Sequence[Inputs]) -> None:
        """Make a contestant for each copy."""
        case, make = self.of.workload.shape, ENTRANTS[name].make
        self.entered[name] = [make(case, each) for each in inputs]

    def prepare(self, name: str, which: Pass, compare: bool) -> bool:
        """Make the masks, and compare with the first contestant of the same mask."""
        for contestant in self.entered[name]:
            contestant.prepare(which)
        if compare:
            case, agreed = self.of.workload.shape, self.of.agreed
            results = self.entered[name][0].results(which)
            key = (attends_to(name, case), which)
            if key not in agreed:
                agreed[key] = name, results
                if ENTRANTS[name].compiled:  # it runs alone, after all others
                    make = PairFlashDmattn if case.pair_bias else FlashDmattn
                    ours = make(case, self.of.inputs[0])
                    ours.prepare(which)
                    agreed[key] = "flash_dmattn", ours.results(which)
            allowed = AGREEMENT[case.dtype]
            self.differences[name, which] = disagreement(results, *agreed[key], allowed)
        return True

    def time(self, quantity: str) -> None:
        """Time the calls of all contestants in turns."""
        calls: dict[str, Call] = {}
        for name, copies in self.entered.items():
            call = self.attempt(name, quantity, partial(_one_call, copies, quantity))
            if call:
                calls[name] = call
        clock, decode = self.of.clock, self.of.workload.shape.queries is not None
        sample = clock.replay if decode else clock.sample
        if quantity.startswith("host"):
            sample = host_samples
        for name, found in in_turns(calls, sample, self.of.seconds).items():
            if isinstance(found, Exception):
                self._record(name, quantity, reason=short_reason(found))
            else:
                self._record(name, quantity, **summary(found, len(self.of.inputs)))

    def memory(self, quantity: str) -> None:
        """Measure the peak of each contestant."""
        case = self.of.workload.shape
        for name, (contestant, *_) in self.entered.items():
            if quantity == "memory_with_mask" and contestant.bias is None:
                continue
            step = partial(_peak, contestant, quantity)
            if not case.device.startswith("cuda"):  # the system's allocator
                threads = torch.get_num_threads()
                step = partial(in_fresh_process, fresh_peak, asdict(case), name, quantity, threads)
            peak = self.attempt(name, quantity, step)
            if peak is not None:
                self._record(name, quantity, value=float(peak), samples=1)

    def _record(self, name: str, quantity: str, **fields: Any) -> None:
        fields["difference"] = self.differences.get((name, quantity))
        self.records.append(_record(self.of.workload, name, quantity, **fields))


def _one_call(copies: list[Contestant], quantity: str) -> Call | None:
    """Return one call that makes the call of each copy; None if there is none."""
    calls = [call for call in (copy.call(quantity) for copy in copies) if call is not None]
    if len(calls) == 1:
        return calls[0]

    def each() -> None:
        for call in calls:
            call()

    return each if calls else None


def disagreement(
    results: list[torch.Tensor], whose: str, expected: list[torch.Tensor], allowed: float
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
    """Return the peak extra bytes of a contestant's call, in a fresh process."""
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
