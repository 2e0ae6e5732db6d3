# SPDX-License-Identifier: BSD-3-Clause
"""Splits a wheel for sites that want the packs of one CUDA major only.

A whole wheel becomes a base wheel without packs for GPUs, and one wheel of packs for each CUDA
major, such as flash-dmattn-cu13. The loader finds these packs through an entry point. They are
byte for byte those of the whole wheel. A folder of packs becomes one wheel of packs. The base wheel
has a build tag: installers prefer it to a whole wheel of the same version in the same index.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from release.distributions import PACKAGE, Wheel
from release.project import PROJECT, ROOT, ReleaseError, pyproject_value
from release.sbom import BILL, bill_of_libraries
from release.wheel_files import write_wheel

BUILD_TAG = "1base"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, help="a whole wheel, or a folder that `release packs` made"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the wheels")


def run(options: argparse.Namespace) -> None:
    """Write the wheels, and print their paths."""
    options.output.mkdir(parents=True, exist_ok=True)
    written = (
        of_folder(options.source, options.output)
        if options.source.is_dir()
        else of_wheel(options.source, options.output)
    )
    print(*written, sep="\n")


def of_wheel(path: Path, output: Path) -> Iterator[Path]:
    """Write the base wheel, and the packs of each CUDA major, of a whole wheel."""
    wheel = Wheel.read(path)
    gpu = [row for row in wheel.packs if row["cuda"]]
    if not gpu:
        raise ReleaseError(f"{path.name} has no packs for GPUs")
    yield _base(wheel, output)
    files = {row["file"]: wheel.contents[f"{PACKAGE}/packs/{row['file']}"] for row in gpu}
    platform = wheel.tag.rpartition("-")[2]
    for major in sorted({_major(row) for row in gpu}):
        rows = [row for row in gpu if _major(row) == major]
        yield _packs(wheel.manifest, rows, files, platform, output)


def of_folder(folder: Path, output: Path) -> Iterator[Path]:
    """Write the wheel of a folder's packs."""
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = manifest["packs"]
    majors = sorted({_major(row) if row["cuda"] else "no CUDA" for row in rows})
    if len(majors) != 1 or majors == ["no CUDA"]:
        raise ReleaseError(f"{folder} must hold packs of one CUDA major, it has: {majors}")
    files = {row["file"]: (folder / row["file"]).read_bytes() for row in rows}
    yield _packs(manifest, rows, files, f"linux_{rows[0]['machine']}", output)


def _major(row: Mapping[str, Any]) -> str:
    return str(row["cuda"]).partition(".")[0]


def _base(wheel: Wheel, output: Path) -> Path:
    rows = [row for row in wheel.packs if not row["cuda"]]
    files = {
        name: content
        for name, content in wheel.contents.items()
        if not wheel.is_pack(name) or name.rpartition("/")[2] in {row["file"] for row in rows}
    }
    files[f"{PACKAGE}/packs/manifest.json"] = _json({**wheel.manifest, "packs": rows})
    head = files[f"{wheel.dist_info}/WHEEL"].decode()
    files[f"{wheel.dist_info}/WHEEL"] = f"{head.rstrip()}\nBuild: {BUILD_TAG}\n".encode()
    version = wheel.metadata("METADATA", "Version")[0]
    bill = f"{wheel.dist_info}/sboms/{BILL}"
    files[bill] = _json(bill_of_libraries(PROJECT, version, wheel.cores, rows))
    return write_wheel(output / f"{PACKAGE}-{version}-{BUILD_TAG}-{wheel.tag}.whl", files)


def _packs(
    manifest: Mapping[str, Any],
    rows: list[dict[str, Any]],
    libraries: Mapping[str, bytes],
    platform: str,
    output: Path,
) -> Path:
    """Write the wheel of one CUDA major's packs."""
    version = manifest["version"]
    name = f"{PROJECT}-cu{_major(rows[0])}"
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    tag = f"py3-none-{platform}"
    licences = sorted(path.name for path in ROOT.glob("LICENSE*"))
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: The kernel packs of {PROJECT} for GPUs, built by CUDA {_major(rows[0])}",
        f"Requires-Python: {pyproject_value('requires-python')}",
        f"License-Expression: {pyproject_value('license')}",
        *(f"License-File: {licence}" for licence in licences),
        f"Requires-Dist: {PROJECT}=={version}",
    ]
    files = {
        f"{module}/__init__.py": b"# SPDX-License-Identifier: BSD-3-Clause\n",
        f"{module}/manifest.json": _json({**manifest, "packs": rows}),
        **{f"{module}/{row['file']}": libraries[row["file"]] for row in rows},
        f"{info}/METADATA": "".join(f"{line}\n" for line in metadata).encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: {PROJECT} release\nRoot-Is-Purelib: false\n"
            f"Tag: {tag}\n"
        ).encode(),
        f"{info}/entry_points.txt": f"[{PACKAGE}.packs]\n{name} = {module}\n".encode(),
        f"{info}/sboms/{BILL}": _json(bill_of_libraries(name, version, {}, rows)),
        **{f"{info}/licenses/{licence}": (ROOT / licence).read_bytes() for licence in licences},
    }
    return write_wheel(output / f"{module}-{version}-{tag}.whl", files)


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
