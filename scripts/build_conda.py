# SPDX-License-Identifier: BSD-3-Clause
"""Build conda/recipe.yaml for this machine's platform, each package once, from conda-forge.

FDM_ARCHS and FDM_HEAD_DIMS make the packs smaller. Needs py-rattler-build.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rattler_build import RattlerBuildError, RenderConfig, Stage0Recipe, VariantConfig

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the packages")
    parser.add_argument("--channel", action="append", help="conda-forge unless given")
    options = parser.parse_args(arguments)
    platforms = json.loads((ROOT / "cmake" / "targets.json").read_text())["platforms"]
    print(f"for {platforms[platform.machine()]['conda']}")
    channels = options.channel or ["conda-forge"]
    recipe = Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml")
    variants = VariantConfig.from_file(ROOT / "conda" / "variants.yaml")
    built = set()
    try:
        for variant in recipe.render(variants, RenderConfig()):
            key = (variant.recipe.package.name, variant.recipe.build.string)
            if key not in built:
                result = variant.run_build(output_dir=options.output, channels=channels)
                print(*result.packages, sep="\n")
                built.add(key)
    except RattlerBuildError as error:
        print(f"build_conda: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
