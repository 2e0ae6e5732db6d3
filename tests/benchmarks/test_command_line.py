# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's commands at tiny sizes: the workloads they choose, write and show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine, sets, tables
from benchmarks.__main__ import VIEWS, main
from benchmarks.results import read

TINY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--length", "64", "--window", "8"]
SELECTION = ["all", "--quantities", "selection"]
BRIEF = [*TINY, "--device", "cpu", "--seconds", "0.003"]


def measured(path: Path) -> set[tuple[str, str, str]]:
    return set(read(path).values)


@pytest.mark.parametrize(
    ("view", "cases", "expected"),
    [
        ("forward", "masked-4k", {"selection", "forward", "forward_with_mask"}),
        ("backward", "masked-4k", {"selection", "backward", "forward_backward", "end_to_end"}),
        ("all", "decode-*", set(tables.DECODE_QUANTITIES)),
    ],
)
def test_view_measures_its_quantities(
    view: str, cases: str, expected: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "results.json"
    chosen = ["--cases", cases, "--contestants", "intervals", "key_mask"]
    assert main([view, *BRIEF, *chosen, "--output", str(path)]) == 0
    found = measured(path)
    assert {quantity for *_, quantity in found} == expected
    ours = "key_mask" if cases == "decode-*" else "intervals"
    assert {quantity for _, who, quantity in found if who == ours} == expected


def test_memory_is_a_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "in_fresh_process", lambda function, *rest: 7)
    path = tmp_path / "results.json"
    chosen = ["--cases", "masked-4k", "--contestants", "intervals"]
    chosen += ["--quantities", "memory_forward"]
    assert main(["memory", *BRIEF, *chosen, "--output", str(path)]) == 0
    assert measured(path) == {("masked-4k", "intervals", "memory_forward")}


