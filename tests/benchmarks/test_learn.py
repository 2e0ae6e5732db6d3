# SPDX-License-Identifier: BSD-3-Clause
"""The learning study at a tiny size: variants, resumption, probes, tables and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pages
from benchmarks.__main__ import main
from benchmarks.learning import corpora, report
from benchmarks.learning.probes import accuracy, make_probes
from benchmarks.learning.runs import Setting, Training, run
from benchmarks.learning.variants import default_names, make_attention, make_model

SMALL = {"length": 256, "batch": 1, "layers": 2, "width": 64, "learning_rate": 3e-3}
TINY = ["learn", "--device", "cpu", "--length", "256", "--batch", "1", "--layers", "2"]
TINY += ["--width", "64"]


@pytest.fixture(scope="module")
def corpus() -> corpora.Corpus:
    return corpora.load("code", ("tabulate", "numpy"))


@pytest.fixture
def few_packages(monkeypatch: pytest.MonkeyPatch, corpus: corpora.Corpus) -> None:
    monkeypatch.setattr(corpora, "load", lambda _: corpus)


def setting(variant: str, **changed: Any) -> Setting:
    return Setting(variant, "code", **{"seed": 0, "seconds": None, "steps": 4, **SMALL, **changed})


@pytest.mark.parametrize("variant", [*default_names(256), "dense-unnormed"])
def test_every_variant_learns_and_sees_nothing_later(variant: str, corpus: corpora.Corpus) -> None:
    training = Training(setting(variant, steps=12), corpus, "cpu")
    while training.progress < 1:
        training.advance()
    losses = [bits for *_, bits in training.curve]
    assert losses[-1] < losses[0] - 0.3
    text = corpus.held_out[:200].long()[None]
    changed = text.clone()
    changed[0, 150:] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            training.model(text)[:, :150], training.model(changed)[:, :150], atol=1e-4, rtol=1e-4
        )


def test_a_run_that_stopped_goes_on_as_if_it_had_not(
    tmp_path: Path, corpus: corpora.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    wanted = setting("last-8+top-8")
    assert run(wanted, corpus, "cpu", whole)
    for steps in (1, 2):
        clock = iter([0.0] * (1 + steps) + [9.0, 9.0])
        monkeypatch.setattr("benchmarks.learning.runs.time.monotonic", clock.__next__)
        assert not run(wanted, corpus, "cpu", parts, until=5.0)
        monkeypatch.undo()
        assert [path.suffix for path in parts.iterdir()] == [".pt"]
    assert run(wanted, corpus, "cpu", parts)
    assert [path.suffix for path in parts.iterdir()] == [".json"]
    first, second = (json.loads((folder / wanted.file).read_text()) for folder in (whole, parts))
    for key in ("steps", "bits_per_byte", "by_position", "copy", "recall", "needle"):
        assert first[key] == second[key]
    with pytest.raises(ValueError, match="another run"):
        run(setting("last-8+top-8", width=128), corpus, "cpu", parts)


def test_what_probes_ask_for_stands_in_their_text(corpus: corpora.Corpus) -> None:
    probes = make_probes(corpus.held_out, 1024)
    assert [(probe.kind, probe.size) for probe in probes] == [
        *(("copy", size) for size in ("16", "64", "256", "768")),
        *(("recall", size) for size in ("4", "16", "64")),
        *(("needle", size) for size in ("10%", "50%", "90%")),
    ]
    for probe in probes:
        assert probe.text.shape == probe.scored.shape == (4, 1025)
        for text, scored in zip(probe.text, probe.scored, strict=True):
            # The last bytes asked for, with some context before them, occur earlier in the text.
            past = int(scored.nonzero().max()) + 1
            first = past - {"copy": 16, "recall": 9, "needle": 25}[probe.kind]
            asked = bytes(text[first:past].tolist())
            assert bytes(text[:first].tolist()).count(asked) == 1, probe


def test_accuracies_count_scored_bytes(corpus: corpora.Corpus) -> None:
    for probe in make_probes(corpus.held_out, 512):
        texts = iter(probe.text)

        def foretell(_: torch.Tensor, texts: Any = texts) -> torch.Tensor:
            return torch.nn.functional.one_hot(next(texts)[1:].long(), 256)[None]

        def never(text: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*text.shape, 256)  # argmax of equal logits: byte 0

        assert accuracy(foretell, probe) == 1
        assert accuracy(never, probe) == 0


@pytest.mark.parametrize("name", corpora.CORPORA)
def test_a_text_is_the_same_at_every_reading(name: str) -> None:
    packages = ("tabulate", "numpy", "no_such_package")
    first, second = (corpora.load(name, packages) for _ in range(2))
    assert first.about == second.about
    assert first.about["packages"].keys() == {"tabulate", "numpy"}
    assert min(first.about["train_bytes"], first.about["held_out_bytes"]) > 2000


def test_folders_are_held_out_whole_and_nothing_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(60):
        folder = tmp_path / "tiny" / f"part{n}"
        folder.mkdir(parents=True)
        for name in ("a", "b"):
            told = f"Module {n} {name}. " + "It is told at length. " * 10
            source = f'def first():\n    """{told}"""\n    return {n}\n'
            (folder / f"{name}.py").write_text(source)
        (folder / "LICENSE.txt").write_text("Everything is allowed.")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(corpora, "_version", lambda _: "1.0")
    for corpus_name, repeated, mark in (("code", 0, "return "), ("prose", 1, "Module ")):
        read = corpora.load(corpus_name, ("tiny",))
        parts = [bytes(part.tolist()).decode() for part in (read.train, read.held_out)]
        assert ["def first" in part for part in parts] == [corpus_name == "code"] * 2
        assert sum(part.count("Everything is allowed") for part in parts) == repeated
        assert sum(part.count("Module ") for part in parts) == 120
        numbers = [{int(t.split()[0]) for t in part.split(mark)[1:]} for part in parts]
        assert sorted(numbers[0] | numbers[1]) == list(range(60))
        assert not numbers[0] & numbers[1]


@pytest.mark.usefixtures("few_packages")
def test_command_trains_shows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    chosen = ["--variants", "dense", "sliding-16", "--seeds", "0", "1", "--output", str(runs)]
    assert main([*TINY, *chosen, "--steps", "2", "--minutes", "0"]) == 3
    assert not list(runs.iterdir())
    assert main([*TINY, *chosen, "--steps", "2"]) == 0
    assert main([*TINY, *chosen, "--seconds", "0.05"]) == 0
    shown = capsys.readouterr().out
    files = sorted(runs.glob("*.json"))
    assert len(files) == 8
    assert "code, 2 steps each, 1 x 256 tokens a step, 2 layers of width 64" in shown
    assert main(["learn", "--table", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| `sliding-16`") == 4
    assert "0.05 seconds each" in shown
    pytest.importorskip("matplotlib")
    assert main(["learn", "--table", *map(str, files), "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "learning.png").exists()
    read = report.read(files)
    with pytest.raises(ValueError, match="two runs are of"):
        report.tables([*read, read[0]])
    elsewhere = {**read[0], "environment": {**read[0]["environment"], "gpu": "another"}}
    with pytest.raises(ValueError, match=r"was run on .* and on another"):
        report.tables([read[1], elsewhere])
    other = {**read[0], "corpus": {**read[0]["corpus"], "sha256": "another"}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="read another text"):
        report.read([*files, tmp_path / "other.json"])


def test_a_page_shows_the_tables_and_the_figure(tmp_path: Path, corpus: corpora.Corpus) -> None:
    folder = tmp_path / "results" / "learning"
    folder.mkdir(parents=True)
    for page in (*pages.PAGES, pages.LEARNING):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("")
    for variant in ("dense", "top-16"):
        assert run(setting(variant, steps=2), corpus, "cpu", folder)
    page = tmp_path / pages.LEARNING
    name = "learning-code-2steps-1x256-2x64"
    names = (name, f"{name}-recall")
    empty = "".join(f"<!-- {name} -->\n<!-- end {name} -->\n" for name in names)
    page.write_text(f"{empty}![what is learned](figures/{name}.png)\n")
    options = ["--root", str(tmp_path), "--results", str(tmp_path / "results")]
    assert main(["render", *options, "--check"]) == 1
    pytest.importorskip("matplotlib")
    assert main(["render", *options]) == 0
    assert main(["render", *options, "--check"]) == 0
    assert page.read_text().count("| `top-16`") == 2
    assert (tmp_path / "docs" / "figures" / f"{name}.png").exists()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--variants", "sparse"], "no attention is called 'sparse'"),
        (["--length", "8"], "--length must be at least 256, got 8"),
        (["--width", "65"], "--width must be a multiple of 64, got 65"),
        (["--seconds", "1", "--steps", "1"], "give --seconds or --steps, not both"),
        (["--layers", "0"], "--layers must be positive, got 0"),
        ([], "name a folder with --output"),
    ],
)
def test_wrong_options_are_refused(
    wrong: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "runs")] if wrong else []
    with pytest.raises(SystemExit):
        main([*TINY, *wrong, *output])
    assert text in capsys.readouterr().err


def test_a_sliding_window_has_its_size() -> None:
    layer = make_attention("sliding-16", 64)
    states = torch.randn(1, 40, 64)
    changed = states.clone()
    changed[0, 3] += 1
    differs = (layer(states) != layer(changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(3, 19))


def test_alibi_falls_with_the_distance() -> None:
    layer = make_attention("alibi", 256)
    query, key, value = torch.randn(3, 2, 40, 4, 64)
    out = layer.attend(query, key, value, layer.key_bias(value))
    back = torch.arange(40)[:, None] - torch.arange(40)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None]
    scores = (-slopes * back).masked_fill(back < 0, -torch.inf)
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=scores)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_layers_take_turns() -> None:
    model = make_model("dense/forgetting", 64, 3, "cpu")
    names = [type(block.attention).__name__ for block in model if hasattr(block, "attention")]
    assert names == ["Dense", "ForgettingAttention", "Dense"]
