# SPDX-License-Identifier: BSD-3-Clause
"""Run other projects' tests on flash_dmattn; scripts/test_peers runs this."""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from drawn.workers import Outcome, run

from .accepted import reason_for
from .cases import run_case
from .models import run_model
from .sdpa import SDPA, SDPA_PACKAGES
from .suites import (
    MODELS,
    MODELS_KNOWN_BY,
    MODELS_PACKAGES,
    SUITES,
    copy_models,
    has_models,
    suites_of,
)

# Seconds at the end of a run for cases that are still running.
RESERVE = 25.0
# Time limit of a case in seconds; a model's tests may take four times as long.
LIMIT = {"cuda": 45.0, "cpu": 120.0}
WORKERS = {"cuda": 8, "cpu": 2}
KINDS = ("passed", "failed", "skipped", "accepted")


def main() -> int:
    arguments = parse()
    begin = time.monotonic()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.setdefault(name, "expandable_segments:True")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONDONTWRITEBYTECODE"):
        os.environ[name] = "1"
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_HOME"] = name
        names = take_tests(arguments, Path(name))
        outcomes = run_all(arguments, Path(name), names, begin + arguments.seconds - RESERVE)
    print(f"{time.monotonic() - begin:.0f} s, seed {arguments.seed}")
    return report(outcomes, names if arguments.case is None else [])


def take_tests(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Copy the tests of the checkouts to a folder, and return the names of the suites to run."""
    names = [SDPA]
    for path in arguments.checkouts:
        for suite in suites_of(path):
            suite.copy(path, folder, on_gpu=torch.cuda.is_available())
            names.append(suite.name)
        if has_models(path):
            copy_models(path, folder)
            names.append(MODELS)
    return [name for name in names if not arguments.suites or name in arguments.suites]


def run_all(
    arguments: argparse.Namespace, folder: Path, names: list[str], until: float
) -> list[Outcome]:
    """Run the tests of all suites; model tests run in separate processes.

    Args:
        arguments: of the command line.
        folder: with the copies of the tests.
        names: of the suites.
        until: of time.monotonic, when nothing more is started.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workers = arguments.workers or WORKERS[device]
    parametrized = tuple(name for name in names if name != MODELS)
    for_models = 0
    if MODELS in names and arguments.case is None:
        for_models = max(1, workers * 3 // 8) if parametrized else workers
    for_cases = max(1, workers - for_models) if parametrized else 0
    shared = {
        "seed": arguments.seed,
        "until": until,
        "memory": min(1.0, 1.6 / (for_cases + for_models)),
    }
    cases = functools.partial(run_case, folder=folder, names=parametrized, **shared)
    models = functools.partial(run_model, folder=folder / MODELS, **shared)
    numbers = itertools.count() if arguments.case is None else iter([arguments.case])
    numbers = itertools.islice(numbers, arguments.cases)
    files = itertools.islice(itertools.count(), arguments.cases)
    limit = LIMIT[device]
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(collect, cases, numbers, for_cases, limit, until),
            threads.submit(collect, models, files, for_models, 4 * limit, until),
        ]
        return [*jobs[0].result(), *unfolded(jobs[1].result())]


def parse() -> argparse.Namespace:
    suites = {suite.name: suite.packages for suite in SUITES}
    packages = {SDPA: SDPA_PACKAGES, **suites, MODELS: MODELS_PACKAGES}
    parser = argparse.ArgumentParser(
        prog="scripts/test_peers",
        description="Run a sample of other people's tests on flash_dmattn, and fail on any failure "
        "that tests/peers/accepted.py does not name.",
    )
    parser.add_argument(
        "checkouts",
        type=checkout,
        nargs="*",
        help="folders of FlashAttention, DeepSpeed, cuEquivariance or transformers",
    )
    parser.add_argument("--seconds", type=float, default=240, help="at most, but for a hang")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--workers", type=int, help=f"processes; by device {WORKERS}")
    parser.add_argument("--suites", nargs="+", choices=packages, help="all unless given")
    parser.add_argument("--cases", type=int, help="at most, and as many models; any unless given")
    parser.add_argument("--case", type=int, help="repeat the case that has this number")
    arguments = parser.parse_args()
    needed = {package for name in arguments.suites or packages for package in packages[name]}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        parser.error(f"the tests import {', '.join(missing)}: pip install {' '.join(missing)}")
    return arguments


def checkout(text: str) -> Path:
    """Read an argument that must be a checkout with known tests."""
    path = Path(text).resolve()
    if suites_of(path) or has_models(path):
        return path
    known = ", ".join([*(suite.test for suite in SUITES), MODELS_KNOWN_BY])
    raise argparse.ArgumentTypeError(f"{text} has none of these files: {known}")


def collect(
    job: Callable[[int], Outcome],
    numbers: Iterator[int],
    workers: int,
    limit: float,
    until: float,
) -> list[Outcome]:
    """Run a job on numbers in several processes; `drawn.workers.run` explains the arguments."""
    if not workers:
        return []
    found = run(numbers, job, workers=workers, limit=limit, until=until)
    return [outcome for outcome in found if outcome.kind != "left"]


def unfolded(models: list[Outcome]) -> list[Outcome]:
    """Return an outcome for each test of the models."""
    found = []
    for model in models:
        if model.kind != "right":  # its process crashed or hung
            found.append(model._replace(problem=f"{MODELS}::number {model.seed}"))
            continue
        for kind, message, test in json.loads(model.message):
            found.append(Outcome(model.seed, kind, message, f"{MODELS}::{test}"))
    return found


def report(outcomes: list[Outcome], names: list[str]) -> int:
    """Print counts by suite and failures, and return the exit status.

    Args:
        outcomes: of all cases.
        names: suites that need at least one passed test.
    """
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    accepted: collections.Counter[str] = collections.Counter()
    skipped: collections.Counter[str] = collections.Counter()
    failures: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        test = outcome.problem or f"cases::number {outcome.seed}"
        suite = test.partition("::")[0]
        kind = {"right": "passed", "skipped": "skipped"}.get(outcome.kind, "failed")
        reason = reason_for(test, outcome.message) if kind == "failed" else None
        if outcome.kind == "accepted":
            reason = outcome.message[:90]
        if reason is not None:
            kind = "accepted"
            accepted[f"{suite}: {reason}"] += 1
        if kind == "skipped":
            skipped[f"{suite}: {outcome.message[:90]}"] += 1
        counts.setdefault(suite, collections.Counter())[kind] += 1
        if kind == "failed":
            failures.setdefault(f"{test.partition('[')[0]} {outcome.message[:60]}", []).append(
                outcome
            )
    for suite, count in counts.items():
        print(f"{suite}: " + ", ".join(f"{count[kind]} {kind}" for kind in KINDS))
    for reason, number in sorted(accepted.items()):
        print(f"  accepted, {reason}: {number}")
    for reason, number in skipped.most_common(8):
        print(f"  skipped, {reason}: {number}")
    for alike in failures.values():
        for outcome in alike[:2]:
            title = outcome.problem or "a case"
            print(f"- FAILED {title} (--case {outcome.seed}): {outcome.kind} {outcome.message}")
        if len(alike) > 2:
            print(f"  and {len(alike) - 2} more like these")
    idle = [name for name in names if not counts[name]["passed"]]
    if idle:
        print(f"- FAILED nothing passed of: {', '.join(idle)}")
    return 1 if failures or idle else 0


if __name__ == "__main__":
    sys.exit(main())
