# SPDX-License-Identifier: BSD-3-Clause
"""The artifacts of other jobs, in any number, as a job finds them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from release import wheel
from release.__main__ import main
from release.project import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEXT = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
# A step that downloads by pattern, with the lines of its `with:`.
DOWNLOAD = re.compile(r"uses: actions/download-artifact@.*\n +with:\n((?: {10}.*\n)+)")


def download(artifacts: dict[str, Path], path: Path, *, merge_multiple: bool) -> None:
    """Act as actions/download-artifact for the artifacts that match a pattern.

    Each artifact gets a folder of its name, unless they are merged or there is only one.
    """
    for name, content in artifacts.items():
        target = path if merge_multiple or len(artifacts) == 1 else path / name
        shutil.copytree(content, target, dirs_exist_ok=True)


def uploaded(folder: Path, name: str) -> Path:
    """Return the artifact of a job that built packs, in the layout of its own command line."""
    (output,) = re.findall(r'--output "(packs/\S*)"', TEXT)
    place = folder / name / output.replace("$ARTIFACT", name)
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    assert re.search(r"name: \$\{\{ matrix.artifact }}\n +path: packs/\n", TEXT)
    return folder / name / "packs"


def steps_by_pattern() -> list[tuple[str, str]]:
    return [
        (path.stem, lines)
        for path in WORKFLOWS
        for lines in DOWNLOAD.findall(path.read_text())
        if "pattern:" in lines
    ]


def test_downloads_by_pattern_make_no_folders() -> None:
    found = steps_by_pattern()
    assert {stem for stem, _ in found} == {"release", "wheels"}
    for _, lines in found:
        assert "merge-multiple: true" in lines


@pytest.mark.parametrize("count", [1, 2])
def test_a_wheel_finds_the_packs_of_any_number_of_jobs(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"packs-cu{major}-x86_64" for major in ("12", "13")][:count]
    artifacts = {name: uploaded(tmp_path / "jobs", name) for name in names}
    (lines,) = [lines for stem, lines in steps_by_pattern() if stem == "wheels"]
    merged = "merge-multiple: true" in lines
    download(artifacts, tmp_path / "packs", merge_multiple=merged)
    (packs,) = re.findall(r"release wheel\n.*--packs (\S+)", TEXT)
    # The folders are accepted before any build.
    built = []
    monkeypatch.setattr(wheel, "call", lambda command, **options: built.append(command))
    monkeypatch.chdir(tmp_path)
    folders = [str(path) for path in tmp_path.glob(packs)]
    with pytest.raises(ValueError, match="not enough values"):  # no wheel was made
        main(["wheel", "--output", str(tmp_path / "dist"), "--packs", *folders])
    (command,) = built
    (setting,) = [word for word in command if "PREBUILT_PACKS=" in str(word)]
    taken = setting.partition("PREBUILT_PACKS=")[2].split(";")
    assert sorted(Path(folder).name for folder in taken) == names
