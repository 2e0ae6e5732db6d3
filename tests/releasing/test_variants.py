# SPDX-License-Identifier: BSD-3-Clause
"""A base wheel and wheels of one CUDA major's packs: pip installs each combination, and the
package's own report checks it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from flash_dmattn.loader.candidates import ENTRY_POINT_GROUP
from pack_files import listed_pack, package_files, real_pack
from release.__main__ import main
from release.distributions import Wheel, sha256
from release.project import ROOT, abi_version
from release.wheel_files import write_wheel

VERSION = metadata.version("flash-dmattn")
INFO = f"flash_dmattn-{VERSION}.dist-info"
TAG = f"cp310-abi3-linux_{platform.machine()}"
GPU_PACKS = ("cu12-sm80", "cu12-sm90", "cu13-sm80", "cu13-sm90")


def manifest(rows: list[dict[str, Any]]) -> bytes:
    head = {"schema": 1, "version": VERSION, "abi_version": abi_version()}
    return json.dumps({**head, "packs": rows}).encode()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of the package under test; its GPU packs are not libraries."""
    files = package_files()
    files.setdefault("flash_dmattn/_core.abi3.so", b"the core")  # a linked core has another name
    libraries = {"cpu": real_pack().read_bytes()}
    libraries |= {name: f"pack {name}".encode() for name in GPU_PACKS}
    rows = [listed_pack(name, content) for name, content in libraries.items()]
    for pack in rows:
        files[f"flash_dmattn/packs/{pack['file']}"] = libraries[pack["name"]]
    files["flash_dmattn/packs/manifest.json"] = manifest(rows)
    head = f"Metadata-Version: 2.4\nName: flash-dmattn\nVersion: {VERSION}\n"
    files[f"{INFO}/METADATA"] = head.encode()
    files[f"{INFO}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: false\nTag: {TAG}\n\n".encode()
    )
    folder = tmp_path_factory.mktemp("whole")
    return write_wheel(folder / f"flash_dmattn-{VERSION}-{TAG}.whl", files)


@pytest.fixture(scope="module")
def variants(whole: Path) -> dict[str, Path]:
    """Return the variant wheels by distribution name; the base is ``base``."""
    output = whole.parent / "variants"
    assert main(["variants", str(whole), "--output", str(output)]) == 0
    names = {path: path.name.partition("-")[0].replace("_", "-") for path in output.iterdir()}
    return {"base" if name == "flash-dmattn" else name: path for path, name in names.items()}


def test_the_parts_are_the_whole(whole: Path, variants: dict[str, Path]) -> None:
    before = {row["name"]: row["sha256"] for row in Wheel.read(whole).packs}
    assert sorted(variants) == ["base", "flash-dmattn-cu12", "flash-dmattn-cu13"]
    assert [row["name"] for row in Wheel.read(variants["base"]).packs] == ["cpu"]
    after = {"cpu": before["cpu"]}
    for name in ("flash-dmattn-cu12", "flash-dmattn-cu13"):
        contents = Wheel.read(variants[name]).contents
        module = name.replace("-", "_")
        for pack in json.loads(contents[f"{module}/manifest.json"])["packs"]:
            after[pack["name"]] = hashlib.sha256(contents[f"{module}/{pack['file']}"]).hexdigest()
            assert pack["name"].startswith(name.removeprefix("flash-dmattn-"))
    assert after == before


def test_an_installer_prefers_the_base(whole: Path, variants: dict[str, Path]) -> None:
    from packaging.utils import parse_wheel_filename

    builds = [parse_wheel_filename(path.name)[2] for path in (whole, variants["base"])]
    assert builds == [(), (1, "base")]
    assert b"\nBuild: 1base\n" in Wheel.read(variants["base"]).contents[f"{INFO}/WHEEL"]


def test_equal_inputs_give_equal_bytes(
    whole: Path, variants: dict[str, Path], tmp_path: Path
) -> None:
    assert main(["variants", str(whole), "--output", str(tmp_path)]) == 0
    assert {p.name: sha256(p) for p in tmp_path.iterdir()} == {
        p.name: sha256(p) for p in variants.values()
    }


