# SPDX-License-Identifier: BSD-3-Clause
"""Calls on streams of their own: ordered within the stream, unordered across streams."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drawn.calls import Call, assert_same_bits
from support import HALF_TYPES

from .kinds import KINDS, Draw

# Cycles of a spinning kernel: about 10 ms and about 1 s on GPUs of 1 to 2 GHz.
SHORT, LONG = 20_000_000, 2_000_000_000


def blank(tensor: Tensor) -> Tensor:
    """Return a tensor of zeros with the same strides."""
    storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="cuda")
    storage.zero_()
    same = torch.empty(0, dtype=tensor.dtype, device="cuda").set_(storage.untyped_storage())
    return same.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("results_of", [Call.results, Call.results_alone])
def test_work_stays_in_the_order_of_its_stream(
    results_of: Callable[..., dict[str, Tensor]], kind: str, gpu: str, seed: int
) -> None:
    """The inputs are written late and the results overwritten early, on the same stream."""
    call = KINDS[kind](Draw(seed, HALF_TYPES[seed % 2])).to(gpu)
    want = results_of(call, deterministic=True)
    late = call.mapped(blank)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SHORT)
        late.copy_(call)
        results = results_of(late, deterministic=True)
        got = {name: result.clone() for name, result in results.items()}
        for tensor in (*late.tensors(), *results.values()):
            tensor.zero_()
    torch.cuda.synchronize()
    assert_same_bits(got, want)


def test_does_not_wait_for_the_default_stream(gpu: str, seed: int) -> None:
    calls = [KINDS[kind](Draw(seed, HALF_TYPES[seed % 2])).to(gpu) for kind in KINDS]
    wanted = [call.results(deterministic=True) for call in calls]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # one-time allocations
        for call in calls:
            call.results(deterministic=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    default = torch.cuda.Event()
    default.record()
    with torch.cuda.stream(side):
        results = [call.results(deterministic=True) for call in calls]
    side.synchronize()
    assert not default.query(), "the side stream has waited, or took longer than a second"
    for got, want in zip(results, wanted, strict=True):
        assert_same_bits(got, want)


def test_two_threads_with_a_stream_each(gpu: str, seed: int) -> None:
    calls = [KINDS[kind](Draw(seed, HALF_TYPES[seed % 2])).to(gpu) for kind in KINDS]
    wanted = [call.results(deterministic=True) for call in calls]
    torch.cuda.synchronize()
    together = threading.Barrier(2)

    def work(ordered: list[tuple[Call, dict[str, Tensor]]]) -> None:
        together.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                for call, want in ordered:
                    assert_same_bits(call.results(deterministic=True), want)

    forwards = list(zip(calls, wanted, strict=True))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, forwards), pool.submit(work, forwards[::-1])]:
            done.result()


def test_a_new_thread_takes_the_same_kernels(gpu: str, seed: int) -> None:
    """The pack makes the thread's first CUDA call, since memory comes from PyTorch's cache."""
    call = KINDS["no_mask"](Draw(seed, HALF_TYPES[seed % 2])).to(gpu)
    want = call.results(deterministic=True)
    call.results(deterministic=True)  # frees memory that the thread's call reuses
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        got = pool.submit(call.results, deterministic=True).result()
    assert_same_bits(got, want)
