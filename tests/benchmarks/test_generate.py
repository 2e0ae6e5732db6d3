# SPDX-License-Identifier: BSD-3-Clause
"""The generation benchmark at a tiny size: equal tokens for all methods, and the timed parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import generate  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.results import Record, read  # noqa: E402
from benchmarks.tables import GENERATE_QUANTITIES  # noqa: E402


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    sizes = ["--length", "48", "--window", "8", "--new-tokens", "3", "--layers", "1"]
    arguments = ["generate", "--device", "cpu", *sizes, "--repeats", "1"]
    assert main([*arguments, "--output", str(folder / "generate.json")]) == 0
    return folder / "generate.json"


def measured(path: Path) -> tuple[list[Record], set[str]]:
    """Return the records that hold a number, and the methods that produced them."""
    records = read(path).records
    missing = {(r.contestant, str(r.reason)[:13]) for r in records if r.value is None}
    assert missing <= {("sdpa", "transformers ")}  # some versions give it another mask
    methods = generate.METHODS.keys() - dict(missing)
    return [record for record in records if record.value is not None], methods


def test_all_methods_are_measured_on_one_model(path: Path) -> None:
    records, methods = measured(path)
    assert {(r.contestant, r.quantity) for r in records} == {
        (method, quantity) for method in methods for quantity in GENERATE_QUANTITIES
    }
    # The difference is that of the logits which choose the first generated token.
    assert all(r.difference is not None and r.difference < 1e-4 for r in records)


def test_attention_is_a_part_of_the_whole(path: Path) -> None:
    records, methods = measured(path)
    for method in methods:
        found = {r.quantity: r.value for r in records if r.contestant == method}
        for phase in ("prefill", "decode"):
            assert 0 < found[f"{phase}_attention"] < found[phase]
        parts = found["prefill_attention"] + found["decode_attention"]
        assert found["attention"] == pytest.approx(parts, rel=1e-4)


def test_results_are_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path), "--bars"]) == 0
    shown = capsys.readouterr().out
    assert "prefill, attention ms" in shown
    assert "generate-16k: flash_dmattn, attention, of eager" in shown


def test_a_method_that_computes_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def narrow(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.keep_window_size = 2

    other = generate.METHODS["sdpa"]._replace(adapt=narrow)
    monkeypatch.setitem(generate.METHODS, "sdpa", other)
    sizes = ["--length", "16", "--window", "4", "--new-tokens", "2", "--layers", "1"]
    arguments = ["generate", "--device", "cpu", *sizes, "--contestants", "sdpa"]
    assert main([*arguments, "--output", str(tmp_path / "sdpa.json")]) == 0
    (record,) = read(tmp_path / "sdpa.json").records
    assert record.value is None
    assert re.fullmatch(
        r"transformers [\d.]+\S* computes something else than eager attention: the logits of a "
        r"small model differ by \S+ of the largest",
        str(record.reason),
    )
    assert str(record.reason) in capsys.readouterr().out


def test_no_two_tokens_of_the_prompt_are_alike() -> None:
    shape = generate.Case("a", batch=2, length=100)
    prompt = generate.make_prompt(shape)
    assert prompt.shape == (2, 100)
    assert all(row.unique().numel() == 100 and row.min() > 0 for row in prompt)