def test_the_base_carries_the_bill_of_what_it_holds(variants: dict[str, Path]) -> None:
    wheel = Wheel.read(variants["base"])
    bill = json.loads(wheel.contents[f"{INFO}/sboms/flash-dmattn.cdx.json"])
    digests = {part["name"]: part["hashes"][0]["content"] for part in bill["components"]}
    assert digests == {
        name: hashlib.sha256(wheel.contents[f"flash_dmattn/{folder}{name}"]).hexdigest()
        for folder, name in (("", "_core.abi3.so"), ("packs/", "libflash_dmattn_cpu.so"))
    }


def test_metadata_of_the_packs(variants: dict[str, Path]) -> None:
    with zipfile.ZipFile(variants["flash-dmattn-cu13"]) as archive:
        info = zipfile.Path(archive, f"flash_dmattn_cu13-{VERSION}.dist-info/")
        text = (info / "METADATA").read_text()
        assert f"\nRequires-Dist: flash-dmattn=={VERSION}\n" in text
        assert (info / "entry_points.txt").read_text() == (
            f"[{ENTRY_POINT_GROUP}]\nflash-dmattn-cu13 = flash_dmattn_cu13\n"
        )
        licence = info / "licenses" / "LICENSE.cuda-runtime"
        assert licence.read_bytes() == (ROOT / "LICENSE.cuda-runtime").read_bytes()
        bill = json.loads((info / "sboms" / "flash-dmattn.cdx.json").read_text())
        linked = [part["name"] for part in bill["components"][0]["components"]]
        assert linked == ["libstdc++", "libgcc", "CUDA runtime (cudart_static)"]


def folder_of_packs(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    rows = [listed_pack(name, name.encode()) for name in names]
    for pack in rows:
        (folder / pack["file"]).write_bytes(pack["name"].encode())
    (folder / "manifest.json").write_bytes(manifest(rows))
    return folder


def test_a_folder_of_packs_becomes_a_wheel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of_packs(tmp_path / "packs", ("cu13-sm90",))
    assert main(["variants", str(folder), "--output", str(tmp_path / "dist")]) == 0
    name = f"flash_dmattn_cu13-{VERSION}-py3-none-linux_{platform.machine()}.whl"
    assert capsys.readouterr().out == f"{tmp_path / 'dist' / name}\n"


@pytest.mark.parametrize("names", [("cu12-sm80", "cu13-sm80"), ("cpu",)])
def test_packs_of_another_number_of_cudas_are_refused(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of_packs(tmp_path / "packs", names)
    assert main(["variants", str(folder), "--output", str(tmp_path / "dist")]) == 1
    assert "must hold packs of one CUDA major" in capsys.readouterr().err


COMBINATIONS = [
    (base, *packs)
    for base in ("base", "whole")
    for count in range(3)
    for packs in itertools.combinations(("flash-dmattn-cu12", "flash-dmattn-cu13"), count)
]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_the_report_lists_what_is_installed(
    names: tuple[str, ...], whole: Path, variants: dict[str, Path], tmp_path: Path
) -> None:
    wheels = [{**variants, "whole": whole}[name] for name in names]
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", site, *wheels], check=True)
    report = report_of(site)
    sources = {"whole": "flash_dmattn", "base": "flash_dmattn"}
    expected = [("cpu", "flash_dmattn")]
    for name in names:
        source = sources.get(name, f"{name} {VERSION}")
        expected += [
            (pack, source)
            for pack in GPU_PACKS
            if name == "whole" or f"-{pack.partition('-')[0]}" in name
        ]
    assert [(pack["name"], pack["source"]) for pack in report["packs"]] == expected
    assert report["verification"]["passed"], report["verification"]
    assert report["devices"][0]["pack"]["name"] == "cpu"


def report_of(site: Path) -> dict[str, Any]:
    """Return the report of a folder's packages without any other copy of this project."""
    backend = importlib.util.find_spec("nanobind_backend")
    if backend is not None and backend.origin is not None:  # a linked module needs none
        shutil.copytree(Path(backend.origin).parent, site / "nanobind_backend", dirs_exist_ok=True)
    # With -S, no .pth file can put the package under test before the installed one.
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(site)!r})\n"
        "sys.argv[1:] = ['--json', '--verify']\n"
        "runpy.run_module('flash_dmattn', run_name='__main__')"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_DMATTN_")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report
