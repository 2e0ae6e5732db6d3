# SPDX-License-Identifier: BSD-3-Clause
"""The recipe for conda, checked for every platform or built for this machine's.

rattler-build's own parser reads it, so that every key and expression is checked. FDM_ARCHS and
FDM_HEAD_DIMS make the packs of a build smaller. Needs py-rattler-build.
"""

from __future__ import annotations

import argparse
import platform
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

from release import targets
from release.project import PROJECT, ROOT, ReleaseError, pyproject_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--check", action="store_true", help="render only: fetches and builds nothing"
    )
    mode.add_argument("--output", type=Path, help="build each package once, into this folder")
    parser.add_argument("--channel", action="append", help="of a build; conda-forge unless given")


def run(options: argparse.Namespace) -> None:
    """Check the recipe, or build it."""
    if options.check:
        check()
        return
    try:
        build(options.output, options.channel or ["conda-forge"])
    except RattlerBuildError as error:
        raise ReleaseError(str(error)) from error


def check() -> None:
    """See what the recipe would build on every platform of cmake/targets.json."""
    failures = []
    for place in (row.conda for row in targets.load().platforms):
        try:
            rendered = [variant.recipe.to_dict() for variant in render(place)]
        except RattlerBuildError as error:
            failures.append(f"{place}: {error}")
            continue
        failures += [f"{place}: {failure}" for failure in problems(rendered)]
        print(f"{place}: {', '.join(recipe['package']['name'] for recipe in rendered)}")
    for failure in failures:
        print(f"release conda: {failure}", file=sys.stderr)
    if failures:
        raise ReleaseError("the recipe is not as it should be")


def build(output: Path, channels: list[str]) -> None:
    """Build every output once, for this machine."""
    (place,) = [p.conda for p in targets.load().platforms if p.machine == platform.machine()]
    print(f"for {place}")
    built = set()
    for variant in render(None):
        key = (variant.recipe.package.name, variant.recipe.build.string)
        if key not in built:
            result = variant.run_build(output_dir=output, channels=channels)
            print(*result.packages, sep="\n")
            built.add(key)


def render(place: str | None) -> list[Any]:
    """Return every output of the recipe in every variant; for this machine where place is None."""
    recipe = Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml")
    variants = VariantConfig.from_file(ROOT / "conda" / "variants.yaml")
    config = (
        PlatformConfig(target_platform=place, build_platform=place, host_platform=place)
        if place
        else None
    )
    return list(recipe.render(variants, RenderConfig(config) if config else RenderConfig()))


def problems(rendered: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with the outputs of one platform."""
    table, version = targets.load(), pyproject_value("version")
    majors = [cuda.major for cuda in table.cuda]
    expected = {PROJECT, *(f"{PROJECT}-cu{major}" for major in majors)}
    # One that is the same in several variants is rendered for each, and built once.
    builds = {(recipe["package"]["name"], recipe["build"]["string"]) for recipe in rendered}
    names = [name for name, _ in builds]
    if sorted(names) != sorted(expected):
        yield f"the outputs are {sorted(names)}, not one each of {sorted(expected)}"
    for recipe in rendered:
        name = recipe["package"]["name"]
        if recipe["package"]["version"] != version:
            yield f"{name} has version {recipe['package']['version']}, not {version}"
        if not recipe["build"].get("python", {}).get("version_independent"):
            yield f"{name} is not one build for every Python"
        requirements = recipe["requirements"]
        needed = [str(entry) for key in ("build", "host", "run") for entry in requirements[key]]
        if any("pytorch" in entry for entry in needed):
            yield f"{name} depends on pytorch, rather than constraining it"
        if not recipe.get("tests"):
            yield f"{name} has no tests"
    constraints = [
        entry for recipe in rendered for entry in recipe["requirements"].get("run_constraints", [])
    ]
    wanted = {f"pytorch >={table.min_torch}", *(f"__cuda >={major}" for major in majors)}
    if set(constraints) != wanted:
        yield f"the run constraints are {sorted(constraints)}, not {sorted(wanted)}"
