# SPDX-License-Identifier: BSD-3-Clause
"""The demo at sizes that take seconds: it writes its outputs and detects errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = ["--context", "96", "--width", "32", "--layers", "1", "--batch", "2"]
TINY += ["--lengths", "32", "64"]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from demo import __main__

    return __main__


def test_demo_trains_writes_its_files_and_succeeds(tmp_path: Path) -> None:
    plot = tmp_path / "results" / "demo.png"
    done = subprocess.run(
        [sys.executable, "-m", "demo", *TINY, "--steps", "6", "--output", str(plot)],
        cwd=EXAMPLES.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    record = json.loads(plot.with_suffix(".json").read_text())
    assert set(record["runs"]) == {"forgetting", "dense"}
    for run in record["runs"].values():
        assert len(run["losses"]) == 6
        assert run["held_out_after"] < run["held_out_before"]
        assert run["step_seconds"] > 0
        assert list(run["layer_seconds"]) == ["32", "64"]
    for line in ("Binary", "held-out loss, after", "time of a training step", "peak extra memory"):
        assert line in done.stdout
    assert "training: 6/6" in done.stderr
    assert "\r" not in done.stderr


@pytest.mark.parametrize("name", ["forgetting", "dense"])
def test_demo_fails_when_a_loss_does_not_fall(
    name: str,
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(runs, *_):  # type: ignore[no-untyped-def]
        for run in runs.values():
            run.losses, run.seconds, run.memory, run.held_out = [5.0], [1.0], [0], [5.0, 4.0]
        runs[name].held_out = [5.0, float("nan")]

    monkeypatch.setattr(demo, "train", train)
    status = demo.main([*TINY, "--steps", "1", "--output", str(tmp_path / "demo.png")])
    assert status == 1
    assert f"the held-out loss of {name} did not fall" in capsys.readouterr().err


def test_demo_reads_other_text(demo: ModuleType, tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"chapter {index} " * 100)
    (tmp_path / "image.png").write_bytes(b"\0" * 10000)
    corpus = demo.load_corpus(tmp_path, minimum=100)
    assert corpus.files + corpus.held_out_files == 40
    assert 0 not in corpus.train
    again = demo.load_corpus(tmp_path, minimum=100)
    assert torch.equal(corpus.train, again.train)
    assert corpus.batch(3, 50, torch.Generator()).shape == (3, 51)


def test_demo_explains_too_little_text(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        demo.main([*TINY, "--text", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "--text" in capsys.readouterr().err
