# SPDX-License-Identifier: BSD-3-Clause
"""Random seeds that differ from run to run, and which GPUs there are."""

from __future__ import annotations

import secrets

import pytest
import torch

from conftest import PRESENT
from support import Target

from .kinds import KINDS


def _mark(target: Target) -> tuple[pytest.MarkDecorator, ...]:
    """Mark the cpu pack, of whose own kernels tests/test_drawn.py draws calls of every kind."""
    return () if target.device == "cuda" or target.has_kernels_of_gpu else (pytest.mark.slow,)


@pytest.fixture(
    params=[pytest.param(t, marks=_mark(t), id=str(t)) for t in PRESENT if t.is_pack],
)
def pack_target(request: pytest.FixtureRequest) -> Target:
    """As that of every test, for kernels of GPUs."""
    wanted: Target = request.param
    return wanted


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another one in every run, which the report of a failure shows."""
    given: int | None = request.config.getoption("--seed")
    number = secrets.randbelow(2**31) if given is None else given
    print(f"the same numbers again: pytest --seed={number}")
    return number


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of each kind of call."""
    name: str = request.param
    return name


@pytest.fixture
def gpu() -> str:
    """The device of tests that need a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return "cuda"


@pytest.fixture
def two_gpus(gpu: str) -> tuple[str, str]:
    """The current device, and another one."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    return f"{gpu}:0", f"{gpu}:1"
