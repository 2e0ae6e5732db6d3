# SPDX-License-Identifier: BSD-3-Clause
"""GPUs of AMD and Intel have no packs: the triton backend is offered if torch sees one.

No such GPU is at hand: torch's modules of devices are replaced.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from flash_dmattn.backends import triton
from flash_dmattn.backends.triton import launch


def has(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Make torch see only GPUs of these kinds."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda kind=kind: kind in kinds)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_triton_computes_where_torch_sees_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm build of torch calls its GPUs cuda."""
    has(monkeypatch, kind)
    assert triton.why_unavailable(kind) is None
    assert triton.why_unavailable() is None
    other = {"cuda": "xpu", "xpu": "cuda"}[kind]
    assert triton.why_unavailable(other) == f"torch sees no {other} device"


def test_without_a_gpu_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch)
    assert triton.why_unavailable() == "torch sees no GPU"
    assert triton.why_unavailable("mps") == (
        "it runs on GPUs that torch calls cuda or xpu, not on mps"
    )


def test_kernels_start_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def device(wanted: torch.device) -> nullcontext[None]:
        asked.append(wanted)
        return nullcontext()

    monkeypatch.setattr(torch.xpu, "device", device)
    with launch.on_device(torch.device("xpu", 1)):
        assert asked == [torch.device("xpu", 1)]


@pytest.mark.parametrize(("kind", "count"), [("cuda", 132), ("xpu", 64)])
def test_sms_are_counted(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {
        "cuda": SimpleNamespace(multi_processor_count=132),
        "xpu": SimpleNamespace(gpu_subslice_count=64),
    }
    monkeypatch.setattr(
        getattr(torch, kind), "get_device_properties", lambda device: properties[device.type]
    )
    launch.sm_count.cache_clear()
    assert launch.sm_count(torch.device(kind)) == count
    launch.sm_count.cache_clear()
