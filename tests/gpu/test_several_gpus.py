# SPDX-License-Identifier: BSD-3-Clause
"""Tensors that are not on the current device, or on several devices."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from torch import Tensor

from drawn.judge import expected
from flash_dmattn import IntervalMask, dynamic_mask
from support import HALF_TYPES

from .kinds import KINDS, Draw


def device_of_the_driver() -> int:
    """Return the device of this thread's CUDA context, which torch does not track."""
    device = ctypes.c_int(-1)
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetDevice(ctypes.byref(device)) == 0
    return device.value


@pytest.mark.parametrize("current", [0, 1])
def test_tensors_on_another_device(
    kind: str, current: int, two_gpus: tuple[str, str], seed: int
) -> None:
    call = KINDS[kind](Draw(seed, HALF_TYPES[seed % 2]))
    with torch.cuda.device(current):
        torch.empty(1, device=two_gpus[current])
        before = device_of_the_driver()
        got = call.to(two_gpus[1 - current]).results()
        assert {t.device for t in got.values()} == {torch.device(two_gpus[1 - current])}
        assert torch.cuda.current_device() == current
        assert device_of_the_driver() == before == current
    expected(call).check(got)


def test_stream_of_another_device(two_gpus: tuple[str, str], seed: int) -> None:
    call = KINDS["window"](Draw(seed, torch.bfloat16))
    placed = call.to(two_gpus[1])
    late = placed.mapped(torch.zeros_like)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(torch.cuda.Stream(1)):
        torch.cuda._sleep(20_000_000)
        late.copy_(placed)
        got = late.results()
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    expected(call).check(got)


def check_refused(kind: str, name: str, device: str, other: str, seed: int) -> None:
    call = KINDS[kind](Draw(seed, torch.float16)).to(device)
    value = getattr(call, name)
    elsewhere = value.to(other)
    with pytest.raises(ValueError, match=rf"on query's device.* got a tensor on {other}"):
        dataclasses.replace(call, **{name: elsewhere}).results()


OTHERS = [
    ("key_mask", "key"),
    ("key_mask", "value"),
    ("key_mask", "mask"),
    ("row_mask", "mask"),
    ("intervals", "mask"),
    ("key_mask", "bias"),
    ("packed_causal", "cu_seqlens_q"),
    ("packed_causal", "cu_seqlens_k"),
    ("paged", "block_table"),
]


@pytest.mark.parametrize("kind, name", OTHERS)
def test_tensors_on_two_gpus_are_refused(
    kind: str, name: str, two_gpus: tuple[str, str], seed: int
) -> None:
    check_refused(kind, name, *two_gpus, seed)


@pytest.mark.parametrize("kind, name", OTHERS)
def test_tensors_on_a_gpu_and_a_cpu_are_refused(kind: str, name: str, gpu: str, seed: int) -> None:
    check_refused(kind, name, gpu, "cpu", seed)


def test_selection_on_another_device(two_gpus: tuple[str, str], seed: int) -> None:
    bias = Draw(seed, torch.float16).randn(2, 3, 1, 500)
    got = dynamic_mask(bias.to(two_gpus[1]), 40, True)
    assert isinstance(got, IntervalMask)
    assert got.device == torch.device(two_gpus[1])
    assert torch.cuda.current_device() == 0
    want = dynamic_mask(bias, 40, True, backend="reference")
    assert torch.equal(got.to_bool(500).cpu(), want.to_bool(500))
    mask: Tensor = torch.ones(2, 1, 1, 500, dtype=torch.bool, device=two_gpus[0])
    with pytest.raises(ValueError, match=r"attention_mask must be on .* device"):
        dynamic_mask(bias.to(two_gpus[1]), 40, True, mask)
