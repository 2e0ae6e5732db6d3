# SPDX-License-Identifier: BSD-3-Clause
"""The pack that serves a device, and the backend of a call. Each is decided once.

Entry points of other distributions are foreign code. While they load they may query the loader, or
wait for a thread that does. So they run before the lock is taken. Their queries are answered from
flash_dmattn's own packs and the pack that a variable names, and these answers are not kept.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import elf, environment, macho, messages, pe, remedies
from .candidates import (
    ENTRY_POINT_GROUP,
    Candidate,
    difference,
    entry_point_candidates,
    forced_candidate,
    own_candidates,
    without_repetitions,
)
from .errors import (
    FallbackWarning,
    NoPackError,
    UntestedWarning,
    passed_over_text,
    plain_pytorch_text,
    warn,
)
from .facts import Device, Machine, Situation
from .rules import Wishes, decide
from .targets import InstallationError, find_targets
from .trace import Rule, Trace

if TYPE_CHECKING:
    import torch

    from flash_dmattn._core import Pack
    from flash_dmattn.backends.base import Backend

    from .trial import Outcome, Trials

logger = logging.getLogger("flash_dmattn.loader")

_BACKEND = "FLASH_DMATTN_BACKEND"
T = TypeVar("T")
_machine = Machine()
# The system's loader maps a file as its headers say. If a download or a full disk has truncated the
# file, the first access beyond its end kills the process without an error.
_check_file = {"darwin": macho.check, "win32": pe.check}.get(sys.platform, elf.check)


def open_pack(path: str) -> Pack:
    """Open a library as a kernel pack.

    Raises:
        RuntimeError: it is damaged, built for another machine, or not a kernel pack.
        OSError: it cannot be read.
    """
    from flash_dmattn import _core

    _check_file(path, _machine.host().machine)
    return _core.load_pack(path)


def _abi_version() -> int:
    from flash_dmattn import _core

    return _core.PACK_ABI_VERSION


def _directories() -> Iterable[Path]:
    import flash_dmattn

    return [Path(directory) for directory in flash_dmattn.__path__]


def _entry_points() -> Iterable[metadata.EntryPoint]:
    return metadata.entry_points(group=ENTRY_POINT_GROUP)


class Loader:
    """Chooses and opens packs at the first use of each device. All dependencies are parameters.

    Args:
        facts: of the machine.
        open_pack: opens a file; raises RuntimeError or OSError on failure.
        abi_version: returns the pack ABI that ``open_pack`` accepts; raises ImportError without a
            core.
        directories: returns the directories of the installed package.
        entry_points: returns the entry points of other distributions.
        environ: the environment; None for that of the process.
        trials: runs the self-tests of packs, and keeps their outcomes.
    """

    def __init__(
        self,
        facts: Machine = _machine,
        open_pack: Callable[[str], Pack] = open_pack,
        abi_version: Callable[[], int] = _abi_version,
        directories: Callable[[], Iterable[Path]] = _directories,
        entry_points: Callable[[], Iterable[metadata.EntryPoint]] = _entry_points,
        environ: Mapping[str, str] | None = None,
        trials: Trials | None = None,
    ) -> None:
        """Store the dependencies; nothing is queried yet."""
        self.facts = facts
        self._open_pack = open_pack
        self._abi_version = abi_version
        self._directories = directories
        self._entry_points = entry_points
        self._environ = environ
        self._trials = trials
        self._lock = threading.RLock()
        self._entry_points_run_in: set[int] = set()  # threads
        # All decisions: the trace of (type, index), and the backend of (name, device, value of
        # FLASH_DMATTN_BACKEND).
        self._decided: dict[Hashable, Any] = {}
        self._opened: dict[str, Pack] = {}
        self._candidates: list[Candidate] | None = None
        self._warned: set[str] = set()

    def after_fork(self) -> None:
        """Discard, in the child of a fork, state that is valid only in the parent: the lock, which
        a thread may hold, and the GPUs.
        """
        self._lock = threading.RLock()
        self._entry_points_run_in &= {threading.get_ident()}
        self.facts.after_fork()
        cpu = ("cpu", 0)
        self._decided = {cpu: self._decided[cpu]} if cpu in self._decided else {}

    def pack_for(self, device_type: str, device_index: int | None = None) -> Pack:
        """Do the same as the function `pack_for`.

        Warn once if a better pack is damaged, or raise with FLASH_DMATTN_FALLBACK=error. Warn once
        if only a self-test has been run on such a GPU.
        """
        trace = self._tried(self._resolve(device_type, device_index))
        if trace.pack is None:
            raise NoPackError(trace)
        self._warn_once(passed_over_text(trace))
        return trace.pack

    def trace_for(self, device_type: str, device_index: int | None = None) -> Trace:
        """Return the decision for a device and its reasons, with the pack that serves it, if any.

        It neither warns nor raises, and runs no self-test.
        """
        try:
            return self._tried(self._resolve(device_type, device_index), remembered=True)
        except environment.InvalidVariableError as error:
            fix = remedies.unset(str(error).partition(" ")[0])
            return self._failed(self._device(device_type, device_index or 0), str(error), fix)

    def backend_for(
        self, name: str, device: torch.device, make: Callable[[str, torch.device, str], Backend]
    ) -> Backend:
        """Return the backend of calls on a device, made once.

        It is the named one; else that of FLASH_DMATTN_BACKEND; else the device's pack, or plain
        PyTorch with a warning.

        Args:
            name: from the call; "auto" if the call names none.
            device: of the tensors.
            make: makes the backend of a name on a device; "auto" is the device's pack. It also gets
                the setting that its errors may recommend to request no backend.

        Raises:
            NoPackError: FLASH_DMATTN_FALLBACK=error, and no pack serves the device.
            InvalidVariableError: an environment variable has a value that is not allowed.
            Exception: what ``make`` raises.
        """
        # The variable is part of the key, because it may change between calls.
        preference = None
        if name == "auto":
            if self._environ is not None:
                preference = self._environ.get(_BACKEND)
            elif environment.is_given(_BACKEND):
                preference = os.environ[_BACKEND]
        question = (name, device, preference)
        backend: Backend | None = self._decided.get(question)
        if backend is None:
            backend = self._remember(question, self._choose(name, device, preference, make))
        return backend

    def candidates(self) -> list[Candidate]:
        """Return every pack that was found, for any device."""
        return list(self._found())

    def _choose(
        self,
        name: str,
        device: torch.device,
        preference: str | None,
        make: Callable[[str, torch.device, str], Backend],
    ) -> Backend:
        # Checked even if no pack is requested.
        environment.check_values(self._environ)
        default = "backend=None"
        if preference is not None:
            name, default = environment.get(_BACKEND, self._environ), f"{_BACKEND}=auto"
        if device.type == "meta":
            name = "reference"
        try:
            return make(name, device, default)
        except NoPackError as error:
            if name != "auto" or self._forbids_fallbacks():
                raise
            self._warn_once(plain_pytorch_text(str(device), error))
            return make("reference", device, default)

    def _forbids_fallbacks(self) -> bool:
        return environment.get("FLASH_DMATTN_FALLBACK", self._environ) == "error"

    def _warn_once(self, text: str, category: type[Warning] = FallbackWarning) -> None:
        if text and text not in self._warned:
            warn(text, category)
            self._warned.add(text)

    def _remember(self, question: Hashable, answer: T) -> T:
        """Return the first stored answer. Answers to running entry points are not stored, because
        their packs are not known yet.
        """
        with self._lock:
            if threading.get_ident() in self._entry_points_run_in:
                return answer
            first: T = self._decided.setdefault(question, answer)
            return first

    def _resolve(self, device_type: str, device_index: int | None) -> Trace:
        if device_index is None:
            device_index = self.facts.current_cuda_device() if device_type == "cuda" else 0
        question = (device_type, device_index)
        trace: Trace | None = self._decided.get(question)
        if trace is not None:
            return trace
        begin = time.perf_counter()
        _configure_logging(environment.get("FLASH_DMATTN_LOG", self._environ))
        environment.check_values(self._environ)
        environment.check_unknown(self._environ)
        device, candidates = self._device(*question), self._found()
        with self._lock:
            if question in self._decided:  # another thread was faster
                return self._resolve(*question)
            trace = self._remember(question, self._decide(device, candidates))
        took = 1e3 * (time.perf_counter() - begin)
        logger.debug("decided in %.1f ms from facts: %s", took, trace.situation)
        logger.info("%s", trace)
        return trace

    def _tried(self, trace: Trace, *, remembered: bool = False) -> Trace:
        """Return the trace with the outcome of its pack's self-test, if one must pass.

        It runs without the lock, because the test runs torch, and calls that other threads may wait
        for. With ``remembered`` no test is run, and undecided cases stay undecided.
        """
        decided = trace
        while trace.pack is not None and (entry := next(trace.accepted())).trial:
            situation = trace.situation
            outcome = self._outcome(trace.pack, entry.candidate, situation, remembered)
            if outcome is None:
                break
            if outcome.failure:
                reason = messages.TRIAL_FAILED.format(failure=outcome.failure)
                fix = remedies.PLAIN_PYTORCH
                refused = trace.refuse(entry, Rule.UNTRIED, reason, fix)
                trace = self._open_first(replace(refused, pack=None))
                continue
            first = messages.TRIAL_FIRST.format(facts=situation)
            passed = messages.TRIAL_PASSED.format(facts=situation)
            trace = trace.settle(entry, entry.reason.replace(first, passed))
            if outcome.is_new:
                name, device = entry.candidate.name, situation.device
                text = messages.UNTESTED_GPU.format(chosen=name, device=device)
                self._warn_once(text, UntestedWarning)
        if trace is not decided:
            question = (trace.situation.device.kind, trace.situation.device.index)
            with self._lock:
                if self._decided.get(question) is decided:
                    self._decided[question] = trace
        return trace

    def _outcome(
        self, pack: Pack, candidate: Candidate, situation: Situation, remembered: bool
    ) -> Outcome | None:
        """Return the outcome of a self-test; None if it has no outcome yet and must not run."""
        if self._trials is None:
            from .trial import Trials

            self._trials = Trials()
        if remembered:
            return self._trials.remembered(candidate, situation)
        return self._trials.outcome(pack, candidate, situation)

    def _device(self, device_type: str, index: int) -> Device:
        for device in self.facts.gpus() if device_type == "cuda" else ():
            if (device.kind, device.index) == (device_type, index):
                return device
        return Device(device_type, index)

    def _decide(self, device: Device, candidates: list[Candidate]) -> Trace:
        fix = remedies.reinstall(self.facts.package_version())
        try:
            targets = find_targets(self._directories()) if device.kind == "cuda" else None
            situation = self._situation(device, self._abi_version())
            trace = decide(situation, candidates, Wishes.of(self._environ), targets)
        except InstallationError as error:
            return self._failed(device, str(error), fix)
        except ImportError as error:
            fix = remedies.INSTALL_BACKEND if "nanobind" in str(error) else fix
            return self._failed(device, messages.NO_CORE.format(error=error), fix)
        return self._open_first(trace)

    def _open_first(self, trace: Trace) -> Trace:
        """Open the best candidate; if that fails, refuse it and try the next.

        With FLASH_DMATTN_FALLBACK=error no candidate is tried after a damaged one.
        """
        strict = self._forbids_fallbacks()
        for entry in trace.accepted():
            if strict and trace.passed_over:
                better = trace.passed_over[0].candidate.name
                reason = messages.FALLBACK_FORBIDDEN.format(name=better)
                fix = remedies.unset("FLASH_DMATTN_FALLBACK")
                trace = trace.refuse(entry, Rule.FORCED, reason, fix)
                continue
            try:
                pack = self._open(entry.candidate.path)
                reason = difference(entry.candidate, pack)
            except (RuntimeError, OSError) as error:
                reason = messages.CANNOT_OPEN.format(error=error)
            else:
                if not reason:
                    if trace.situation.device.kind == "cpu":
                        environment.check_cpu_simd(pack.features, self._environ)
                    return replace(trace, pack=pack)
            version, distribution = trace.situation.package_version, entry.candidate.distribution
            fix = remedies.after_opening(reason, version, distribution)
            trace = trace.refuse(entry, Rule.OPENING, reason, fix)
        return trace

    def _open(self, path: str) -> Pack:
        with self._lock:
            if path not in self._opened:
                self._opened[path] = self._open_pack(path)
            return self._opened[path]

    def _found(self) -> list[Candidate]:
        """Return every pack that is present; the first complete result is used by all threads."""
        if self._candidates is not None:
            return self._candidates
        found = own_candidates(self._directories())
        path = environment.get("FLASH_DMATTN_LIBRARY_PATH", self._environ)
        if path:
            # First, so that the forced candidate wins over duplicates of its file.
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

    def _situation(self, device: Device, abi_version: int | None) -> Situation:
        facts = self.facts
        driver = facts.driver() if device.kind == "cuda" else None
        return Situation(
            facts.package_version(), abi_version, facts.host(), facts.torch(), driver, device
        )

    def _failed(self, device: Device, reason: str, remedy: str) -> Trace:
        return Trace(self._situation(device, None), (), remedy, reason)


def _configure_logging(level: str) -> None:
    """Print the loader's log to stderr if requested. Programs that configure logging get the log
    regardless.
    """
    if level == "off":
        return
    logger.setLevel(level.upper())
    if not any(isinstance(handler, logging.StreamHandler) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[flash_dmattn] %(message)s"))
        logger.addHandler(handler)


default_loader = Loader()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=default_loader.after_fork)


def pack_for(device_type: str, device_index: int | None = None) -> Pack:
    """Return the opened pack that serves a device; decided once per device and process.

    Args:
        device_type: such as ``"cpu"`` or ``"cuda"``.
        device_index: of the GPU; None is torch's current device.

    Raises:
        NoPackError: no pack serves the device; the text lists what was searched and found, and the
            remedy.
        environment.InvalidVariableError: an environment variable has a value that is not allowed.
    """
    return default_loader.pack_for(device_type, device_index)


def trace_for(device_type: str, device_index: int | None = None) -> Trace:
    """Return the accepted and refused candidates of a device, with reasons. It does not raise."""
    return default_loader.trace_for(device_type, device_index)
