# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures and settings of all test modules: targets, backends and the hypothesis profiles."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Test modules import their helpers in every import mode of pytest.
sys.path.insert(0, str(Path(__file__).parent))

from flash_dmattn.backends import portable, shapes
from flash_dmattn.loader import Loader, resolver
from old_versions import why_not_traced
from subsets import COLLECTED, is_chosen, names_of
from support import TARGETS, Target

hypothesis.settings.register_profile(
    "suite",
    deadline=None,  # the first call on a device takes far longer than later ones
    max_examples=150,
    derandomize=True,  # --hypothesis-profile=search explores further
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.register_profile(
    "search",
    parent=hypothesis.settings.get_profile("suite"),
    max_examples=2000,
    derandomize=False,
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose backends, and those of the random tests of tests/gpu."""
    parser.addoption(
        "--all-backends",
        action="store_true",
        help="run every test for every backend that is available, also for those of subsets.py",
    )
    parser.addoption("--seed", type=int, help="repeat a random test of tests/gpu with its seed")
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run the loops of tests/gpu that look for races in full",
    )


@pytest.fixture
def make_loader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loader]:
    """Return a function that installs an undecided loader for the duration of the test. It differs
    from the real loader in the given arguments and in having no entry points.
    """

    def make(**others: Any) -> Loader:
        made = Loader(**{"entry_points": list, **others})
        monkeypatch.setattr(resolver, "default_loader", made)
        return made

    return make


@pytest.fixture
def with_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a slower path to replace a pack, also in a release run, which forbids it."""
    monkeypatch.delenv("FLASH_DMATTN_FALLBACK", raising=False)


# Parallel test processes and their children must not compete for the cores. Tests of threads ask
# for their own.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))
if WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


MOST_KEPT = 2**31  # bytes


# Matches the names of tests that trace calls by torch.compile or torch.export. Other tests that
# compile or export are in modules without torch.
TRACED = re.compile("compil|export|inductor")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that a slow backend runs only on request, or that an old torch can't trace."""
    config.stash[COLLECTED] = names_of(items)
    if reason := why_not_traced():
        for item in items:
            if TRACED.search(item.name) and hasattr(getattr(item, "module", None), "torch"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--all-backends"):
        return
    left_out = [item for item in items if not is_chosen(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_chosen(item)]


@pytest.hookimpl(trylast=True)  # a test may have patched torch
def pytest_runtest_teardown() -> None:
    """Free torch's cached memory after a large test: test processes share the GPU's memory."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()


def _why_absent(wanted: Target) -> str | None:
    if wanted.device == "cuda" and not torch.cuda.is_available():
        return "no GPU"
    if wanted.backend in portable.NAMES:
        return portable.why_unavailable(wanted.backend, wanted.device)
    return None


# An absent target gets no tests; the summary names it and the reason.
ABSENT = {target: reason for target in TARGETS if (reason := _why_absent(target)) is not None}
PRESENT = tuple(target for target in TARGETS if target not in ABSENT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the targets without tests, also with --quiet."""
    for target, reason in ABSENT.items():
        terminalreporter.write_line(f"left out: {target}: {reason}")


@pytest.fixture(params=PRESENT, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """Return a target that is present: a device and a backend."""
    wanted: Target = request.param
    return wanted


@pytest.fixture(params=[t for t in PRESENT if t.is_pack], ids=str)
def pack_target(request: pytest.FixtureRequest) -> Target:
    """Return a target with a kernel pack."""
    wanted: Target = request.param
    return wanted


@pytest.fixture(params=[t for t in PRESENT if t.backend != "reference"], ids=str)
def kernel_target(request: pytest.FixtureRequest) -> Target:
    """Return a target other than the reference backend."""
    wanted: Target = request.param
    return wanted


@pytest.fixture(
    params=[t for t in PRESENT if t.backend == "triton" or t == ("cuda", "cuda")], ids=str
)
def unread_target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Return a target that does not read cu_seqlens, since reading them would wait for the device.
    On the CPU, Triton's interpreter is made to skip the check too.
    """
    wanted: Target = request.param
    if wanted.device == "cpu":
        check = shapes._check
        monkeypatch.setattr(
            shapes, "_check", lambda r, inputs, _, *told: check(r, inputs, False, *told)
        )
    return wanted


@pytest.fixture(params=[t for t in PRESENT if t.backend == "triton"], ids=str)
def triton_device(request: pytest.FixtureRequest) -> str:
    """Return a device type that runs Triton's kernels."""
    wanted: Target = request.param
    return wanted.device
