# SPDX-License-Identifier: BSD-3-Clause
"""Each example runs at sizes that take seconds and prints its proof."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SHARED = {"small_lm.py"}
RUNS = {
    "train_language_model.py": (
        ["--steps", "20", "--context", "128", "--window", "16"],
        [r"Each of 128 queries keeps 16 keys at most", r"blocks\.1\.attention\.A moved by \d+%"],
    ),
    "train_packed.py": (
        ["--steps", "20", "--documents", "6", "--longest", "200", "--window", "16"],
        [
            r"6 documents, \d+ bytes; padded they would be \d+, \d+% of it padding",
            r"Other bytes in the first document change no logit of the others",
            r"gradients differ by \S+ of their norm",
        ],
    ),
    "decode_with_cache.py": (
        ["--prompt", "300", "--tokens", "9", "--window", "40"],
        [r"\d of 9 bytes are the same", r"AttentionCache\(length=309, capacity=40"],
    ),
    "stream_a_million_tokens.py": (
        ["--tokens", "16384", "--chunk", "512", "--window", "32", "--steps", "10"],
        [r"Logits of 3 chunks differ", r"length=16384, capacity=32", r"Eight times the length"],
    ),
    "train_context_parallel.py": (
        ["--steps", "6", "--context", "300", "--window", "16"],
        [r"1 ranks, on \w+: loss", r"gradients differ by \S+ of their norm"],
    ),
    "convert_from_sdpa.py": (
        ["--steps", "15", "--context", "96", "--window", "12"],
        [r"converted: no bias yet, no window", r"The window cost [+-]\d\.\d+"],
    ),
}


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        capture_output=True,
        text=True,
        timeout=600,  # a loaded machine may take many times as long as an idle one
        check=False,
    )


@pytest.mark.parametrize("name", RUNS)
def test_example_runs(name: str) -> None:
    arguments, lines = RUNS[name]
    done = run(name, *arguments)
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if not re.search(line, done.stdout)] == []


@pytest.mark.slow
def test_ranks_share_a_sequence() -> None:
    """The example runs under torchrun."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    name = "train_context_parallel.py"
    arguments, lines = RUNS[name]
    done = subprocess.run(
        [*started, str(FOLDER / name), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    wanted = [lines[0].replace("1 ranks", "2 ranks"), *lines[1:]]
    assert [line for line in wanted if not re.search(line, done.stdout)] == []


def test_every_example_is_run_and_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {*RUNS, *SHARED}
    page = (FOLDER.parent / "docs" / "examples.md").read_text()
    assert [name for name in {*RUNS, *SHARED} if f"examples/{name}" not in page] == []


def test_examples_are_short() -> None:
    lengths = {path.name: path.read_text().count("\n") for path in FOLDER.glob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > 150} == {}


def test_wrong_options_are_refused() -> None:
    done = run("train_packed.py", "--window", "0")
    assert done.returncode != 0
    assert "window_size must be at least 1, got 0" in done.stderr
