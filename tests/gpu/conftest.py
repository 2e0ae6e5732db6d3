# SPDX-License-Identifier: BSD-3-Clause
"""Random seeds that differ from run to run, and the available GPUs."""

from __future__ import annotations

import secrets

import pytest
import torch

from conftest import PRESENT
from support import Target

from .kinds import KINDS


def _mark(target: Target) -> tuple[pytest.MarkDecorator, ...]:
    """Mark the cpu pack as slow: tests/test_drawn.py draws calls of every kind for its kernels."""
    return () if target.device == "cuda" or target.has_kernels_of_gpu else (pytest.mark.slow,)


@pytest.fixture(
    params=[pytest.param(t, marks=_mark(t), id=str(t)) for t in PRESENT if t.is_pack],
)
def pack_target(request: pytest.FixtureRequest) -> Target:
    """Return a target with a pack, like the fixture of all tests, for GPU kernels."""
    wanted: Target = request.param
    return wanted


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return --seed, or a new seed in every run; the report of a failure shows it."""
    given: int | None = request.config.getoption("--seed")
    number = secrets.randbelow(2**31) if given is None else given
    print(f"the same numbers again: pytest --seed={number}")
    return number


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return the name of each kind of call."""
    name: str = request.param
    return name


@pytest.fixture
def gpu() -> str:
    """Return the device of tests that need a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda"


@pytest.fixture
def two_gpus(gpu: str) -> tuple[str, str]:
    """Return the current device and another one."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    return f"{gpu}:0", f"{gpu}:1"
