# SPDX-License-Identifier: BSD-3-Clause
"""Rebuilt packs are compared with a release's record."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from release import reproduce
from release.__main__ import main

COMMIT = "c" * 40
IMAGE = "quay.io/cuda@sha256:" + "0" * 64
FILE = "libflash_dmattn_cu13_sm90.so"


def record_of(content: bytes, **changes: Any) -> dict[str, Any]:
    """Return a record of one pack with this content."""
    job = {
        "cuda": "13",
        "machine": platform.machine(),
        "runner": "ubuntu",
        "image": IMAGE,
        "archs": "sm90",
        "head_dims": "64",
        "artifact": f"packs-cu13-{platform.machine()}",
    }
    packs = [{"file": FILE, "sha256": hashlib.sha256(content).hexdigest()}]
    wheel = f"flash_dmattn-2.0.0-cp310-abi3-manylinux_2_28_{platform.machine()}.whl"
    return {
        "schema": 1,
        "commit": COMMIT,
        "source_date_epoch": 1700000000,
        "jobs": {"packs": [job], "wheels": []},
        "files": [
            {"name": "flash_dmattn-2.0.0.tar.gz", "sha256": "a" * 64},
            {"name": wheel, "sha256": "b" * 64, "packs": packs},
        ],
        **changes,
    }


@pytest.fixture
def reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the verb on a record; builds produce the file ``built``."""
    monkeypatch.setattr(reproduce, "commit", lambda: COMMIT)

    def build(command: list[str | Path], cwd: Path, variables: dict[str, str]) -> None:
        (tmp_path / "call.json").write_text(json.dumps([[str(w) for w in command], variables]))
        output = Path(command[-1])
        output.mkdir(parents=True)
        (output / FILE).write_bytes(b"built")

    monkeypatch.setattr(reproduce, "call", build)

    def run(record: object, *arguments: str) -> int:
        path = tmp_path / "record.json"
        path.write_text(json.dumps(record))
        return main(["reproduce", str(path), "--built", str(tmp_path / "built"), *arguments])

    return run


def test_equal_packs_are_the_same(
    reproduced: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduced(record_of(b"built")) == 0
    assert capsys.readouterr().out.startswith("same  ")
    command, variables = json.loads((tmp_path / "call.json").read_text())
    assert command[0].endswith("/scripts/in_image")
    assert command[1:6] == [IMAGE, "python", "-m", "release", "packs"]
    assert command[6:12] == ["--cuda", "13", "--archs", "sm90", "--head-dims", "64"]
    assert variables == {"SOURCE_DATE_EPOCH": "1700000000"}


def test_a_machine_with_the_toolkit_needs_no_image(
    reproduced: Callable[..., int], tmp_path: Path
) -> None:
    assert reproduced(record_of(b"built"), "--here") == 0
    command, _ = json.loads((tmp_path / "call.json").read_text())
    assert command[1:4] == ["-m", "release", "packs"]


def test_another_pack_differs(
    reproduced: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduced(record_of(b"released")) == 1
    done = capsys.readouterr()
    assert done.out.startswith("DIFFERS  ")
    assert f"not what the record says: {FILE}" in done.err


def test_a_pack_that_the_record_lacks_differs(reproduced: Callable[..., int]) -> None:
    record = record_of(b"built")
    record["files"][1]["packs"] = []
    assert reproduced(record) == 1


def test_a_pack_that_was_not_built_again_differs(
    reproduced: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(b"built")
    others = [
        "libflash_dmattn_cpu.so",
        "libflash_dmattn_cu12_sm80.so",
        "libflash_dmattn_cu13_sm80.so",
    ]
    record["files"][1]["packs"] += [{"file": name, "sha256": "d" * 64} for name in others]
    assert reproduced(record) == 1
    assert capsys.readouterr().err.endswith("the record says: libflash_dmattn_cu13_sm80.so\n")


@pytest.mark.parametrize(
    ("record", "arguments", "message"),
    [
        (record_of(b"built", commit="d" * 40), (), f"git checkout {'d' * 40}"),
        (record_of(b"built", schema=2), (), "is no build record of schema 1"),
        ([], (), "is no build record of schema 1"),
        (record_of(b"built"), ("--cuda", "12"), "it has packs of CUDA 13 for"),
    ],
)
def test_what_cannot_be_compared(
    record: object,
    arguments: tuple[str, ...],
    message: str,
    reproduced: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reproduced(record, *arguments) == 1
    assert message in capsys.readouterr().err
