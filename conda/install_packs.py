# SPDX-License-Identifier: BSD-3-Clause
"""Install a folder of packs as a distribution of its own, flash-dmattn-cu13, into site-packages.

The folder becomes a package; the entry point in its metadata is how the loader finds it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packs", type=Path, help="what `python -m release packs` made")
    parser.add_argument("site_packages", type=Path)
    options = parser.parse_args(arguments)
    print(install(options.packs, options.site_packages))
    return 0


def install(packs: Path, site_packages: Path) -> Path:
    """Copy the packs and write their metadata; returns the package's folder."""
    manifest = json.loads((packs / "manifest.json").read_text())
    majors = {str(pack["cuda"]).partition(".")[0] for pack in manifest["packs"]}
    if len(majors) != 1:
        raise ValueError(f"{packs} must hold packs of one CUDA major, it has those of {majors}")
    name, version = f"flash-dmattn-cu{majors.pop()}", manifest["version"]
    module = name.replace("-", "_")
    package = site_packages / module
    shutil.copytree(packs, package)
    (package / "__init__.py").write_text("# SPDX-License-Identifier: BSD-3-Clause\n")

    info = site_packages / f"{module}-{version}.dist-info"
    (info / "licenses").mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", info / "licenses")
    texts = {
        "METADATA": (
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
            "License-Expression: BSD-3-Clause\nLicense-File: LICENSE\n"
            f"Requires-Dist: flash-dmattn=={version}\n"
        ),
        "entry_points.txt": f"[flash_dmattn.packs]\n{name} = {module}\n",
        "INSTALLER": "conda\n",
    }
    for file, text in texts.items():
        (info / file).write_text(text)
    return package


if __name__ == "__main__":
    sys.exit(main())
