# SPDX-License-Identifier: BSD-3-Clause
"""Known defects of workflows, which a rehearsal must find when they are put back.

Each is a list of text substitutions in the rehearsed repository, never in this one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rehearsal.act import JobsError
from release.project import ReleaseError


@dataclass(frozen=True)
class Defect:
    """A defect, the shortest run that shows it, and the failure of that run.

    Attributes:
        what: the description of the defect.
        workflow: the workflow to run.
        job: its job to run, with its dependencies.
        fails: the only job that fails, by its caller and its id.
        says: a pattern in the output of that job.
        changes: a file, a text that occurs once in it, and the defective text.
    """

    what: str
    workflow: str
    job: str
    fails: tuple[str, str]
    says: str
    changes: tuple[tuple[str, str, str], ...]


WHEELS = ".github/workflows/wheels.yml"
DEFECTS = {
    "one-artifact": Defect(
        what="a pattern that matches one artifact gives files, not a folder of its name",
        workflow="ci",
        job="wheels",
        fails=("wheels", "wheels"),
        says=r"has no manifest\.json",
        changes=(
            (WHEELS, '--output "packs/$ARTIFACT"', "--output packs"),
            (
                WHEELS,
                "          path: packs\n          merge-multiple: true\n",
                "          path: packs\n",
            ),
        ),
    ),
    "unreadable-checkout": Defect(
        what="git refuses what belongs to another user, and the packs come of no commit",
        workflow="release",
        job="wheels",
        fails=("wheels", "wheels"),
        says="comes of no commit",
        changes=(
            ("scripts/in_image", '  git config --global --add safe.directory "$PWD"\n', ""),
            (
                "release/project.py",
                '    if not is_checkout(root):\n        return ""\n    head = _git(',
                '    try:\n        _git(root, "rev-parse", "HEAD")\n'
                '    except ReleaseError:\n        return ""\n    head = _git(',
            ),
        ),
    ),
    "no-safe-directory": Defect(
        what="git refuses what belongs to another user",
        workflow="ci",
        job="wheels",
        fails=("wheels", "packs"),
        says=r"has a \.git, but git .* failed: fatal: detected dubious ownership",
        changes=(("scripts/in_image", '  git config --global --add safe.directory "$PWD"\n', ""),),
    ),
    "no-digests": Defect(
        what="images whose digests are not committed are not looked up",
        workflow="ci",
        job="wheels",
        fails=("wheels", "packs"),
        says="no digest of .* is committed, or was looked up",
        changes=(
            (WHEELS, "|| '--resolve-digests' }}", "|| '' }}"),
            (WHEELS, 'release matrix "$DIGESTS" ', 'release matrix ${DIGESTS:+"$DIGESTS"} '),
        ),
    ),
}


def put_back(defect: Defect, root: Path) -> None:
    """Change the files of a repository.

    Raises:
        ReleaseError: a file does not have the text to replace exactly once.
    """
    for name, present, former in defect.changes:
        path = root / name
        text = path.read_text()
        if text.count(present) != 1:
            raise ReleaseError(
                f"{name} has {text.count(present)} times {present!r}, not once: "
                "rehearsal/defects.py is to be brought up to date"
            )
        path.write_text(text.replace(present, former))


def check_found(defect: Defect, failure: JobsError | None) -> None:
    """Check that the defect made only its job fail, with the expected output.

    Raises:
        ReleaseError: the run passed, or failed for another reason.
    """
    if failure is None:
        raise ReleaseError(f"nothing failed, although {defect.what}")
    if failure.jobs != {defect.fails}:
        raise ReleaseError(f"not {'/'.join(defect.fails)} alone failed: {failure}")
    if not any(re.search(defect.says, line) for line in failure.lines):
        raise ReleaseError(f"{'/'.join(defect.fails)} failed, but did not say {defect.says!r}")
