# SPDX-License-Identifier: BSD-3-Clause
"""A fake machine, and packs that need no compiler."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from flash_dmattn import _core
from flash_dmattn.loader import Loader
from flash_dmattn.loader.facts import Device, Driver, Host, Torch
from flash_dmattn.loader.trial import Trials

VERSION = "2.0.0a1"
ABI_VERSION = _core.PACK_ABI_VERSION
TARGETS = Path(__file__).parents[2] / "cmake" / "targets.json"


@dataclass
class FakeFacts:
    """The facts of a machine with these devices."""

    devices: tuple[Device, ...] = ()
    driver_: Driver | None = None
    torch_: Torch | None = None
    version: str | None = VERSION
    host_: Host = field(default_factory=lambda: Host("x86_64", "glibc 2.35"))
    current: int = 0

    def package_version(self, distribution="flash-dmattn"):
        return self.version

    def host(self):
        return self.host_

    def torch(self):
        return self.torch_

    def driver(self):
        return self.driver_

    def gpus(self):
        return self.devices

    def after_fork(self):
        pass

    def current_cuda_device(self):
        return self.current


def row(name: str) -> dict[str, object]:
    """Return the manifest's row of a pack such as ``cpu`` or ``cu13-sm90``."""
    file = f"libflash_dmattn_{name.replace('-', '_')}.so"
    if name == "cpu":
        kind = {"device": "cpu", "cuda": None, "arch": None}
    else:
        major, arch = name.removeprefix("cu").split("-")
        cuda = {"12": "12.4", "13": "13.0"}.get(major, f"{major}.0")
        kind = {"device": "cuda", "cuda": cuda, "arch": arch}
    return {"name": name, "file": file, "machine": "x86_64", **kind}


def table_of(entry: dict[str, object], version: str) -> dict[str, object]:
    """Return the table of a manifest row's library."""
    major, minor = str(entry["cuda"] or "0.0").split(".")
    return {
        "name": entry["name"],
        "version": version,
        "compiler": "compiler 1.0",
        "features": "",
        "abi_version": ABI_VERSION,
        "device_type": 1 if entry["device"] == "cpu" else 2,
        "cuda_version": int(major) * 1000 + int(minor) * 10,
        "arch": int(str(entry["arch"] or "sm0").removeprefix("sm")),
    }


def write_packs(directory: Path, *names: str, version: str = VERSION, **manifest: object) -> Path:
    """Write a manifest and, as each library, the table that `open_pack` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [row(name) for name in names]
    for entry in rows:
        (directory / str(entry["file"])).write_text(json.dumps(table_of(entry, version)))
    content = {"schema": 1, "version": version, "abi_version": ABI_VERSION, "packs": rows}
    (directory / "manifest.json").write_text(json.dumps({**content, **manifest}))
    return directory


def open_pack(path: str):
    """Open a library of `write_packs`; other files fail as in the core's load_pack."""
    try:
        return SimpleNamespace(path=path, **json.loads(Path(path).read_text()))
    except ValueError:
        raise RuntimeError(f"{path}: dlopen failed: invalid ELF header") from None


class Installation:
    """A fake installation: its packs, other distributions, environment and loader."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.facts = FakeFacts()
        self.environ: dict[str, str] = {}
        self.entry_points: list[object] = []
        self.opened: list[str] = []
        self.tried: list[tuple[str, str]] = []
        self.on_trial = lambda pack: ""
        root.mkdir(parents=True, exist_ok=True)
        (root / "targets.json").write_text(TARGETS.read_text())

    @property
    def packs(self) -> Path:
        return self.root / "packs"

    def forget_runs(self, capability: str) -> None:
        """Make the table record that no GPU ran the kernels for a compute capability."""
        path = self.root / "targets.json"
        table = json.loads(path.read_text())
        table["record"][capability] = "none"
        path.write_text(json.dumps(table))

    def write(self, *names: str, **options: object) -> None:
        """Add packs to the installation."""
        write_packs(self.packs, *names, **options)

    def distribute(self, distribution: str, *names: str, version: str = VERSION) -> Path:
        """Add packs to another distribution."""
        directory = write_packs(self.root.parent / distribution, *names, version=version)
        self.add_entry_point(distribution, lambda: directory, version)
        return directory

    def add_entry_point(self, distribution: str, load, version: str = VERSION) -> None:
        dist = SimpleNamespace(name=distribution, version=version)
        self.entry_points.append(SimpleNamespace(name=distribution, dist=dist, load=load))

    def gpus(self, *capabilities: str, driver: str = "580.65.06", runs: str = "13.0") -> None:
        """Add GPUs to the machine."""
        self.facts.devices = tuple(
            Device("cuda", index, f"GPU {capability}", capability)
            for index, capability in enumerate(capabilities)
        )
        self.facts.driver_ = Driver(driver, runs)

    def use_torch(self, cuda: str | None) -> None:
        self.facts.torch_ = Torch("2.11.0", cuda)

    def set_up(self, *packs: str, gpu: str, torch: str | None = "unknown", **driver: str) -> None:
        """Add packs and a GPU, and a torch if it is named."""
        self.write(*packs)
        self.gpus(gpu, **driver)
        if torch != "unknown":
            self.use_torch(torch)

    def loader(self) -> Loader:
        def opening(path: str):
            self.opened.append(path)
            return open_pack(path)

        return Loader(
            self.facts,
            opening,
            lambda: ABI_VERSION,
            lambda: [self.root],
            lambda: self.entry_points,
            self.environ,
            Trials(self.self_test, self.root.parent / "cache"),
        )

    def self_test(self, pack, device: str) -> str:
        """Record the call of a pack's self-test and return the test's answer."""
        self.tried.append((pack.name, device))
        return self.on_trial(pack)


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path / "flash_dmattn")
