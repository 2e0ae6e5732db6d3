# SPDX-License-Identifier: BSD-3-Clause
"""The release's assets beside its distributions, and the conditions that block it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from release_files import CORE, CPU, CU12, CU13, make_sdist, make_wheel

from release import checklist, matrix, tag, targets
from release.__main__ import main
from release.assets import release_notes
from release.distributions import core_metadata, sha256
from release.project import ROOT, ReleaseError, pyproject_value
from release.records import GpuRecord, check_installed, record_of
from release.sbom import bill_of_materials
from release.tag import changes, check_tag, has_gpu_tests, is_pre_release

VERSION = pyproject_value("version")
RUNNERS = '[{"runner": "gpu", "machine": "x86_64", "cuda": "12"}]'
RECORD = {"device": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0", "driver": "580.95"}


def record(wheel: Path, pack: str = "cu13-sm90", **changes: Any) -> GpuRecord:
    fields: dict[str, Any] = {"wheel": wheel.name, "sha256": sha256(wheel), "pack": pack, **RECORD}
    return GpuRecord(**{**fields, **changes})


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    make_sdist(tmp_path / "dist", VERSION)
    make_wheel(tmp_path / "dist", VERSION, packs=(CPU, CU12, CU13))
    return tmp_path / "dist"


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


# --- the assets


def test_assets_are_complete_and_summed(dist: Path, tmp_path: Path) -> None:
    arguments = [str(dist), "--notes", str(tmp_path / "notes.md"), "--commit", "f" * 40]
    assert main(["assets", *arguments, "--repository", "a/b"]) == 0
    assert "gh attestation verify FILE --repo a/b" in (tmp_path / "notes.md").read_text()
    wheel = wheel_in(dist)
    assert {path.name for path in dist.iterdir()} == {
        wheel.name,
        f"{wheel.name}.metadata",
        f"flash_dmattn-{VERSION}.tar.gz",
        f"flash-dmattn-{VERSION}.cdx.json",
        "SHA256SUMS",
    }
    assert (dist / f"{wheel.name}.metadata").read_bytes() == core_metadata(wheel)
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=False)
    assert done.returncode == 0
    assert len((dist / "SHA256SUMS").read_text().splitlines()) == 4


def test_bill_names_the_libraries_and_what_is_linked_into_them(dist: Path) -> None:
    files = sorted(dist.iterdir())
    bill = bill_of_materials(files, "f" * 40, "2030-01-31T00:00:00Z")
    assert bill == bill_of_materials(files, "f" * 40, "2030-01-31T00:00:00Z")
    assert bill["metadata"]["component"]["properties"] == [{"name": "commit", "value": "f" * 40}]
    components = {component["name"]: component for component in bill["components"]}
    assert set(components) == {path.name for path in files}
    wheel = components[wheel_in(dist).name]
    assert wheel["hashes"] == [{"alg": "SHA-256", "content": sha256(wheel_in(dist))}]
    packs = {pack["name"]: pack for pack in wheel["components"]}
    core = packs.pop("_core.abi3.so")
    assert core["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(CORE).hexdigest()}]
    assert [c["name"] for c in core["components"]] == ["nanobind"]
    assert set(packs) == {"libcpu.so", "libcu12.so", "libcu13.so"}
    assert packs["libcu13.so"]["hashes"][0]["content"] == CU13["sha256"]
    linked = [(c["name"], c.get("version")) for c in packs["libcu13.so"]["components"]]
    assert linked == [
        ("libstdc++", None),
        ("libgcc", None),
        ("CUDA runtime (cudart_static)", "13.0"),
    ]
    assert [c["name"] for c in packs["libcpu.so"]["components"]] == ["libstdc++", "libgcc"]
    references = [c["bom-ref"] for c in walk(bill["components"])]
    assert len(references) == len(set(references))


def walk(components: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [c for top in components for c in (top, *walk(top.get("components", [])))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda dist: (dist / "notes.txt").touch(), "holds what is no distribution: notes.txt"),
        (lambda dist: make_wheel(dist, "1.0.0"), "not of version"),
        (lambda dist: next(dist.glob("*.tar.gz")).unlink(), "must hold one sdist and at least one"),
        (lambda dist: wheel_in(dist).unlink(), "must hold one sdist and at least one"),
    ],
)
def test_what_a_release_folder_may_not_be(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    change(dist)
    assert main(["assets", str(dist), "--notes", str(tmp_path / "notes.md")]) == 1
    assert message in capsys.readouterr().err
    assert not (dist / "SHA256SUMS").exists()


# --- GPU tests


def test_gpu_tests_of_other_wheels_do_not_count(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records").mkdir()
    record(wheel_in(dist), sha256="0" * 64).write(tmp_path / "records/h200.json")
    options = ["--notes", str(tmp_path / "notes.md"), "--gpu-records", str(tmp_path / "records")]
    assert main(["assets", str(dist), *options]) == 1
    assert "which is not in this release" in capsys.readouterr().err


def test_a_release_needs_a_gpu_test(
    dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--notes", str(tmp_path / "notes.md"), "--gpu-records", str(tmp_path / "absent")]
    assert main(["assets", str(dist), *options, "--require-gpu"]) == 1
    assert "no GPU test ran these wheels" in capsys.readouterr().err


def test_notes_say_what_did_not_run(dist: Path) -> None:
    files, wheel = sorted(dist.iterdir()), wheel_in(dist)
    notes = release_notes("### Added\n- A thing.", files, [record(wheel)])
    assert notes.startswith("### Added\n- A thing.\n")
    assert "| NVIDIA H200 | 9.0 | cu13-sm90 | 2.11.0 | 580.95 |" in notes
    assert "not run for this release: sm80.**" in notes
    assert sha256(wheel) in notes
    both = [record(wheel), record(wheel, "cu12-sm80")]
    assert "not run for this release" not in release_notes("x", files, both)
    assert "nothing of this release ran on one" in release_notes("x", files, [])


def report(**device: Any) -> dict[str, Any]:
    gpu = {
        "kind": "cuda",
        "name": "NVIDIA H200",
        "capability": [9, 0],
        "text": "cuda:0",
        "pack": {"name": "cu13-sm90"},
        "problem": None,
    }
    return {
        "versions": {"torch": "2.11.0"},
        "cuda": {"driver": "580.95"},
        "devices": [{"kind": "cpu", "pack": {"name": "cpu"}}, {**gpu, **device}],
    }


def test_record_of_a_report(dist: Path) -> None:
    assert record_of(report(), wheel_in(dist)) == record(wheel_in(dist))


def test_no_record_without_a_gpu_or_a_pack(dist: Path) -> None:
    with pytest.raises(ReleaseError, match="no GPU is visible"):
        record_of(report(kind="cpu"), wheel_in(dist))
    with pytest.raises(ReleaseError, match="no pack serves cuda:0: too old"):
        record_of(report(pack=None, problem="too old"), wheel_in(dist))


def test_what_is_installed_must_be_the_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (distribution,) = metadata.distributions(path=[str(tmp_path / "site")])
    check_installed(wheel, distribution)
    (tmp_path / "site/flash_dmattn/__init__.py").write_text('version = "2.0.1"\n')
    with pytest.raises(ReleaseError, match=r"flash_dmattn/__init__\.py differs"):
        check_installed(wheel, distribution)
    (tmp_path / "site/flash_dmattn/packs/manifest.json").unlink()
    with pytest.raises(ReleaseError, match="is not what is installed"):
        check_installed(wheel, distribution)


# --- the tag


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "2.0.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 2.0.0 (2030-01-31)\n\n### Added\n- All.\n\n"
        "## 1.9.0 (2029-01-01)\n\nOld.\n"
    )
    (tmp_path / "conda").mkdir()
    (tmp_path / "conda" / "recipe.yaml").write_text('context:\n  version: "2.0.0"\n')
    (tmp_path / ".github").mkdir()
    (tmp_path / ".github" / "CODEOWNERS").write_text("* @somebody\n")
    images = matrix.images_of(matrix.jobs(targets.load()))
    (tmp_path / ".github" / "images.json").write_text(json.dumps(dict.fromkeys(images, "sha256:")))
    decided = json.loads((ROOT / checklist.DECISIONS).read_text())
    told = dict.fromkeys(decided, "somebody, 2030-01-31")
    (tmp_path / checklist.DECISIONS).write_text(json.dumps(told))
    (tmp_path / "README.md").write_text("# A project\n")
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_tag_of_the_declared_version(tree: Path) -> None:
    assert check_tag("v2.0.0", tree) == "2.0.0"
    assert changes("2.0.0", tree) == ("## 2.0.0 (2030-01-31)", "### Added\n- All.")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("v2.0.1", "", "", r"the tag is 'v2.0.1', but pyproject.toml declares \"2.0.0\""),
        ("2.0.0", "", "", r"the tag of that version is v2.0.0"),
        ("v2.0.0", "## 2.0.0 (2030-01-31)", "## 2.0.0 (unreleased)", "a release has its date"),
        ("v2.0.0", "## 2.0.0 (2030-01-31)", "## 2.0.0rc1 (2030-01-31)", 'has no "## 2.0.0"'),
        ("v2.0.0", "### Added\n- All.\n", "", 'has no "## 2.0.0" with text below it'),
    ],
)
def test_tags_that_are_refused(tree: Path, name: str, old: str, new: str, message: str) -> None:
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(old, new) if old else changelog.read_text())
    with pytest.raises(ReleaseError, match=message):
        check_tag(name, tree)


def test_a_recipe_of_another_version_is_refused(tree: Path) -> None:
    (tree / "conda" / "recipe.yaml").write_text('context:\n  version: "1.9.0"\n')
    with pytest.raises(ReleaseError, match=re.escape("but conda/recipe.yaml has 1.9.0") + "$"):
        check_tag("v2.0.0", tree)


def test_an_owner_who_is_not_named_is_found(tree: Path) -> None:
    (tree / ".github" / "CODEOWNERS").write_text("* @OWNER/maintainers\n")
    with pytest.raises(ReleaseError, match=r"OWNER is replaced in \.github/CODEOWNERS: release"):
        check_tag("v2.0.0", tree)
    checklist.name_owner("jane", tree)
    assert (tree / ".github" / "CODEOWNERS").read_text() == "* @jane/maintainers\n"
    assert check_tag("v2.0.0", tree) == "2.0.0"


# Open items: the file, the change, and whether a pre-release waits for it.
OPEN = [
    ("owner", "pyproject.toml", "[project]", "# OWNER\n[project]", True),
    ("digests", ".github/images.json", "cuda13_1", "cuda13_0", False),
    ("pages-say-so", "README.md", "# A", "There is no release of version 2 yet.\n# A", False),
    *(
        (name, checklist.DECISIONS, f'"{name}": "somebody, 2030-01-31"', f'"{name}": " "', early)
        for name, early in {
            "pypi-name": False,
            "pypi-publisher": False,
            "environments": True,
            "pages": True,
            "rules": True,
            "security-reports": False,
            "conda-feedstock": False,
        }.items()
    ),
]


@pytest.mark.parametrize(("name", "file", "old", "new", "early"), OPEN, ids=[o[0] for o in OPEN])
def test_a_release_waits_for_what_a_person_decides(
    name: str, file: str, old: str, new: str, early: bool, tree: Path
) -> None:
    change(tree / file, old, new)
    assert [item.name for item in checklist.items(tree) if not item.state] == [name]
    with pytest.raises(ReleaseError, match=rf"2\.0\.0 waits for .*\n  {name} +OPEN, for "):
        check_tag("v2.0.0", tree)
    for place in ("pyproject.toml", "conda/recipe.yaml", "CHANGELOG.md"):
        change(tree / place, "2.0.0", "2.0.0rc1")
    if early:
        with pytest.raises(ReleaseError, match=rf"  {name} +OPEN, for every release: "):
            check_tag("v2.0.0rc1", tree)
    else:
        assert check_tag("v2.0.0rc1", tree) == "2.0.0rc1"


def test_everything_that_a_person_decides_is_one_list(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list names each file with a placeholder and is printed beside a workflow's outputs."""
    decided = set(json.loads((ROOT / checklist.DECISIONS).read_text()))
    listed = [item.name for item in checklist.items(ROOT, runners="")]
    assert sorted(listed) == sorted({"gpu-runners", *(row[0] for row in OPEN)})
    assert decided <= set(listed)
    assert main(["tag", "v0", "--gpu-runners", ""]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    for name in listed:
        assert re.search(rf"^  {name} +(done|OPEN)", printed.err, re.MULTILINE)


def test_this_tree_could_be_released_but_for_the_date_and_the_owner() -> None:
    assert check_tag(f"v{VERSION}", dated=False) == VERSION


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.0.0", False), ("2.0.0a1", True), ("2.0.0rc2", True), ("2.1.0.dev3", True)],
)
def test_pre_releases(version: str, expected: bool) -> None:
    assert is_pre_release(version) is expected


