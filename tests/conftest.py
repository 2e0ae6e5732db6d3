# SPDX-License-Identifier: BSD-3-Clause
"""What every test module shares: where calls run, and how hypothesis runs."""

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

# So that test modules import their helpers whatever pytest's import mode.
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
    derandomize=True,  # --hypothesis-profile=search looks further
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
    """Add what chooses backends, and what the random tests of tests/gpu read."""
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
    """Return a function that gives this process a loader that has decided nothing, until the test
    ends; it is the real one but for the arguments that are given, and knows no entry points.
    """

    def make(**others: Any) -> Loader:
        made = Loader(**{"entry_points": list, **others})
        monkeypatch.setattr(resolver, "default_loader", made)
        return made

    return make


@pytest.fixture
def with_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slower path replace a pack, also in a run that forbids it, as that of a release."""
    monkeypatch.delenv("FLASH_DMATTN_FALLBACK", raising=False)


# Test processes side by side, and what they start, must not fight for the cores; tests of threads
# ask for their own.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))
if WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


MOST_KEPT = 2**31  # bytes


# Tests of calls that torch.compile or torch.export traces, by their names; what else compiles or
# exports, such as a toolkit or a library, is tested by modules without torch.
TRACED = re.compile("compil|export|inductor")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a slow backend runs only when asked, and what an old torch does not trace."""
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
    """Give back what torch keeps after a large test: test processes share the GPU's memory."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()


def _why_absent(wanted: Target) -> str | None:
    if wanted.device == "cuda" and not torch.cuda.is_available():
        return "no GPU"
    if wanted.backend in portable.NAMES:
        return portable.why_unavailable(wanted.backend, wanted.device)
    return None


# No test is made of a target that is not here; the summary names the target and the reason.
ABSENT = {target: reason for target in TARGETS if (reason := _why_absent(target)) is not None}
PRESENT = tuple(target for target in TARGETS if target not in ABSENT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say for which targets no test was made, also with --quiet."""
    for target, reason in ABSENT.items():
        terminalreporter.write_line(f"left out: {target}: {reason}")


@pytest.fixture(params=PRESENT, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """A device and a backend that are here."""
    wanted: Target = request.param
    return wanted


@pytest.fixture(params=[t for t in PRESENT if t.is_pack], ids=str)
def pack_target(request: pytest.FixtureRequest) -> Target:
    """As target, for tests of what only kernel packs do."""
    wanted: Target = request.param
    return wanted


@pytest.fixture(params=[t for t in PRESENT if t.backend != "reference"], ids=str)
def kernel_target(request: pytest.FixtureRequest) -> Target:
    """As target, for tests of what the plain formula has no need of."""
    wanted: Target = request.param
    return wanted


@pytest.fixture(
    params=[t for t in PRESENT if t.backend == "triton" or t == ("cuda", "cuda")], ids=str
)
def unread_target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target that believes the cu_seqlens, as reading them would wait for its device: also
    Triton's interpreter, which is made to.
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
    """The name of a kind of device that Triton's kernels run on."""
    wanted: Target = request.param
    return wanted.device
