# SPDX-License-Identifier: BSD-3-Clause
"""Parametrized tests of suites as numbered calls: a seed and a number identify a case."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import io
import itertools
import random
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from drawn.workers import Outcome

from .sdpa import SDPA, samples
from .shims import provide_file
from .suites import FOR_A_GPU, SUITES, Suite

# Tests with at most this many cases run all of them; other tests run a random sample.
MOST_ENUMERATED = 12
# Queries x keys x head dimension of a drawn case.
MOST_WORK = {"cuda": 2.6e8, "cpu": 4e6}
# Values without a counterpart in flash_dmattn, which are rarely worth a draw.
NOT_DRAWN: dict[str, Callable[[Any], bool]] = {
    "dropout_p": lambda value: value > 0,
    "has_qv": bool,
    "dtype": lambda value: value == torch.float8_e4m3fn,
}
# The exceptions of pytest's skip and xfail, which derive from BaseException.
SKIPPED = (pytest.skip.Exception, pytest.xfail.Exception)


class Test(NamedTuple):
    """A test function, and the values of each group of its parameters."""

    __test__ = False  # for pytest
    name: str
    function: Callable[..., object]
    axes: list[tuple[list[str], list[Any]]]

    @property
    def suite(self) -> str:
        return self.name.partition("::")[0]

    @property
    def size(self) -> int:
        size = 1
        for _, values in self.axes:
            size *= len(values)
        return size

    def arguments(self, chosen: tuple[Any, ...]) -> dict[str, Any]:
        """Return the arguments for one value of each axis."""
        arguments: dict[str, Any] = {}
        for (names, _), value in zip(self.axes, chosen, strict=True):
            if hasattr(value, "marks"):  # pytest.param
                value = value.values if len(names) > 1 else value.values[0]
            arguments.update(zip(names, value if len(names) > 1 else [value], strict=True))
        return arguments


class Pool(NamedTuple):
    """The tests of some suites."""

    enumerated: list[tuple[Test, dict[str, Any]]]
    drawn: list[Test]

    def case(self, seed: int, number: int, *, most_work: float) -> tuple[Test, dict[str, Any]]:
        """Return a case; every second one is enumerated while there are any."""
        half, odd = divmod(number, 2)
        if not odd and half < len(self.enumerated):
            return self.enumerated[half]
        if not self.drawn:
            return self.enumerated[number % len(self.enumerated)]
        rng = random.Random(f"{seed}:{number}")
        suites = list(dict.fromkeys(test.suite for test in self.drawn))
        tests = self.drawn
        if half < len(suites):  # a short run covers part of every suite
            tests = [test for test in tests if test.suite == suites[half]]
        weights = [min(MOST_ENUMERATED, test.size**0.25) for test in tests]
        while True:
            (test,) = rng.choices(tests, weights)
            for _ in range(300):
                arguments = test.arguments(tuple(rng.choice(values) for _, values in test.axes))
                if not has_no_counterpart(arguments) and work(arguments) <= most_work:
                    return test, arguments


def has_no_counterpart(arguments: dict[str, Any]) -> bool:
    return any(
        name in arguments and is_excluded(arguments[name])
        for name, is_excluded in NOT_DRAWN.items()
    )


def work(arguments: dict[str, Any]) -> float:
    """Return an estimate of a case's computation."""
    queries = arguments.get("seqlen_q", arguments.get("seqlen", arguments.get("max_seq_len", 128)))
    keys = arguments.get("seqlen_k", queries)
    return float(queries * keys * arguments.get("d", arguments.get("D", 64)))


def axes_of(function: Any) -> list[tuple[list[str], list[Any]]] | None:
    """Return a test's parameters with their values, or None if it is marked to be skipped."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "skipif" and mark.args and mark.args[0]:
            return None
        if mark.name == "parametrize":
            names = mark.args[0]
            if isinstance(names, str):
                names = [name.strip() for name in names.split(",")]
            axes.append((list(names), list(mark.args[1])))
    return axes


def tests_of(suite: Suite, module: types.ModuleType) -> list[Test]:
    """Return a module's tests that need no fixture."""
    found = []
    for name, function in vars(module).items():
        if not (name.startswith("test_") and callable(function)) or name in suite.left_out:
            continue
        if not torch.cuda.is_available() and any(word in name for word in FOR_A_GPU):
            continue
        axes = axes_of(function)
        if axes is None:
            continue
        given = {parameter for names, _ in axes for parameter in names}
        if set(inspect.signature(inspect.unwrap(function)).parameters) <= given:
            found.append(Test(f"{suite.name}::{name}", function, axes))
    return found


