# SPDX-License-Identifier: BSD-3-Clause
"""Packs in their own distribution: pip installs a wheel with the real cpu pack, which serves an
installation of flash_dmattn without packs.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import flash_dmattn
from flash_dmattn.loader.facts import Machine
from pack_files import build_wheel, manifest_row, real_pack, write_foreign, write_manifest

VERSION = metadata.version("flash-dmattn")
MACHINE = Machine().host().machine
ENTRY_POINTS = "[flash_dmattn.packs]\n{name} = {module}\n"


class Environment:
    """A folder first on Python's path, and its pip-installed packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.site.mkdir()

    def copy_flash_dmattn(self, *, packs: bool = False) -> None:
        """Copy the package under test there, with or without its packs."""
        skipped = ["__pycache__", *([] if packs else ["packs"])]
        for directory in flash_dmattn.__path__:
            target = self.site / "flash_dmattn"
            ignore = shutil.ignore_patterns(*skipped)
            shutil.copytree(directory, target, ignore=ignore, dirs_exist_ok=True)
        info = self.site / f"flash_dmattn-{VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: flash-dmattn\nVersion: {VERSION}\n")

    def install(self, name: str, pack: Path, *, version: str = VERSION) -> Path:
        """Build a wheel of one cpu pack and install it; return the pack's file."""
        module = name.replace("-", "_")
        package = self.folder / "packages" / module
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        shutil.copy(pack, package / "libflash_dmattn_cpu.so")
        row = manifest_row(package / "libflash_dmattn_cpu.so", MACHINE)
        write_manifest(package, row, version=version)
        entry_points = ENTRY_POINTS.format(name=name, module=module)
        wheel = build_wheel(self.folder, name, version, package, entry_points)
        options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "--target", self.site, wheel],
            check=True,
        )
        return self.site / module / "libflash_dmattn_cpu.so"

    def run(self, *arguments: str, **variables: str) -> dict[str, object]:
        """Return the report of ``python -m flash_dmattn`` in this environment."""
        # With -S, no .pth file can put the package under test before the copy.
        path = [str(self.site), *(entry for entry in sys.path if Path(entry).is_dir())]
        code = (
            f"import runpy, sys; sys.path[:0] = {path!r}; sys.argv[1:] = {list(arguments)!r}\n"
            "runpy.run_module('flash_dmattn', run_name='__main__')"
        )
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_DMATTN_")}
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={**environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        report: dict[str, object] = json.loads(done.stdout)
        return report


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_without_packs_nothing_serves(environment):
    environment.copy_flash_dmattn()
    report = environment.run("--json")
    assert report["exit_code"] == 1
    assert report["packs"] == []
    assert report["devices"][0]["trace"][-2:] == ["found:", "  nothing"]


def test_a_distribution_of_packs_serves_and_computes(environment):
    environment.copy_flash_dmattn()
    path = environment.install("flash-dmattn-site", real_pack())
    report = environment.run("--json", "--selftest", "--verify")
    assert report["devices"][0]["pack"]["path"] == str(path)
    assert report["packs"][0]["source"] == f"flash-dmattn-site {VERSION}"
    assert report["selftest"]["passed"], report["selftest"]
    verified = [row["path"] for row in report["verification"]["files"]]
    assert os.path.realpath(path) in verified
    assert report["verification"]["passed"], report["verification"]
    assert report["exit_code"] == 0


def test_verification_leaves_the_name_of_the_installer_alone(environment):
    """conda replaces the INSTALLER file after pip has recorded its hash."""
    environment.copy_flash_dmattn()
    environment.install("flash-dmattn-site", real_pack())
    (installer,) = environment.site.glob("flash_dmattn_site-*.dist-info/INSTALLER")
    assert installer.name in (installer.parent / "RECORD").read_text()
    installer.write_text("conda")
    report = environment.run("--json", "--verify")
    assert report["verification"]["passed"], report["verification"]


def test_verification_finds_a_changed_byte(environment):
    environment.copy_flash_dmattn()
    path = environment.install("flash-dmattn-site", real_pack())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the padding or names of the section headers: the file still opens
    path.write_bytes(content)
    report = environment.run("--json", "--verify")
    assert report["devices"][0]["pack"]["path"] == str(path)
    assert report["exit_code"] == 3
    (wrong,) = [row for row in report["verification"]["files"] if row["problem"]]
    assert wrong["path"] == os.path.realpath(path)
    assert wrong["problem"].startswith("its sha256 is ")


@pytest.mark.parametrize("change", ["a byte", "the size", "nothing is left"])
def test_verification_finds_what_only_record_tells_of(environment, change):
    """The manifest describes only packs; other files are in RECORD alone."""
    environment.copy_flash_dmattn()
    module = environment.install("flash-dmattn-site", real_pack()).with_name("manifest.json")
    content = module.read_bytes()
    assert environment.run("--json", "--verify")["exit_code"] == 0
    if change == "a byte":
        module.write_bytes(content.replace(b", ", b",\n"))  # the same JSON in as many bytes
    elif change == "the size":
        module.write_bytes(content + b"\n")
    else:
        (module.parent / "__init__.py").unlink()
        module = module.with_name("__init__.py")
    report = environment.run("--json", "--verify")
    assert report["exit_code"] == 3
    (wrong,) = [row for row in report["verification"]["files"] if row["problem"]]
    assert wrong["path"] == os.path.realpath(module)
    reasons = {"a byte": "its sha256 is ", "the size": "it has ", "nothing is left": "the file is"}
    assert wrong["problem"].startswith(reasons[change])
    assert change == "nothing is left" or ", but RECORD says " in wrong["problem"]


def test_of_two_distributions_the_first_by_name_serves(environment):
    environment.copy_flash_dmattn()
    environment.install("flash-dmattn-b", real_pack())
    first = environment.install("flash-dmattn-a", real_pack())
    report = environment.run("--json")
    assert report["devices"][0]["pack"]["path"] == str(first)
    reasons = [candidate["reason"] for candidate in report["devices"][0]["candidates"]]
    note = f"flash-dmattn-a {VERSION} has a pack of the same name, which goes first"
    assert reasons == ["", note]


def test_the_own_pack_goes_before_a_distributions(environment):
    environment.copy_flash_dmattn(packs=True)
    environment.install("flash-dmattn-site", real_pack())
    report = environment.run("--json")
    assert report["devices"][0]["pack"]["path"] == str(
        environment.site / "flash_dmattn" / "packs" / "libflash_dmattn_cpu.so"
    )


def test_a_distribution_of_another_version_is_refused(environment):
    environment.copy_flash_dmattn()
    environment.install("flash-dmattn-site", real_pack(), version="0.1")
    report = environment.run("--json")
    assert report["exit_code"] == 1
    (candidate,) = report["devices"][0]["candidates"]
    assert candidate["reason"] == f"it is of version 0.1, flash_dmattn is {VERSION}"
    fix = f"install flash-dmattn-site=={VERSION} from where it came"
    assert report["devices"][0]["remedy"] == fix


def test_a_damaged_distribution_gives_way_to_the_next(environment, tmp_path):
    environment.copy_flash_dmattn()
    environment.install("flash-dmattn-a", write_foreign(tmp_path / "foreign.so", 8))
    second = environment.install("flash-dmattn-b", real_pack())
    report = environment.run("--json")
    assert report["devices"][0]["pack"]["path"] == str(second)
    assert "a better one is damaged" in report["devices"][0]["warning"]
    report = environment.run("--json", FLASH_DMATTN_FALLBACK="error")
    assert report["devices"][0]["pack"] is None
    assert report["exit_code"] == 1
