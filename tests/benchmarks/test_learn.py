# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of learning at a tiny size: every mark of every method, and the picture."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import learn, train
from benchmarks.__main__ import main
from benchmarks.results import Results, read
from benchmarks.tables import LEARN_QUANTITIES
from benchmarks.text import load_corpus

TINY = ["learn", "--device", "cpu", "--length", "64", "--tokens", "128", "--window", "8"]
TINY += ["--layers", "1"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("learn") / "learn.json"
    assert main([*TINY, "--minutes", "0.005", "--marks", "3", "--output", str(path)]) == 0
    return read(path)


def test_losses_are_noted_at_every_mark(results: Results) -> None:
    assert [case["seconds"] for case in results.cases.values()] == pytest.approx([0.1, 0.2, 0.3])
    assert results.values.keys() == {
        (case, method, quantity)
        for case in results.cases
        for method in train.METHODS
        for quantity in LEARN_QUANTITIES
    }


def test_losses_are_of_ever_more_steps(results: Results) -> None:
    for method in train.METHODS:
        steps = [results.values[case, method, "steps"] for case in results.cases]
        assert 1 <= steps[0] < steps[1] < steps[2]
    assert all(math.isfinite(value) for value in results.values.values())


@pytest.mark.parametrize("name", train.METHODS)
def test_a_model_learns_text(name: str) -> None:
    case = replace(learn.CPU.shape, batch=2, length=64, window=8)
    learner = learn.Learner(name, case, 1, load_corpus(None, minimum=100))
    before = learner.evaluate()
    for _ in range(20):
        learner.step()
    assert learner.steps == 20
    assert learner.evaluate() < before


def test_the_losses_are_drawn(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "learn.json"
    results.write(path)
    assert main(["show", str(path), "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").exists()


def test_a_text_that_is_too_short_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "learn.json"
    too_long = str(1 << 40)
    sizes = ["--length", too_long, "--minutes", "0.01", "--marks", "1"]
    assert main([*TINY, *sizes, "--contestants", "flash_dmattn", "--output", str(path)]) == 0
    (record,) = read(path).records
    assert record.value is None
    assert too_long in str(record.reason) or "must be at least" in str(record.reason)
