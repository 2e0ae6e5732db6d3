# SPDX-License-Identifier: BSD-3-Clause
"""The recipe for conda: what its scripts install is what it lists, and the loader finds it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "conda"))

import install_packs  # noqa: E402

from flash_dmattn.loader.candidates import ENTRY_POINT_GROUP, entry_point_candidates  # noqa: E402
from release.__main__ import main  # noqa: E402

RECIPE = (ROOT / "conda" / "recipe.yaml").read_text()
TARGETS = json.loads((ROOT / "cmake" / "targets.json").read_text())
VERSION = metadata.version("flash-dmattn")


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    folder = tmp_path / "packs"
    folder.mkdir()
    rows = []
    for arch in ("sm80", "sm90"):
        file = f"libflash_dmattn_cu13_{arch}.so"
        (folder / file).write_text("not loaded here")
        rows.append(
            {
                "name": f"cu13-{arch}",
                "file": file,
                "device": "cuda",
                "machine": "x86_64",
                "cuda": "13.1",
                "arch": arch,
            }
        )
    manifest = {"schema": 1, "version": VERSION, "abi_version": 1, "packs": rows}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_loader_finds_installed_packs(packs: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert install_packs.main([str(packs), str(site)]) == 0
    (distribution,) = metadata.distributions(path=[str(site)])
    assert (distribution.metadata["Name"], distribution.version) == ("flash-dmattn-cu13", VERSION)
    assert distribution.requires == [f"flash-dmattn=={VERSION}"]
    assert distribution.read_text("licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    (entry_point,) = distribution.entry_points
    assert entry_point.group == ENTRY_POINT_GROUP
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        f"import importlib; print(importlib.import_module({entry_point.value!r}).__path__[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(site / "flash_dmattn_cu13")


def test_its_candidates_are_the_packs(
    packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install_packs.install(packs, site)
    monkeypatch.syspath_prepend(str(site))
    (distribution,) = metadata.distributions(path=[str(site)])
    found = entry_point_candidates(distribution.entry_points)
    assert [(c.name, c.cuda, c.arch) for c in found] == [
        ("cu13-sm80", "13.1", "sm80"),
        ("cu13-sm90", "13.1", "sm90"),
    ]
    assert all(Path(c.path).is_relative_to(site) for c in found)


def test_packs_of_two_cudas_are_refused(packs: Path, tmp_path: Path) -> None:
    manifest = json.loads((packs / "manifest.json").read_text())
    manifest["packs"][0]["cuda"] = "12.9"
    (packs / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="must hold packs of one CUDA major"):
        install_packs.install(packs, tmp_path / "site")


def test_recipe_and_project_say_the_same() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("scikit-build-core", "nanobind", "nanobind-backend"):
        (declared,) = re.findall(rf'"{name}>=([\d.]+)"', project.partition("[project.optional")[0])
        assert f"- {name} >={declared}\n" in RECIPE
    assert f'version: "{VERSION}"\n' in RECIPE
    assert f'torch_min: "{TARGETS["torch"]["min"]}"\n' in RECIPE


def test_required_archs_are_looked_for_in_the_package() -> None:
    listed = re.findall(r"libflash_dmattn_cu\$\{\{.*?\}\}_(sm\d+)\.so", RECIPE)
    assert listed == [arch for arch, row in TARGETS["archs"].items() if row["required"]]


def test_listed_files_of_the_python_package_are_those_that_are_installed() -> None:
    listed = re.findall(r"^ +- (flash_dmattn/\S+)$", RECIPE, re.MULTILINE)
    assert len(listed) == 4
    files = metadata.files("flash-dmattn") or []
    installed = {str(file) for file in files}
    assert [file for file in listed if file not in installed] == []


def test_recipe_renders(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rattler_build")
    assert main(["conda", "--check"]) == 0
    assert "linux-64: flash-dmattn, flash-dmattn-cu12" in capsys.readouterr().out


def test_a_recipe_that_needs_torch_is_refused() -> None:
    pytest.importorskip("rattler_build")
    from release import conda

    rendered = [variant.recipe.to_dict() for variant in conda.render("linux-64")]
    rendered[0]["requirements"]["run"].append("pytorch >=2.4")
    del rendered[1]["build"]["python"]
    failures = list(conda.problems(rendered))
    assert "flash-dmattn depends on pytorch, rather than constraining it" in failures
    assert "flash-dmattn-cu12 is not one build for every Python" in failures
