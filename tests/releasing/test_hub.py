# SPDX-License-Identifier: BSD-3-Clause
"""A repository for Hugging Face's kernels hub: built from a wheel of the package under test, and
loaded by the hub's own loader where flash-dmattn is installed too.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from pack_files import listed_pack, package_files, real_pack
from release.__main__ import main
from release.distributions import Wheel
from release.wheel_files import write_wheel

VERSION = metadata.version("flash-dmattn")
LINKED_CORE = "flash_dmattn/_core.cpython-"
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"

# Results of the loaded package while another one is installed.
CALLS = """
import sys
from pathlib import Path

import torch
import flash_dmattn as installed
from kernels import get_local_kernel

before = installed.flash_dmattn_func(*torch.ones(3, 1, 2, 1, 8))
folder = Path(sys.argv[1])
hub = get_local_kernel(folder, backend="cpu")
assert hub is not installed and hub.__name__ == sys.argv[2], hub.__name__
assert hub.flash_dmattn_func is not installed.flash_dmattn_func
assert hub.__version__ == installed.__version__

torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 70, 2, 40, requires_grad=True)
bias = torch.randn(1, 2, 1, 70, requires_grad=True)
tensors = (query, key, value, bias)


def gradients(module, function):
    out = function(query, key, value, None, bias, is_causal=True, window_size=16)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


expected = gradients(installed, installed.flash_dmattn_func)
for function in (hub.flash_dmattn_func, torch.compile(hub.flash_dmattn_func, backend="eager")):
    for ours, theirs in zip(gradients(hub, function), expected, strict=True):
        assert torch.equal(ours, theirs)
assert hub.explain(query, key, value, backend="cpu")
operators = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
names = {space for space, _, _ in operators if "dmattn" in space}
assert names == {"flash_dmattn", hub.__name__}, names
mask = hub.dynamic_mask(bias.detach(), 16, True)
assert type(mask).__module__.startswith(hub.__name__), type(mask)

from importlib import import_module
layer = import_module(hub.__name__ + ".modules").DynamicMaskAttention
assert layer.__module__.startswith(hub.__name__)
"""

# The loader compares the recorded hashes of every variant.
HASHES = """
import sys
from pathlib import Path

from kernels._rust import Digest, DigestAlgorithm, Metadata

for folder in (Path(sys.argv[1]) / "build").iterdir():
    recorded = Metadata.read_from_file(folder / "metadata.json").digest
    recorded.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
"""

# No module of the build may import an installed package: every one is imported without it.
ALONE = """
import importlib
import importlib.util
import pkgutil
import sys


class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "flash_dmattn":
            raise ImportError(f"{name} is asked for")


sys.meta_path.insert(0, Refuses())
folder, name = sys.argv[1:]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
sys.modules[name] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
count = 0
for module in pkgutil.walk_packages(package.__path__, name + "."):
    if not module.name.endswith((".__main__", ".flash_dmattn")):
        importlib.import_module(module.name)
        count += 1
