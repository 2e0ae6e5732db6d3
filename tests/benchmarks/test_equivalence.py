# SPDX-License-Identifier: BSD-3-Clause
"""The equivalence protocol: its 72 configurations, and its detection of an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import equivalence
from benchmarks.__main__ import main
from benchmarks.results import read

SHORT = ["equivalence", "--device", "cpu", "--longest", "128"]


@pytest.fixture
def one_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "HEAD_DIMS", (32,))


def test_configurations_are_those_of_the_earlier_scripts() -> None:
    cases = equivalence.configurations("cpu", "bfloat16", 4096)
    assert len({case.name for case in cases}) == 72
    assert {(c.batch, c.heads, c.kv_heads, c.window, c.seed) for c in cases} == {(1, 2, 1, 1024, 0)}
    assert {c.length for c in cases} == {128, 256, 512, 1024, 2048, 4096}
    assert {c.head_dim for c in cases} == {32, 64, 96, 128, 192, 256}
    assert sum(c.causal for c in cases) == 36
    assert all(c.per_query and c.queries is None for c in cases)


@pytest.mark.usefixtures("one_head_dim")
def test_every_tensor_is_within_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "equivalence.json"
    assert main([*SHORT, "--backends", "auto", "reference", "--output", str(path)]) == 0
    results = read(path)
    ratios = equivalence.ratios(results)
    assert {(who, tensor) for _, who, tensor in ratios} == {
        (who, tensor) for who in ("flash_dmattn", "reference") for tensor in equivalence.TENSORS
    }
    assert all(0 < ratio <= 2 for ratio in ratios.values())
    assert equivalence.failures(results) == []
    printed = capsys.readouterr().out
    assert "worst of 2 of 2 configurations" in printed
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("one_head_dim")
@pytest.mark.parametrize("wrong", [1.05, float("nan")])
def test_wrong_result_fails(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = equivalence._ours

    def scaled(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        return wrong * ours(*tensors, **options)

    monkeypatch.setattr(equivalence, "_ours", scaled)
    assert main(SHORT) == 1
    assert "flash_dmattn: the error of" in capsys.readouterr().out


@pytest.mark.usefixtures("one_head_dim")
def test_failing_call_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--backends", "nobody"]) == 1
    assert "d32-n128-causal, nobody:" in capsys.readouterr().out


@pytest.mark.usefixtures("one_head_dim")
def test_spent_budget_is_no_failure_but_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "equivalence.json"
    assert main([*SHORT, "--budget", "0", "--output", str(path)]) == 3
    assert "0 of 2 configurations were measured" in capsys.readouterr().err
    assert all("not measured" in str(r.reason) for r in read(path).records)
