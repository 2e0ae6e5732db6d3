# SPDX-License-Identifier: BSD-3-Clause
"""Assembles a wheel: builds the core and the cpu pack, and adds CUDA packs unchanged.

With ``--profile manylinux``, auditwheel (the extra [gates]) retags the wheel; it fails unless the
wheel was built in an image of that policy. With ``--profile native``, for macOS and Windows, the
wheel has only the cpu pack, and its tag must be in the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from release import targets
from release.distributions import Wheel
from release.programs import call
from release.project import PROJECT, ROOT, ReleaseError, commit, pyproject_value
from release.sbom import BILL, bill_of_libraries
from release.wheel_files import add_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--packs", nargs="*", type=Path, default=[], help="folders of packs")
    parser.add_argument("--output", required=True, type=Path, help="folder for the wheel")
    parser.add_argument("--profile", default="linux", choices=["linux", "manylinux", "native"])
    parser.add_argument(
        "--no-isolation", action="store_true", help="use the installed build requirements"
    )


def run(options: argparse.Namespace) -> None:
    """Build the core and the cpu pack, add the packs, and print the wheel's path last."""
    folders = [folder.resolve() for folder in options.packs]
    for folder in folders:
        if not (folder / "manifest.json").is_file():
            raise ReleaseError(f"{folder} has no manifest.json; `release packs` makes both")
    definitions = {
        "FLASH_DMATTN_CUDA": "OFF",
        "FLASH_DMATTN_COMMIT": commit(),
        "FLASH_DMATTN_PREBUILT_PACKS": ";".join(map(str, folders)),
    }
    settings = [f"--config-settings=cmake.define.{k}={v}" for k, v in definitions.items()]
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # A new build folder: an existing one would keep the options of its build.
        settings.append(f"--config-settings=build-dir={scratch}/build")
        wheels = Path(scratch) / "wheels"
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
        command += ["--no-build-isolation"] if options.no_isolation else []
        variables = {"FDM_NANOBIND": "shared"}
        variables |= native_variables(sys.platform) if options.profile == "native" else {}
        call([*command, "--wheel-dir", wheels, *settings, ROOT], variables=variables)
        (wheel,) = wheels.glob("*.whl")
        add_bill(wheel)
        if options.profile == "manylinux":
            tag = f"{targets.load().wheel.policy}_{platform.machine()}"
            wheel = repair(wheel, Path(scratch) / "repaired", tag)
        if options.profile == "native":
            check_native_tag(Wheel.read(wheel))
        target = options.output / wheel.name
        target.unlink(missing_ok=True)
        print(shutil.move(wheel, target))


def add_bill(path: Path) -> None:
    """Add the bill of materials of a wheel's libraries to it, at the place that PEP 770 defines."""
    wheel = Wheel.read(path)
    bill = bill_of_libraries(PROJECT, pyproject_value("version"), wheel.cores, wheel.packs)
    text = json.dumps(bill, indent=1) + "\n"
    add_files(path, {f"{wheel.dist_info}/sboms/{BILL}": text.encode()})


def native_variables(system: str) -> dict[str, str]:
    """Return the environment variables of the build on macOS and Windows.

    Args:
        system: as in ``sys.platform``.
    """
    tags = {row.tag.partition("_")[0]: row.tag.split("_") for row in targets.load().cpu_platforms}
    if system == "darwin":
        _, major, minor, _ = tags["macosx"]
        return {"MACOSX_DEPLOYMENT_TARGET": f"{major}.{minor}"}
    if system == "win32":
        # The kernels use vector extensions of GCC and clang, which Microsoft's compiler lacks.
        return {"CC": "clang", "CXX": "clang++", "CMAKE_GENERATOR": "Ninja"}
    raise ReleaseError(f"--profile native is for macOS and Windows, not for {system}")


def check_native_tag(wheel: Wheel) -> None:
    """Check that a wheel has a tag of the table."""
    tags = [row.tag for row in targets.load().cpu_platforms]
    if wheel.tag.rpartition("-")[2] not in tags:
        raise ReleaseError(f"the wheel's tag is {wheel.tag}; the table has {', '.join(tags)}")


def repair(wheel: Path, folder: Path, platform_tag: str) -> Path:
    """Return the wheel with a manylinux tag; auditwheel fails if the wheel does not conform.

    CUDA's libraries are excluded: if one is needed by mistake, the gates report it, and auditwheel
    does not copy it into the wheel.
    """
    excludes = ["--exclude=libcuda.so*", "--exclude=libcudart.so*"]
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", platform_tag, "--only-plat"]
    call([*command, *excludes, "--wheel-dir", folder, wheel])
    (repaired,) = folder.glob("*.whl")
    return repaired
