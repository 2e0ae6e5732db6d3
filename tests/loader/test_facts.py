# SPDX-License-Identifier: BSD-3-Clause
"""Facts of torch without importing it, and of GPUs of other vendors."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flash_dmattn.loader import facts, nvidia
from flash_dmattn.loader.facts import Device, Machine, Torch


@pytest.fixture(autouse=True)
def forgetful():
    facts._installed_torch.cache_clear()
    yield
    facts._installed_torch.cache_clear()


def torch_at(monkeypatch, folder):
    """Make a folder the installed, not imported torch; None removes it."""
    spec = None if folder is None else SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return Machine().torch()


def test_the_torch_that_is_installed_is_known_before_it_is_imported():
    code = (
        "import sys\n"
        "from flash_dmattn.loader.facts import Machine\n"
        "before = Machine().torch()\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(before == Machine().torch(), before.version == torch.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


def test_a_torch_of_rocm(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.9.0'\ncuda = None\nhip = '6.4'\n")
    found = torch_at(monkeypatch, tmp_path)
    assert found == Torch("2.9.0", None, rocm="6.4")
    assert str(found) == "2.9.0, ROCm 6.4"


@pytest.mark.parametrize("content", [None, "", "1 / 0", "?"])
def test_a_torch_that_cannot_be_read_is_none(monkeypatch, tmp_path, content):
    if content is not None:
        (tmp_path / "version.py").write_text(content)
    assert torch_at(monkeypatch, tmp_path) is None


def test_without_torch(monkeypatch):
    assert torch_at(monkeypatch, None) is None


@pytest.mark.parametrize(
    ("built", "text"),
    [
        ({"cuda": "13.0"}, "2.9.0, CUDA 13.0"),
        ({"cuda": None, "xpu": "20250101"}, "2.9.0, XPU 20250101"),
        ({"cuda": None}, "2.9.0, without CUDA"),
    ],
)
def test_what_a_torch_is_built_with_is_shown(built, text):
    assert str(Torch("2.9.0", **built)) == text


def test_the_torch_of_this_process_is_read_where_there_is_one():
    assert Machine().torch() == Torch(
        torch.__version__,
        torch.version.cuda,
        torch.version.hip,
        getattr(torch.version, "xpu", None),
    )


@pytest.mark.parametrize(
    ("built", "kind"), [({"rocm": "6.4"}, "cuda"), ({"xpu": "20250101"}, "xpu")]
)
def test_the_gpus_of_other_torches_are_torchs(monkeypatch, built, kind):
    def visible_devices():
        raise AssertionError("NVIDIA's driver does not know them")

    fake = SimpleNamespace(**{kind: SimpleNamespace(device_count=lambda: 2)})
    monkeypatch.setattr(nvidia, "visible_devices", visible_devices)
    monkeypatch.setattr(Machine, "torch", lambda self: Torch("2.11.0", None, **built))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert Machine().gpus() == (Device(kind, 0), Device(kind, 1))
    monkeypatch.setitem(sys.modules, "torch", None)  # broken
    assert Machine().gpus() == ()
