# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of generation at a tiny size: the same tokens for all, and whose time is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flash_dmattn.bench import generate, results  # noqa: E402
from flash_dmattn.bench.__main__ import main  # noqa: E402


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    sizes = ["--length", "48", "--window", "8", "--new-tokens", "3", "--layers", "1"]
    arguments = ["generate", "--device", "cpu", *sizes, "--repeats", "1", "--plot", str(folder)]
    assert main([*arguments, "--output", str(folder / "generate.json")]) == 0
    return folder / "generate.json"


def test_all_methods_are_measured_on_one_model(path: Path) -> None:
    records = results.records_of(json.loads(path.read_text()))
    assert {r.reason for r in records} == {None}
    assert {(r.contestant, r.quantity) for r in records} == {
        (method, quantity) for method in generate.METHODS for quantity in generate.QUANTITIES
    }
    # Of the logits that the first generated token is chosen by.
    assert all(r.difference is not None and r.difference < 1e-4 for r in records)


def test_attention_is_a_part_of_the_whole(path: Path) -> None:
    records = results.records_of(json.loads(path.read_text()))
    for method in generate.METHODS:
        found = {r.quantity: r.value for r in records if r.contestant == method}
        for phase in ("prefill", "decode"):
            assert 0 < found[f"{phase}_attention"] < found[phase]
        parts = found["prefill_attention"] + found["decode_attention"]
        assert found["attention"] == pytest.approx(parts, rel=1e-4)


def test_results_are_shown_and_drawn(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path), "--bars"]) == 0
    shown = capsys.readouterr().out
    assert "prefill, attention ms" in shown
    assert "generate-16k: flash_dmattn, time in attention" in shown
    assert (path.parent / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_projections_are_no_attention() -> None:
    class Stamps:
        """Moments that are an hour apart."""

        moment = 0.0

        def now(self) -> float:
            self.moment += 1.0
            return self.moment

        def seconds(self, span: tuple[float, float]) -> float:
            return span[1] - span[0]

    setting = generate.Setting(
        generate.Case("a", heads=2, kv_heads=1, head_dim=8, length=8, window=4), 1, 1, 1
    )
    model = generate.make_model(setting, generate.METHODS["eager"])
    clock = generate.AttentionClock(Stamps())
    clock.watch(model)
    model(torch.ones(1, 8, dtype=torch.long))
    model(torch.ones(1, 8, dtype=torch.long))
    # Twelve moments in a call: of the model, its one attention, and four projections in that.
    assert clock.seconds() == {
        "prefill": 11.0,
        "prefill_attention": 9.0 - 4.0,
        "decode": 11.0,
        "decode_attention": 9.0 - 4.0,
        "attention": 10.0,
        "generate": 22.0,
    }
