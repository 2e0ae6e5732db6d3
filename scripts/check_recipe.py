# SPDX-License-Identifier: BSD-3-Clause
"""Render conda/recipe.yaml for every platform of cmake/targets.json and see what it would build.

rattler-build's own parser reads it, so that every key and expression is checked; nothing is
fetched or built. Needs py-rattler-build.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rattler_build import (
    PlatformConfig,
    RattlerBuildError,
    RenderConfig,
    Stage0Recipe,
    VariantConfig,
)

from release.changelog import declared_version

ROOT = Path(__file__).resolve().parent.parent
TARGETS: dict[str, Any] = json.loads((ROOT / "cmake" / "targets.json").read_text())
PROJECT = "flash-dmattn"


def main() -> int:
    failures = []
    for platform in (row["conda"] for row in TARGETS["platforms"].values()):
        try:
            rendered = render(ROOT / "conda", platform)
        except RattlerBuildError as error:
            failures.append(f"{platform}: {error}")
            continue
        failures += [f"{platform}: {failure}" for failure in problems(rendered)]
        print(f"{platform}: {', '.join(recipe['package']['name'] for recipe in rendered)}")
    for failure in failures:
        print(f"check_recipe: {failure}", file=sys.stderr)
    return 1 if failures else 0


def render(folder: Path, platform: str) -> list[dict[str, Any]]:
    """Return every output of the recipe, evaluated, in every variant."""
    recipe = Stage0Recipe.from_file(folder / "recipe.yaml")
    variants = VariantConfig.from_file(folder / "variants.yaml")
    place = PlatformConfig(
        target_platform=platform, build_platform=platform, host_platform=platform
    )
    return [variant.recipe.to_dict() for variant in recipe.render(variants, RenderConfig(place))]


def problems(rendered: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with the outputs of one platform."""
    expected = {PROJECT, *(f"{PROJECT}-cu{major}" for major in TARGETS["cuda"])}
    # One that is the same in several variants is rendered for each, and built once.
    builds = {(recipe["package"]["name"], recipe["build"]["string"]) for recipe in rendered}
    names = [name for name, _ in builds]
    if sorted(names) != sorted(expected):
        yield f"the outputs are {sorted(names)}, not one each of {sorted(expected)}"
    for recipe in rendered:
        name = recipe["package"]["name"]
        if recipe["package"]["version"] != declared_version():
            yield f"{name} has version {recipe['package']['version']}, not {declared_version()}"
        if not recipe["build"].get("python", {}).get("version_independent"):
            yield f"{name} is not one build for every Python"
        requirements = recipe["requirements"]
        needed = [str(entry) for key in ("build", "host", "run") for entry in requirements[key]]
        if any("pytorch" in entry for entry in needed):
            yield f"{name} depends on pytorch, rather than constraining it"
        if not recipe.get("tests"):
            yield f"{name} has no tests"
    floor = TARGETS["torch"]["min"]
    constraints = [
        entry for recipe in rendered for entry in recipe["requirements"].get("run_constraints", [])
    ]
    wanted = {f"pytorch >={floor}", *(f"__cuda >={major}" for major in TARGETS["cuda"])}
    if set(constraints) != wanted:
        yield f"the run constraints are {sorted(constraints)}, not {sorted(wanted)}"


if __name__ == "__main__":
    sys.exit(main())
