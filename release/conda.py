# SPDX-License-Identifier: BSD-3-Clause
"""Checks the conda recipe for every platform, or builds it for this machine's platform.

rattler-build's parser checks every key and expression of the recipe, with the project's variants
and with conda-forge's pinning. FDM_ARCHS and FDM_HEAD_DIMS make the packs of a build smaller;
FDM_CUDART=shared makes them depend on cuda-cudart. Needs py-rattler-build.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rattler_build import (
    JinjaConfig,
    PlatformConfig,
    RattlerBuildError,
    RenderConfig,
    RenderedVariant,
    Stage0Recipe,
    ToolConfiguration,
    VariantConfig,
)

from release import targets
from release.project import PROJECT, ROOT, ReleaseError, pyproject_value

BASE = f"{PROJECT}-base"  # the Python package

RECIPE = ROOT / "conda" / "recipe.yaml"
VARIANTS = ROOT / "conda" / "variants.yaml"
PINNING = ROOT / "conda" / "pinning.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--check", action="store_true", help="render only: fetches and builds nothing"
    )
    mode.add_argument("--output", type=Path, help="build each package once, into this folder")
    parser.add_argument("--channel", action="append", help="of a build; conda-forge unless given")
    parser.add_argument("--python", action="append", help="build for this Python only")
    parser.add_argument("--only", action="append", help="build this package only")
    parser.add_argument(
        "--pinning",
        type=Path,
        default=PINNING,
        help="a conda_build_config.yaml; conda-forge's needs CF_CUDA_ENABLED=True",
    )


def run(options: argparse.Namespace) -> None:
    """Check the recipe, or build it."""
    if options.check:
        check(options.pinning)
        return
    try:
        chosen = [
            variant
            for variant in render(here(), read_variants(VARIANTS, here()))
            if variant.recipe.package.name in (options.only or [variant.recipe.package.name])
            and variant.variant.get("python") in [None, *(options.python or targets.load().pythons)]
        ]
        build(chosen, options.output, options.channel or ["conda-forge"])
    except RattlerBuildError as error:
        raise ReleaseError(str(error)) from error


def check(pinning: Path) -> None:
    """Render the recipe for every platform of cmake/targets.json, and check the outputs."""
    failures = []
    for place in (row.conda for row in targets.load().platforms):
        for file in (VARIANTS, pinning):
            try:
                variants = read_variants(file, place)
                rendered = render(place, variants)
            except RattlerBuildError as error:
                failures.append(f"{place}, {file.name}: {error}")
                continue
            recipes = [variant.recipe.to_dict() for variant in rendered]
            failures += [f"{place}, {file.name}: {text}" for text in problems(recipes, variants)]
            print(f"{place}, {file.name}: {', '.join(builds(recipes))}")
    for failure in failures:
        print(f"release conda: {failure}", file=sys.stderr)
    if failures:
        raise ReleaseError("the recipe is not as it should be")


def here() -> str:
    """Return this machine's platform as conda names it."""
    (place,) = [p.conda for p in targets.load().platforms if p.machine == platform.machine()]
    return place


def build(variants: Sequence[RenderedVariant], output: Path, channels: list[str]) -> None:
    """Build each of the outputs once, and run its tests."""
    tools = ToolConfiguration(test_strategy="native")
    built = set()
    for variant in variants:
        name = f"{variant.recipe.package.name} {variant.recipe.build.string}"
        if name not in built:
            result = variant.run_build(tools, output_dir=output, channels=channels)
            print(*result.packages, sep="\n", flush=True)
            built.add(name)


def read_variants(file: Path, place: str) -> VariantConfig:
    """Return the variants of the project's file or of a conda_build_config.yaml."""
    if file == VARIANTS:
        return VariantConfig.from_file(file)
    return VariantConfig.from_conda_build_config(file, JinjaConfig(_platform(place)))


def render(place: str, variants: VariantConfig) -> list[RenderedVariant]:
    """Return every output of the recipe in every variant."""
    return list(Stage0Recipe.from_file(RECIPE).render(variants, RenderConfig(_platform(place))))


def _platform(place: str) -> PlatformConfig:
    return PlatformConfig(target_platform=place, build_platform=place, host_platform=place)


def builds(rendered: list[dict[str, Any]]) -> list[str]:
    """Return the names and build strings of the packages to build.

    The build strings name CUDA or Python. A package that several variants share is built once.
    """
    return sorted({f"{row['package']['name']} {row['build']['string']}" for row in rendered})


def problems(rendered: list[dict[str, Any]], variants: VariantConfig) -> Iterator[str]:
    """Yield the errors in the outputs of one platform."""
    table, version = targets.load(), pyproject_value("version")
    cudas = [cuda for cuda in variants["cuda_compiler_version"] if cuda != "None"]
    majors = [cuda.partition(".")[0] for cuda in cudas]
    # The package that chooses, for each CUDA and for none; the base for each Python; the packs.
    expected = [PROJECT] * (1 + len(majors)) + [BASE] * len(variants["python"])
    expected += [f"{PROJECT}-cu{major}" for major in majors]
    names = [build.partition(" ")[0] for build in builds(rendered)]
    if names != sorted(expected):
        yield f"the outputs are {names}, not {sorted(expected)}"
    unknown = set(majors) - {cuda.major for cuda in table.cuda}
    if unknown:
        yield f"CUDA {', '.join(sorted(unknown))} is not in cmake/targets.json"
    for recipe in rendered:
        name = recipe["package"]["name"]
        if recipe["package"]["version"] != version:
            yield f"{name} has version {recipe['package']['version']}, not {version}"
        if name == PROJECT:
            yield from _wrong_choice(recipe, version, majors)
            continue
        packs = name != BASE
        if packs and not recipe["build"].get("python", {}).get("version_independent"):
            yield f"{name} is not one build for every Python"
        requirements = recipe["requirements"]
        needed = [str(entry) for key in ("build", "host", "run") for entry in requirements[key]]
        for absent in ("pytorch", "nanobind-backend"):
            if any(entry.startswith(absent) for entry in needed):
                yield f"{name} depends on {absent}"
        if packs and f"{BASE} =={version}" not in needed:
            yield f"{name} does not depend on {BASE} {version}"
        if not recipe.get("tests"):
            yield f"{name} has no tests"
    constraints = [
        entry for recipe in rendered for entry in recipe["requirements"].get("run_constraints", [])
    ]
    wanted = {f"pytorch >={table.min_torch}", *(f"__cuda >={major}" for major in majors)}
    if set(constraints) != wanted:
        yield f"the run constraints are {sorted(constraints)}, not {sorted(wanted)}"


def _wrong_choice(recipe: dict[str, Any], version: str, majors: Sequence[str]) -> Iterator[str]:
    """Yield the errors in a build of the package that chooses.

    It depends on the newest packs that the driver supports, or on the base without a driver.
    """
    build, run = recipe["build"], [str(entry) for entry in recipe["requirements"]["run"]]
    kind, number = str(build["string"]).partition("_")[0], int(build["number"])
    chosen = {f"cuda{major}": major for major in majors}.get(kind)
    wanted = [f"{BASE} =={version}"]
    if chosen is not None:
        wanted = [f"{PROJECT}-cu{chosen} =={version}", f"__cuda >={chosen}"]
    if run != wanted:
        yield f"{PROJECT} of {kind} depends on {run}, not {wanted}"
    if number % 100 != int(chosen or 0) or (number >= 100) != (chosen is not None):
        yield f"{PROJECT} of {kind} has the build number {number}"
