# SPDX-License-Identifier: BSD-3-Clause
"""Rehearsals with a reintroduced defect, and without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from release_files import CPU, make_wheel

from rehearsal.__main__ import act_options
from rehearsal.act import JobsError, expected
from rehearsal.checks import check_notes
from rehearsal.defects import DEFECTS, check_found, put_back
from rehearsal.machine import Machine
from rehearsal.stored import storing
from release.assets import release_notes
from release.project import ROOT, ReleaseError
from release.tag import has_gpu_tests

# --- with GPUs, and without


def test_a_repository_can_have_no_gpu(tmp_path: Path) -> None:
    with storing() as server:
        machine = Machine(tmp_path, "http://127.0.0.1:1", 1001, server)
    without, options = (act_options(machine, {}, gpu=gpu) for gpu in (False, True))
    assert not any("GPU_RUNNERS" in option for option in without)
    (runners,) = [option for option in options if option.startswith("GPU_RUNNERS=")]
    assert has_gpu_tests(runners.partition("=")[2], "2.0.0")


def test_the_text_of_a_release_tells_whether_it_was_tested(tmp_path: Path) -> None:
    with storing() as server:
        machine = Machine(tmp_path, "http://127.0.0.1:1", 1001, server)
    notes = machine.hub / "releases" / "v1" / "notes.md"
    notes.parent.mkdir(parents=True)
    wheel = make_wheel(tmp_path, packs=(CPU,))
    notes.write_text(release_notes("x", [wheel], []))
    check_notes(machine, "v1", gpus=False)
    with pytest.raises(ReleaseError, match="tests on GPUs"):
        check_notes(machine, "v1", gpus=True)


# --- reintroduced defects


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_can_be_put_back(name: str, tmp_path: Path) -> None:
    """Each defect applies to the current files, so that a rehearsal reproduces it."""
    defect = DEFECTS[name]
    for path in {path for path, _, _ in defect.changes}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    put_back(defect, tmp_path)
    for path, present, _ in defect.changes:
        assert present not in (tmp_path / path).read_text()
        if path.endswith(".py"):
            compile((tmp_path / path).read_text(), path, "exec")
    with pytest.raises(ReleaseError, match="is to be brought up to date"):
        put_back(defect, tmp_path)
    assert defect.fails in set(expected(ROOT, defect.workflow))
    assert defect.job == defect.fails[0]


def test_a_defect_is_found_where_its_job_alone_fails_and_says_why() -> None:
    defect = DEFECTS["no-digests"]
    says = ["no digest of quay.io/a is committed, or was looked up"]
    check_found(defect, JobsError("x", [("wheels", "packs")], says))
    for failure, message in (
        (None, "nothing failed, although"),
        (JobsError("x", [("wheels", "packs")], ["no space left"]), "but did not say"),
        (JobsError("all", [("wheels", "packs"), ("wheels", "sdist")], says), "alone failed: all"),
        (JobsError("none", [], says), "alone failed: none"),
    ):
        with pytest.raises(ReleaseError, match=message):
            check_found(defect, failure)
