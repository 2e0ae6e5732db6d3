# SPDX-License-Identifier: BSD-3-Clause
"""From a device to an opened pack, decided once per device.

What other distributions bring is foreign code: it may ask the loader while it is loaded, and it may
wait for a thread that does. So it runs before the lock is taken. What it asks is answered from
flash_dmattn's own packs and the one that a variable names, and is not remembered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from . import environment, messages, remedies
from .candidates import (
    Candidate,
    EntryPoint,
    OpenedPack,
    arch_name,
    cuda_name,
    device_name,
    entry_point_candidates,
    forced_candidate,
    own_candidates,
    without_repetitions,
)
from .errors import NoPackError, warn_of_passed_over
from .facts import Device, Facts, Situation
from .policy import Wishes, decide
from .targets import InstallationError, find_targets
from .trace import Problem, Refused, Rule, Trace

__all__ = ["Loader"]

logger = logging.getLogger("flash_dmattn.loader")

PackT = TypeVar("PackT", bound=OpenedPack)


@dataclass(frozen=True)
class _Resolution(Generic[PackT]):
    trace: Trace
    pack: PackT | None


class Loader(Generic[PackT]):
    """Decides and opens, on first use of each device. Everything it depends on is a parameter.

    Args:
        facts: of the machine.
        open_pack: opens a file; raises RuntimeError or OSError if that fails.
        abi_version: gives the pack ABI that ``open_pack`` accepts; raises ImportError if there is
            no core.
        directories: gives the directories of the installed package.
        entry_points: gives the entry points of other distributions.
        environ: the environment; that of the process if None.
    """

    def __init__(
        self,
        facts: Facts,
        open_pack: Callable[[str], PackT],
        abi_version: Callable[[], int],
        directories: Callable[[], Iterable[Path]],
        entry_points: Callable[[], Iterable[EntryPoint]],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the dependencies; nothing is looked up yet."""
        self.facts = facts
        self._open_pack = open_pack
        self._abi_version = abi_version
        self._directories = directories
        self._entry_points = entry_points
        self._environ = environ
        self._lock = threading.RLock()
        self._entry_points_run_in: set[int] = set()  # threads
        self._resolutions: dict[tuple[str, int], _Resolution[PackT]] = {}
        self._opened: dict[str, PackT] = {}
        self._candidates: list[Candidate] | None = None
        self._warned: set[Device] = set()

    def after_fork(self) -> None:
        """Forget, in the child of a fork, what was true of its parent alone: the thread that may
        have held the lock, and the GPUs.
        """
        self._lock = threading.RLock()
        self._entry_points_run_in &= {threading.get_ident()}
        self.facts.after_fork()
        kept = {key: found for key, found in self._resolutions.items() if key[0] == "cpu"}
        self._resolutions = kept

    def pack_for(self, device_type: str, device_index: int | None = None) -> PackT:
        """Return the pack that serves a device, with one warning if a better one is damaged.

        Raises:
            NoPackError: no one does, or FLASH_DMATTN_FALLBACK=error and the best one is damaged.
            InvalidVariableError: an environment variable that matters has a value that is not
                allowed.
        """
        resolution = self._resolve(device_type, device_index)
        if resolution.pack is None:
            raise NoPackError(resolution.trace)
        device = resolution.trace.situation.device
        if resolution.trace.passed_over and device not in self._warned:
            warn_of_passed_over(resolution.trace)
            self._warned.add(device)
        return resolution.pack

    def trace_for(self, device_type: str, device_index: int | None = None) -> Trace:
        """Return what was decided for a device, and why. It raises nothing."""
        try:
            return self._resolve(device_type, device_index).trace
        except environment.InvalidVariableError as error:
            variable = str(error).partition(" ")[0]
            return self._failed(
                self._device(device_type, device_index), str(error), remedies.unset(variable)
            )

    def opened_for(self, device_type: str, device_index: int | None = None) -> PackT | None:
        """Return the pack that serves a device, or None; it neither warns nor raises."""
        try:
            return self._resolve(device_type, device_index).pack
        except environment.InvalidVariableError:
            return None

    def candidates(self) -> list[Candidate]:
        """Return every pack that was found, for any device."""
        return list(self._found())

    def _resolve(self, device_type: str, device_index: int | None) -> _Resolution[PackT]:
        if device_index is None:
            device_index = self.facts.current_cuda_device() if device_type == "cuda" else 0
        key = (device_type, device_index)
        found = self._resolutions.get(key)
        if found is not None:
            return found
        begin = time.perf_counter()
        _configure_logging(environment.get("FLASH_DMATTN_LOG", self._environ))
        environment.check_values(self._environ)
        environment.check_unknown(self._environ)
        device, candidates = self._device(*key), self._found()
        with self._lock:
            found = self._resolutions.get(key)
            if found is not None:
                return found
            resolution = self._decide(device, candidates)
            if threading.get_ident() not in self._entry_points_run_in:
                self._resolutions[key] = resolution
        took = 1e3 * (time.perf_counter() - begin)
        logger.debug("decided in %.1f ms from facts: %s", took, resolution.trace.situation)
        logger.info("%s", resolution.trace)
        return resolution

    def _device(self, device_type: str, device_index: int | None) -> Device:
        index = device_index or 0
        for device in self.facts.gpus() if device_type == "cuda" else ():
            if (device.kind, device.index) == (device_type, index):
                return device
        return Device(device_type, index)

    def _decide(self, device: Device, candidates: list[Candidate]) -> _Resolution[PackT]:
        try:
            targets = find_targets(self._directories()) if device.kind == "cuda" else None
            situation = self._situation(device, self._abi_version())
            trace = decide(situation, candidates, self._wishes(), targets)
        except InstallationError as error:
            fix = remedies.reinstall(self.facts.package_version())
            return _Resolution(self._failed(device, str(error), fix), None)
        except ImportError as error:
            fix = remedies.install_backend()
            if "nanobind" not in str(error):
                fix = remedies.reinstall(self.facts.package_version())
            reason = messages.NO_CORE.format(error=error)
            return _Resolution(self._failed(device, reason, fix), None)
        return self._open_first(trace)

    def _open_first(self, trace: Trace) -> _Resolution[PackT]:
        """Open the best candidate; one that fails is refused, and the next is tried.

        With FLASH_DMATTN_FALLBACK=error nothing is tried after one that is damaged.
        """
        strict = environment.get("FLASH_DMATTN_FALLBACK", self._environ) == "error"
        for entry in trace.accepted():
            if strict and trace.passed_over:
                better = trace.passed_over[0].candidate.name
                reason = messages.FALLBACK_FORBIDDEN.format(name=better)
                fix = remedies.unset("FLASH_DMATTN_FALLBACK")
                trace = trace.refuse(entry, Refused(Rule.FORCED, reason, fix))
                continue
            try:
                pack = self._open(entry.candidate.path)
                reason = _difference(entry.candidate, pack)
            except (RuntimeError, OSError) as error:
                reason = messages.CANNOT_OPEN.format(error=error)
            else:
                if not reason:
                    if trace.situation.device.kind == "cpu":
                        environment.check_cpu_simd(pack.features, self._environ)
                    return _Resolution(trace, pack)
            version, distribution = trace.situation.package_version, entry.candidate.distribution
            fix = remedies.after_opening(reason, version, distribution)
            trace = trace.refuse(entry, Refused(Rule.OPENING, reason, fix))
        return _Resolution(trace, None)

    def _open(self, path: str) -> PackT:
        with self._lock:
            if path not in self._opened:
                self._opened[path] = self._open_pack(path)
            return self._opened[path]

    def _found(self) -> list[Candidate]:
        """Return every pack that is here; the first thread to know them tells all others."""
        if self._candidates is not None:
            return self._candidates
        found = own_candidates(self._directories())
        path = environment.get("FLASH_DMATTN_LIBRARY_PATH", self._environ)
        if path:
            # First, so that of a file that was found twice the forced one stays.
            found.insert(0, forced_candidate(path, "FLASH_DMATTN_LIBRARY_PATH", self._open))
        thread = threading.get_ident()
        if thread in self._entry_points_run_in:
            return without_repetitions(found)
        self._entry_points_run_in.add(thread)
        try:
            found += entry_point_candidates(self._entry_points())
        finally:
            self._entry_points_run_in.discard(thread)
        with self._lock:
            if self._candidates is None:
                self._candidates = without_repetitions(found)
            return self._candidates

    def _wishes(self) -> Wishes:
        return Wishes(
            environment.get("FLASH_DMATTN_LIBRARY_PATH", self._environ),
            environment.get("FLASH_DMATTN_CUDA", self._environ),
            environment.get("FLASH_DMATTN_ARCH", self._environ),
        )

    def _situation(self, device: Device, abi_version: int | None) -> Situation:
        facts = self.facts
        return Situation(
            package_version=facts.package_version(),
            abi_version=abi_version,
            host=facts.host(),
            torch=facts.torch(),
            driver=facts.driver() if device.kind == "cuda" else None,
            device=device,
        )

    def _failed(self, device: Device, reason: str, remedy: str) -> Trace:
        return Trace(self._situation(device, None), (), remedy, Problem(reason, remedy))


def _difference(candidate: Candidate, pack: OpenedPack) -> str:
    """Return how an opened pack differs from what its source said of it; "" if it does not."""
    pairs = (
        ("device", candidate.device, device_name(pack.device_type)),
        ("CUDA", candidate.cuda, cuda_name(pack.cuda_version)),
        ("arch", candidate.arch, arch_name(pack.arch)),
        ("version", candidate.version, pack.version),
    )
    return "; ".join(
        messages.DIFFERENCE.format(what=what, said=said, found=found)
        for what, said, found in pairs
        if said != found
    )


def _configure_logging(level: str) -> None:
    """Print what the loader logs to stderr, if that was asked for; whoever configures logging sees
    it in any case.
    """
    if level == "off":
        return
    logger.setLevel(level.upper())
    if not any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[flash_dmattn] %(message)s"))
        logger.addHandler(handler)