assert count > 100, count
assert package.__version__ == sys.modules[name + ".lazy_names"].look_up("__version__")
print(package.flash_dmattn_func)
"""

OLDER = """
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("older", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.flash_dmattn_func.__module__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel for this Python; its GPU packs are not libraries."""
    files = package_files()
    files.pop("flash_dmattn/_core.abi3.so", None)
    if "FDM_LINKED_WHEEL" in os.environ:
        linked = Wheel.read(Path(os.environ["FDM_LINKED_WHEEL"])).contents
        files |= {name: linked[name] for name in linked if name.startswith(LINKED_CORE)}
    if not any(name.startswith(LINKED_CORE) for name in files):
        pytest.skip("the module under test is that of a release; scripts/test_hub builds another")
    source = Path(real_pack())
    manifest = json.loads((source.parent / "manifest.json").read_text())
    rows = [row for row in manifest["packs"] if row["device"] == "cpu"]
    files[f"flash_dmattn/packs/{rows[0]['file']}"] = source.read_bytes()
    for name in ("cu12-sm80", "cu13-sm90", "cu13-sm100"):
        rows.append(listed_pack(name, f"pack {name}".encode()))
        files[f"flash_dmattn/packs/{rows[-1]['file']}"] = f"pack {name}".encode()
    files["flash_dmattn/packs/manifest.json"] = json.dumps({**manifest, "packs": rows}).encode()
    head = f"Metadata-Version: 2.4\nName: flash-dmattn\nVersion: {VERSION}\n"
    files[f"flash_dmattn-{VERSION}.dist-info/METADATA"] = head.encode()
    folder = tmp_path_factory.mktemp("wheel")
    tag = f"{TAG}-{TAG}-linux_{platform.machine()}"
    return write_wheel(folder / f"flash_dmattn-{VERSION}-{tag}.whl", files)


@pytest.fixture(scope="module")
def repository(wheel: Path) -> Path:
    output = wheel.parent / "hub"
    assert main(["hub", str(wheel), "--output", str(output), "--number", "3"]) == 0
    return output


def described(repository: Path, backend: str) -> dict[str, object]:
    (folder,) = (repository / "build").glob(f"torch-stable-abi26-{backend}-*-linux")
    content: dict[str, object] = json.loads((folder / "metadata.json").read_text())
    return content


def ran(script: str, *arguments: object) -> str:
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error::RuntimeWarning"}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=settings,
    )
    assert done.returncode == 0, done.stderr
    assert "already registered" not in done.stderr, done.stderr
    return done.stdout


def test_each_kind_of_device_has_a_variant(repository: Path) -> None:
    machine = platform.machine()
    names = sorted(path.name for path in (repository / "build").iterdir())
    assert names == [
        f"torch-stable-abi26-{backend}-{machine}-linux" for backend in ("cpu", "cu120", "cu130")
    ]
    backends = {name: described(repository, name)["backend"] for name in ("cpu", "cu120", "cu130")}
    assert backends == {
        "cpu": {"type": "cpu"},
        "cu120": {"type": "cuda", "archs": ["8.0"]},
        "cu130": {"type": "cuda", "archs": ["9.0a", "10.0f"]},
    }
    assert len({str(described(repository, name)["id"]) for name in backends}) == 3
    assert {described(repository, name)["version"] for name in backends} == {3}


def test_a_variant_has_its_packs_and_no_others(repository: Path) -> None:
    for backend, packs in (("cpu", ["cpu"]), ("cu130", ["cpu", "cu13-sm90", "cu13-sm100"])):
        (folder,) = (repository / "build").glob(f"*-{backend}-*")
        rows = json.loads((folder / "packs" / "manifest.json").read_text())["packs"]
        assert [row["name"] for row in rows] == packs
        assert {path.name for path in (folder / "packs").iterdir()} == {
            "manifest.json",
            *(row["file"] for row in rows),
        }


def test_nothing_in_it_asks_for_the_installed_package(repository: Path) -> None:
    (folder,) = (repository / "build").glob("*-cpu-*")
    assert "flash_dmattn_func" in ran(ALONE, folder, described(repository, "cpu")["id"])


@pytest.mark.skipif(find_spec("kernels") is None, reason="scripts/test_hub brings the loader")
@pytest.mark.parametrize("script", [CALLS, HASHES], ids=["calls", "hashes"])
def test_the_loader_of_the_hub_takes_it(repository: Path, script: str) -> None:
    ran(script, repository, described(repository, "cpu")["id"])


def test_older_loaders_find_the_same_package(repository: Path) -> None:
    (folder,) = (repository / "build").glob("*-cpu-*")
    name = described(repository, "cpu")["id"]
    assert ran(OLDER, folder / "flash_dmattn" / "__init__.py").strip() == f"{name}.interface"


def test_wheels_that_do_not_go_together_are_refused(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "hub")]
    assert main(["hub", str(wheel), str(wheel), *output]) == 1
    assert "the same Python" in capsys.readouterr().err
    contents = Wheel.read(wheel).contents
    core = next(name for name in contents if name.startswith(LINKED_CORE))
    without = {name: content for name, content in contents.items() if name != core}
    shared = write_wheel(tmp_path / wheel.name, without | {"flash_dmattn/_core.abi3.so": b""})
    assert main(["hub", str(shared), *output]) == 1
    assert "FDM_NANOBIND=linked" in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()
