# SPDX-License-Identifier: BSD-3-Clause
"""transformers' tests of models: in each process, pytest runs one model at a time."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drawn.workers import Outcome

from .suites import MODELS_FILES, MODELS_FOLDER

# Seconds for the tests of one model: a run covers some tests of many models, not all of few.
BUDGET = {"cuda": 30.0, "cpu": 60.0}
# The tests that ask for SDPA or FlashAttention; a CPU has time for few of their parameters.
CHOSEN = {
    "cuda": "(eager_matches_sdpa_inference and (fp16 or bf16)) or flash_attn_2_inference"
    " or flash_attn_2_from_config or eager_matches_fa2_generate or flash_attention_2_padding"
    " or flash_attention_2_continue or can_compile_with_attention_mask_None"
    " or eager_matches_sdpa_generate",
    "cpu": "inference_09_fp32 or inference_17_bf16 or flash_attn_2_from_config"
    " or flash_attention_2_padding",
}


def files_of(folder: Path, seed: int) -> list[Path]:
    """Return the test files of models in an order given by the seed."""
    files = sorted(folder.glob(MODELS_FILES))
    random.Random(seed).shuffle(files)
    return files


class Recorder:
    """A pytest plugin that records the outcome of each test.

    Args:
        until: of time.monotonic; tests that would start later are not run and not kept.
    """

    def __init__(self, until: float) -> None:
        self.until = until
        self.outcomes: list[tuple[str, str, str]] = []
        self.calls = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        self.calls = 0
        return True if time.monotonic() > self.until else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        from .shims import model_tests

        random.seed(0)
        torch.manual_seed(0)
        before = model_tests.calls
        try:
            return (yield)
        finally:
            self.calls = model_tests.calls - before

    def pytest_runtest_logreport(self, report: Any) -> None:
        from .shims import model_tests

        if report.when != "call" and report.outcome == "passed":
            return
        kind = {"passed": "right", "failed": "failed", "skipped": "skipped"}[report.outcome]
        message = ""
        if report.failed:
            errors = [line[1:] for line in report.longreprtext.splitlines() if line[:2] == "E "]
            message = " ".join(" ".join(errors).split())[:600]
        elif report.skipped:
            message = report.longrepr[2]
        elif not self.calls and model_tests.in_place == model_tests.OURS:
            kind, message = "skipped", "passed without a call of flash_dmattn"
        self.outcomes.append((kind, message, report.nodeid.partition("models/")[2]))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            message = " ".join(report.longreprtext.splitlines()[-1:])
            # A package that few models' tests import, a model of another version, or a file that is
            # not copied.
            absent = re.search(
                r"No module named '(?!tests)|cannot import name .* from .transformers"
                r"|FileNotFoundError",
                message,
            )
            kind = "skipped" if absent else "failed"
            self.outcomes.append((kind, message, report.nodeid.partition("models/")[2]))


@functools.cache
def prepare(folder: Path) -> None:
    """Patch transformers in this process, and change to its tests' folder."""
    os.environ["RUN_SLOW"] = "1"
    from .shims import model_tests

    model_tests.install(folder)
    torch.backends.cudnn.allow_tf32 = False  # as in transformers' own test runs
    os.chdir(folder)
    sys.path.insert(0, str(folder))


def run_model(
    number: int, *, folder: Path, seed: int, until: float, memory: float = 1.0
) -> Outcome:
    """Run one model's tests; the message is a JSON list of kind, message and test of each.

    Args:
        number: of the model.
        folder: with the copy of the tests.
        seed: of the run.
        until: of time.monotonic, when no more tests are started.
        memory: this process's share of the GPU's memory.
    """
    files = files_of(folder, seed)
    if time.monotonic() > until or number >= len(files):
        return Outcome(number, "left")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory)
    from .shims import model_tests

    prepare(folder)
    file = files[number].relative_to(folder)
    model_tests.import_tests(".".join(file.with_suffix("").parts))
    recorder = Recorder(min(until, time.monotonic() + BUDGET[device]))
    run_tests([str(file)], CHOSEN[device], recorder)
    outcomes = excused(recorder.outcomes)
    if device == "cuda":
        torch.cuda.empty_cache()
    return Outcome(number, "right", json.dumps(outcomes), file.parent.name)


def run_tests(names: list[str], chosen: str, recorder: Recorder) -> None:
    """Run the tests by pytest in this process without output."""
    options = ["-q", "--noconftest", "--capture=sys", "-p", "no:cacheprovider", "-W", "ignore"]
    options += ["-c", os.devnull, "--rootdir", str(Path.cwd()), "-k", chosen]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main([*options, *names], plugins=[recorder])


def excused(outcomes: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Accept failures that also occur with eager attention in place of flash_dmattn.

    Examples are tests of another version of transformers, of files on a hub, and of code that
    torch.compile refuses. The rerun compares eager attention with itself. Eager attention lacks
    features of FlashAttention, so an AssertionError in its tests is never accepted.

    Args:
        outcomes: kind, message and test of each.
    """
    from .shims import model_tests

    failures = {
        test: message
        for kind, message, test in outcomes
        if kind == "failed"
        and "::" in test
        and ("sdpa" in test or not message.startswith("AssertionError"))
    }
    if not failures:
        return outcomes
    recorder = Recorder(math.inf)
    model_tests.in_place = "eager"
    try:
        run_tests([f"{MODELS_FOLDER}/{test}" for test in failures], "", recorder)
    finally:
        model_tests.in_place = model_tests.OURS
    same = {
        test
        for kind, message, test in recorder.outcomes
        if kind == "failed" and beginning(message) == beginning(failures[test])
    }
    return [
        ("accepted", f"fails with eager attention, too: {message}", test)
        if test in same
        else (kind, message, test)
        for kind, message, test in outcomes
    ]


def beginning(message: str) -> str:
    """Return the common part of messages of the same failure, without its numbers."""
    return re.sub(r"\d+", "", message)[:100]
