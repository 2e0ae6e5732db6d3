# SPDX-License-Identifier: BSD-3-Clause
"""The conda recipe with the variants of the project and of conda-forge."""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from release.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "conda" / "recipe.yaml").read_text()
TARGETS = json.loads((ROOT / "cmake" / "targets.json").read_text())
VERSION = metadata.version("flash-dmattn")


def test_recipe_and_project_say_the_same() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (declared,) = re.findall(r'"scikit-build-core>=([\d.]+)"', project.partition("[project]")[0])
    assert f"- scikit-build-core >={declared}\n" in RECIPE
    core = (ROOT / "cmake" / "Core.cmake").read_text()
    (_, linked) = re.findall(r"set\(oldest_nanobind ([\d.]+)\)", core)
    assert f'"nanobind>={linked}"' in project
    assert f"- nanobind >={linked}\n" in RECIPE
    assert f'version: "{VERSION}"\n' in RECIPE
    assert f'torch_min: "{TARGETS["torch"]["min"]}"\n' in RECIPE


def test_required_archs_are_looked_for_in_the_package() -> None:
    listed = re.findall(r"libflash_dmattn_cu\$\{\{.*?\}\}_(sm\d+)\.so", RECIPE)
    assert listed == [arch for arch, row in TARGETS["archs"].items() if row["required"]]


def test_listed_files_of_the_python_package_are_those_that_are_installed() -> None:
    listed = re.findall(r"^ +- (flash_dmattn/\S+)$", RECIPE, re.MULTILINE)
    assert len(listed) == 4
    installed = [str(file) for file in metadata.files("flash-dmattn") or []]
    assert [name for name in listed if not fnmatch.filter(installed, name)] == []


def test_recipe_renders(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rattler_build")
    assert main(["conda", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all("-cuno" not in line for line in lines)
    for kind in ("flash-dmattn cpu_h", "flash-dmattn cuda13_h", "flash-dmattn-base py310h"):
        assert any(line.startswith("linux-64, pinning.yaml: ") and kind in line for line in lines)


def rendered_for(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return the variants of a file, and the recipe's packages for them."""
    from release import conda

    variants = conda.read_variants(ROOT / "conda" / name, "linux-64")
    return variants, [row.recipe.to_dict() for row in conda.render("linux-64", variants)]


def test_a_recipe_that_needs_torch_is_refused() -> None:
    pytest.importorskip("rattler_build")
    from release import conda

    variants, rendered = rendered_for("pinning.yaml")
    packs = next(row for row in rendered if row["package"]["name"] == "flash-dmattn-cu12")
    base = next(row for row in rendered if row["package"]["name"] == "flash-dmattn-base")
    base["requirements"]["run"].append("pytorch >=2.6")
    packs["requirements"]["run"].clear()
    del packs["build"]["python"]
    failures = list(conda.problems(rendered, variants))
    assert "flash-dmattn-base depends on pytorch" in failures
    assert "flash-dmattn-cu12 is not one build for every Python" in failures
    assert f"flash-dmattn-cu12 does not depend on flash-dmattn-base {VERSION}" in failures


@pytest.mark.parametrize("file", ["pinning.yaml", "variants.yaml"])
def test_beside_a_gpu_a_cuda_pack_comes_along(file: str) -> None:
    """Among the builds that an environment permits, conda takes the one with the highest number."""
    pytest.importorskip("rattler_build")
    _, rendered = rendered_for(file)
    choices = [row for row in rendered if row["package"]["name"] == "flash-dmattn"]
    builds = {
        int(row["build"]["number"]): sorted(map(str, row["requirements"]["run"])) for row in choices
    }

    def taken(driver: int | None) -> list[str]:
        admitted = {
            number: needed
            for number, needed in builds.items()
            if all(
                driver is not None and driver >= int(entry.partition(">=")[2])
                for entry in needed
                if entry.startswith("__cuda")
            )
        }
        return admitted[max(admitted)]

    assert taken(None) == taken(11) == [f"flash-dmattn-base =={VERSION}"]
    assert taken(12) == ["__cuda >=12", f"flash-dmattn-cu12 =={VERSION}"]
    assert taken(13) == taken(14) == ["__cuda >=13", f"flash-dmattn-cu13 =={VERSION}"]


def test_a_choice_that_brings_too_much_is_refused() -> None:
    pytest.importorskip("rattler_build")
    from release import conda

    variants, rendered = rendered_for("pinning.yaml")
    cpu, cuda = (
        next(row for row in rendered if row["build"]["string"].startswith(kind))
        for kind in ("cpu_", "cuda12_")
    )
    cpu["build"]["number"] = 300
    cuda["requirements"]["run"].pop()
    found = "\n".join(conda.problems(rendered, variants))
    assert "flash-dmattn of cpu has the build number 300" in found
    assert "flash-dmattn of cuda12 depends on" in found


def test_packs_of_no_cuda_are_refused() -> None:
    """conda-forge's list begins with None, which has no CUDA major in its first two characters."""
    pytest.importorskip("rattler_build")
    from release import conda

    variants, rendered = rendered_for("pinning.yaml")
    packs = next(row for row in rendered if row["package"]["name"] == "flash-dmattn-cu12")
    stray = copy.deepcopy(packs)
    stray["package"]["name"] = "flash-dmattn-cuno"
    (failure,) = list(conda.problems([*rendered, stray], variants))
    assert "flash-dmattn-cuno" in failure


def test_cudart_is_linked_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rattler_build")

    def packs() -> dict[str, Any]:
        rendered = rendered_for("pinning.yaml")[1]
        return next(row for row in rendered if row["package"]["name"] == "flash-dmattn-cu13")

    static = packs()
    assert "cuda-cudart-static" in static["requirements"]["host"]
    assert "cuda-cudart-dev" in static["requirements"]["ignore_run_exports"]["from_package"]
    monkeypatch.setenv("FDM_CUDART", "shared")
    shared = packs()
    assert "cuda-cudart-static" not in shared["requirements"]["host"]
    assert "by_name" not in shared["requirements"]["ignore_run_exports"]
    assert shared["build"]["string"] != static["build"]["string"]
    assert '--cudart "$CUDART"' in (ROOT / "conda" / "build_packs.sh").read_text()


def test_libraries_are_not_changed_when_they_are_packed() -> None:
    """An added run path would change the hash, and `--verify` would fail."""
    pytest.importorskip("rattler_build")
    rendered = rendered_for("pinning.yaml")[1]
    with_libraries = [row for row in rendered if row["package"]["name"] != "flash-dmattn"]
    assert len(with_libraries) > 2
    for row in with_libraries:
        assert row["build"]["dynamic_linking"]["binary_relocation"] is False
    assert "--selftest --verify" in RECIPE