def test_outputs_of_the_tag_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tag, "check_tag", lambda name: name.removeprefix("v"))
    assert main(["tag", "v2.0.0rc1"]) == 0
    assert capsys.readouterr().out == "version=2.0.0rc1\npre_release=true\n"
    for runners, gpu in (("", "false"), (RUNNERS, "true")):
        assert main(["tag", "v2.0.0rc1", "--gpu-runners", runners]) == 0
        assert capsys.readouterr().out.endswith(f"pre_release=true\ngpu={gpu}\n")
    monkeypatch.undo()
    assert main(["tag", "v0"]) == 1
    assert "release tag: the tag is 'v0'" in capsys.readouterr().err


@pytest.mark.parametrize("runners", ["", "  ", "[]", "[ ]\n"])
def test_only_a_pre_release_may_do_without_gpus(runners: str) -> None:
    for version in ("2.0.0a1", "2.0.0b3", "2.0.0rc1", "2.0.0.dev4"):
        assert not has_gpu_tests(runners, version)
    with pytest.raises(ReleaseError, match=r"2\.0\.0 is a final release, .* GPU_RUNNERS "):
        has_gpu_tests(runners, "2.0.0")


def test_machines_with_gpus_test_every_release() -> None:
    assert has_gpu_tests(RUNNERS, "2.0.0")
    assert has_gpu_tests(RUNNERS, "2.0.0rc1")


@pytest.mark.parametrize(
    ("runners", "message"),
    [
        ("gpu-h200", "is no JSON"),
        ('{"a": 1}', "names no runner"),
        ('["gpu-h200"]', "'gpu-h200', which names no runner"),
        (RUNNERS.replace("x86_64", "amd64"), "gives gpu the machine 'amd64'; it may be 'x86_64'"),
        (RUNNERS.replace('"12"', "12"), "gives gpu the cuda 12; it may be '12'"),
    ],
)
def test_a_variable_that_would_fail_later_fails_first(runners: str, message: str) -> None:
    """A bad matrix would fail after all packs are built, or wait a day for a runner."""
    with pytest.raises(ReleaseError, match=message):
        has_gpu_tests(runners, "2.0.0rc1")
