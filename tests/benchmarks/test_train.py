# SPDX-License-Identifier: BSD-3-Clause
"""The training benchmark at a tiny size: both models learn and differ in attention alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import train
from benchmarks.__main__ import main
from benchmarks.results import read
from benchmarks.tables import TRAIN_QUANTITIES

CASE = replace(train.CPU.shape, batch=2, length=48, window=8)


def test_both_are_measured_at_each_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.json"
    sizes = ["--lengths", "32", "64", "--tokens", "64", "--window", "8", "--layers", "1"]
    sizes += ["--seconds", "0.01", "--modes", "eager"]
    assert main(["train", "--device", "cpu", *sizes, "--bars", "--output", str(path)]) == 0
    results = read(path)
    assert [case["batch"] for case in results.cases.values()] == [2, 1]
    assert {record.key for record in results.records if record.value} == {
        (case, method, quantity)
        for case in results.cases
        for method in train.METHODS
        for quantity in TRAIN_QUANTITIES
    }
    shown = capsys.readouterr().out
    assert "step ms" in shown
    assert "train-64k: flash_dmattn, train step" in shown


@pytest.mark.parametrize("name", train.METHODS)
def test_a_model_learns(name: str) -> None:
    step = train.make_step(name, CASE, 1)
    losses = [step() for _ in range(10)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    """Blocks compile without a graph break; the records have case names of their own."""
    path = tmp_path / "train.json"
    options = ["--lengths", "32", "--tokens", "64", "--window", "8", "--layers", "1"]
    options += ["--modes", "compiled", "--contestants", "dense", "--output", str(path)]
    assert main(["train", "--device", "cpu", *options]) == 0
    records = read(path).records
    assert [record.reason for record in records if record.reason] == []
    assert {record.key for record in records} == {
        ("train-compiled-0.03125k", "dense", quantity) for quantity in TRAIN_QUANTITIES
    }
    eager, compiled = (train.make_step("flash_dmattn", CASE, 2, mode) for mode in train.MODES)
    losses = torch.tensor([[float(step()) for _ in range(4)] for step in (eager, compiled)])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)


def test_with_every_key_kept_and_no_biases_the_models_are_the_same() -> None:
    masked, dense = (train.make_model(name, replace(CASE, window=48), 2) for name in train.METHODS)
    masked.load_state_dict(dense.state_dict(), strict=False)
    for parameter_name, parameter in masked.named_parameters():
        if parameter_name.endswith("attention.A"):
            torch.nn.init.zeros_(parameter)
    tokens = torch.randint(256, (2, 48))
    torch.testing.assert_close(masked(tokens), dense(tokens), atol=1e-4, rtol=1e-4)
