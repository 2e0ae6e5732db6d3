# SPDX-License-Identifier: BSD-3-Clause
"""The self-test of a pack on a GPU of a compute capability on which no pack has been run.

Its outcome is stored in the user's cache directory by pack, driver and GPU: the test takes nearly a
second, and a kernel that crashes the process must not crash the next one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import messages
from .candidates import Candidate
from .facts import Situation

if TYPE_CHECKING:
    from flash_dmattn._core import Pack

_BLOCK = 1 << 20


class Outcome(NamedTuple):
    """The outcome of a self-test: the failure, "" if it passed; and whether it ran just now."""

    failure: str
    is_new: bool


class Trials:
    """Runs self-tests, and stores their outcomes.

    Args:
        self_test: compares small problems by a pack on a device, such as ``cuda:0``; returns the
            first wrong result, or "".
        folder: for the stored outcomes; the user's cache directory if None.
    """

    def __init__(
        self, self_test: Callable[[Pack, str], str] | None = None, folder: Path | None = None
    ) -> None:
        """Store the dependencies; nothing is read yet."""
        self._self_test = self_test or _compare
        self._folder = folder

    def remembered(self, candidate: Candidate, situation: Situation) -> Outcome | None:
        """Return the outcome of an earlier test; None if there is none, or it still runs."""
        try:
            found = json.loads(self._file(candidate, situation).read_text(encoding="utf-8"))
            if "failure" in found:
                return Outcome(str(found["failure"]), is_new=False)
            if found["host"] != platform.node() or _is_alive(int(found["process"])):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Outcome(messages.TRIAL_ENDED_PROCESS, is_new=False)

    def outcome(self, pack: Pack, candidate: Candidate, situation: Situation) -> Outcome:
        """Return the outcome of an earlier test, or run the test."""
        known = self.remembered(candidate, situation)
        if known is not None:
            return known
        if _is_captured():
            return Outcome(messages.TRIAL_IN_CAPTURE, is_new=True)
        file = self._file(candidate, situation)
        _write(file, {"process": os.getpid(), "host": platform.node()})
        device = situation.device
        try:
            failure = _in_a_thread(lambda: self._self_test(pack, f"{device.kind}:{device.index}"))
        except BaseException as error:
            # The cause may be temporary, so do not store it.
            _forget(file)
            if not isinstance(error, Exception):
                raise
            return Outcome(f"{type(error).__name__}: {error}", is_new=True)
        _write(file, {"failure": failure})
        return Outcome(failure, is_new=True)

    def _file(self, candidate: Candidate, situation: Situation) -> Path:
        device = situation.device
        facts = (_hash(candidate), str(situation.driver), device.name, device.capability)
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return (self._folder or cache_folder()) / f"self-test-{name}.json"


def cache_folder() -> Path:
    """Return this project's folder in the user's cache directory of the system."""
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "flash_dmattn"


def _hash(candidate: Candidate) -> str:
    """Return the hash of the pack file itself, regardless of its manifest."""
    digest = hashlib.sha256()
    with Path(candidate.path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _compare(pack: Pack, device: str) -> str:
    # Imported by name, because it imports modules that query the loader.
    test = importlib.import_module("flash_dmattn.selftest.of_pack")
    return str(test.first_failure(pack, device))


def _is_captured() -> bool:
    """Say whether torch's current stream is being captured, so that no comparison is possible."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


def _in_a_thread(function: Callable[[], str]) -> str:
    """Run a function in a new thread, without torch's thread-local modes: those of a compiler,
    functorch, autograd or a recorder.
    """
    result: list[str | BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="flash_dmattn self-test")
    thread.start()
    thread.join()
    (found,) = result
    if isinstance(found, BaseException):
        raise found
    return found


def _is_alive(process: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


def _write(file: Path, content: dict[str, Any]) -> None:
    """Write atomically, so that readers see no partial file. Write errors are ignored."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(content, stream)
        Path(name).replace(file)
    except OSError:
        return


def _forget(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return