@functools.cache
def pool_of(folder: Path, names: tuple[str, ...]) -> Pool:
    """Import the copied suites from a folder, once for each process."""
    if not torch.cuda.is_available():
        pretend_gpu()
    tests = []
    if SDPA in names:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tests += [Test(name, check, []) for name, check in samples(device)]
    for suite in (suite for suite in SUITES if suite.name in names):
        try:
            for shim in suite.shims:
                importlib.import_module(f"peers.shims.{shim}").install(folder / suite.name)
            module = provide_file(f"peers_of_{suite.name}", folder / suite.name / "suite.py")
        except Exception as error:
            tests.append(Test(f"{suite.name}::import", functools.partial(_raise, error), []))
        else:
            tests += tests_of(suite, module)
    few = [test for test in tests if test.size <= MOST_ENUMERATED]
    by_suite: dict[str, list[tuple[Test, dict[str, Any]]]] = {}
    for test in few:
        for chosen in itertools.product(*(values for _, values in test.axes)):
            by_suite.setdefault(test.suite, []).append((test, test.arguments(chosen)))
    rounds = itertools.zip_longest(*by_suite.values())
    enumerated = [case for cases in rounds for case in cases if case is not None]
    return Pool(enumerated, [test for test in tests if test.size > MOST_ENUMERATED])


def _raise(error: Exception) -> None:
    raise error


def pretend_gpu() -> None:
    """Answer the GPU queries of the suites' imports as a Hopper GPU would."""
    properties = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None


def run_case(
    number: int,
    *,
    folder: Path,
    names: tuple[str, ...],
    seed: int,
    until: float,
    memory: float = 1.0,
) -> Outcome:
    """Run one case: "right", "skipped", "failed", or "left" for lack of time.

    Args:
        number: of the case.
        folder: with the copies of the suites.
        names: of the suites.
        seed: of the run.
        until: of time.monotonic, when no more cases are started.
        memory: this process's share of the GPU's memory.
    """
    if time.monotonic() > until:
        return Outcome(number, "left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory)
    most_work = MOST_WORK[device]
    test, arguments = pool_of(folder, names).case(seed, number, most_work=most_work)
    values = ", ".join(f"{name}={value}" for name, value in arguments.items())
    title = f"{test.name}[{values}]".replace("torch.", "")
    if has_no_counterpart(arguments) or work(arguments) > 4 * most_work:
        return Outcome(number, "skipped", "no counterpart, or too much work", title)
    kind, message = _call(test.function, arguments, number)
    if kind == "failed" and "out of memory" in message:
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(3 * random.random())  # lets other processes finish
        kind, message = _call(test.function, arguments, number)
    if device == "cuda" and number % 8 == 0:
        torch.cuda.empty_cache()
    return Outcome(number, kind, message, title)


def _call(function: Callable[..., object], arguments: dict[str, Any], seed: int) -> tuple[str, str]:
    torch.manual_seed(seed)
    random.seed(seed)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            function(**arguments)
    except SKIPPED as skipped:
        return "skipped", str(skipped)
    except (Exception, pytest.fail.Exception) as error:
        frames = traceback.extract_tb(sys.exc_info()[2])
        frame = next((f for f in reversed(frames) if f.filename.endswith("suite.py")), frames[-1])
        said = [line for line in printed.getvalue().splitlines() if "max diff" in line][-12:]
        text = f"{type(error).__name__}: {str(error)[:400]} (line {frame.lineno}: {frame.line})"
        return "failed", "; ".join([text, *said] if isinstance(error, AssertionError) else [text])
    return "right", ""