def test_command_writes_what_show_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "cpu.json"
    chosen = ["--cases", "masked-4k", "growth-*", "--quantities", "forward", "backward"]
    entered = ["--contestants", "intervals", "dense_flash", "sdpa"]
    written = ["--commit", "abc", "--note", "a shared machine", "--output", str(path)]
    plots = ["--plot", str(tmp_path)]
    assert main(["all", *BRIEF, "--dtype", "float16", *chosen, *entered, *written, *plots]) == 0
    printed = capsys.readouterr()
    assert "10/10" in printed.err
    environment = read(path).environment
    assert environment["commit"] == "abc"
    assert {"date", "pack", "torch", "cpu", "threads", "load", "measurement"} <= set(environment)
    for name in ("times-forward", "times-backward", "growth-forward", "growth-backward"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown == printed.out
    assert "masked-4k (B1 H4 Hk2 D16 N64 w8, float16, causal)" in shown
    assert "growth: forward, plan included, ms" in shown
    assert "a shared machine" in shown
    assert main(["show", str(path), "--bars"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| intervals +\| top-w keys of each query +\|", shown)
    assert "| masked-4k: intervals, forward, best form of SDPA by ours " in shown
    assert "not measured" in shown


def test_failing_case_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_inputs = engine.make_inputs

    def fail_for_one(case: Any) -> Any:
        if case.name == "growth-1k":
            raise torch.OutOfMemoryError("no room")
        return make_inputs(case)

    monkeypatch.setattr(engine, "make_inputs", fail_for_one)
    chosen = ["--cases", "growth-1k", "growth-2k", "--contestants", "intervals"]
    assert main([*SELECTION, *BRIEF, *chosen]) == 0
    shown = capsys.readouterr().out
    assert "intervals, all: no room" in shown
    assert "growth-2k (B1" in shown


def test_interrupted_run_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_inputs = engine.make_inputs

    def interrupt_at_the_second(case: Any) -> Any:
        if case.name == "growth-2k":
            raise KeyboardInterrupt
        return make_inputs(case)

    monkeypatch.setattr(engine, "make_inputs", interrupt_at_the_second)
    path = tmp_path / "results.json"
    chosen = ["--cases", "growth-1k", "growth-2k", "--contestants", "intervals"]
    assert main([*SELECTION, *BRIEF, *chosen, "--output", str(path)]) == 0
    assert "interrupted" in capsys.readouterr().err
    assert measured(path) == {("growth-1k", "intervals", "selection")}


def test_spent_budget_leaves_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--cases", "masked-4k", "--contestants", "intervals", "--budget", "0"]
    assert main([*SELECTION, *BRIEF, *chosen]) == 0
    assert "not measured: the time budget of 0 s was spent" in capsys.readouterr().out


def test_lists_name_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "--device", "cpu", "--set", "legacy-forward", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("length-4096", "sdpa_efficient", "forward_with_mask"):
        assert name in shown


# --- what is chosen


def test_cases_are_chosen_by_pattern_and_cut_down() -> None:
    chosen = sets.chosen_workloads(
        sets.GPU,
        "cuda:1",
        patterns=["growth-*", "decode-64k"],
        contestants=["key_mask", "flex"],
        quantities=["forward"],
        window=16,
    )
    growth = [f"growth-{n}k" for n in (8, 16, 32, 64)]
    # Compiled contestants come last. Decoding has no FlexAttention.
    assert [w.name for w in chosen] == [*growth, "decode-64k", *growth]
    assert [w.contestants for w in chosen] == [("key_mask",)] * 5 + [("flex",)] * 4
    assert all(w.quantities == ("forward",) and w.shape.device == "cuda:1" for w in chosen)
    assert all(w.shape.window == 16 for w in chosen)
    # The two halves of a case appear as one case in the results.
    assert sets.plain_cases(chosen)["growth-8k"]["contestants"] == ["key_mask", "flex"]


def test_a_window_is_not_given_to_dense_attention() -> None:
    chosen = sets.chosen_workloads(sets.CPU, "cpu", window=16)
    assert {w.shape.window for w in chosen} == {None, 16}
    assert {w.name for w in chosen if w.shape.window is None} == {
        name for name in sets.CPU if name.startswith("dense")
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sets.SET_NAMES)
def test_sets_name_what_there_is(name: str, device: str) -> None:
    chosen = sets.workload_set(name, device)
    for workload in chosen.values():
        # Every contestant of a workload is entered; a bad fit drops none silently.
        entered = sets.chosen_workloads(chosen, device, [workload.name])
        assert {c for w in entered for c in w.contestants} == set(workload.contestants)
        assert set(workload.quantities) <= tables.QUANTITIES.keys()


def test_sweeps_are_those_of_the_earlier_scripts() -> None:
    forward = sets.workload_set("legacy-forward", "cuda")
    backward = sets.workload_set("legacy-backward", "cuda")

    def swept(found: sets.WorkloadSet, sweep: str, field: str) -> list[int]:
        return [getattr(w.shape, field) for n, w in found.items() if n.rpartition("-")[0] == sweep]

    powers = [1 << n for n in range(20)]
    assert swept(forward, "length", "length") == powers[8:16]
    assert swept(backward, "length", "length") == powers[8:15]
    assert swept(forward, "decode", "length") == powers[8:]
    assert swept(forward, "window", "window") == powers[5:16]
    assert swept(backward, "window", "window") == powers[5:15]
    assert swept(backward, "dim", "head_dim") == [32, 64, 96, 128, 192, 256]
    assert swept(forward, "batch", "batch") == [1, 2, 4, 8]
    heads = [(w.shape.heads, w.shape.kv_heads) for n, w in forward.items() if "heads-" in n]
    assert heads == [(1, 1), (2, 1), (4, 1), (8, 2)]
    assert {w.shape.length for n, w in forward.items() if "window-" in n} == {32768}
    assert {w.shape.length for n, w in backward.items() if "dim-" in n} == {16384}
    assert all(w.shape.per_query for w in (*forward.values(), *backward.values()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all", "--device", "cpu", "--cases", "heads3-*"], "no case matches 'heads3-*'; cases"),
        (["forward", "--device", "cpu", "--contestants", "nobody"], "invalid choice: 'nobody'"),
        (["forward", "--device", "cpu", "--quantities", "speed"], "invalid choice: 'speed'"),
        (["forward", "--device", "cpu", "--heads", "3", "--kv-heads", "2"], "heads is 3; it must"),
        (["forward", "--heads", "0"], "0 is less than 1"),
        (
            [
                *("all", "--device", "cpu", "--cases", "dense-4k-float32"),
                *("--contestants", "intervals"),
            ],
            "none of dense-4k-float32 measures intervals",
        ),
        (["show", "missing.json"], "missing.json"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["gpu", "map", "equivalence", "generate"])
def test_missing_gpu_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([command, "--device", "cuda"])
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*VIEWS, "equivalence", "generate", "show", "render"):
        with pytest.raises(SystemExit) as exit_info:
            main([name, "--help"])
        assert exit_info.value.code == 0
        assert VIEWS.get(name, ("usage",))[0] in capsys.readouterr().out
