# SPDX-License-Identifier: BSD-3-Clause
"""The named sets of cases, in sizes for a GPU and smaller ones for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .cases import Case
from .quantities import DECODE_QUANTITIES
from .workloads import Workload, WorkloadSet

_DENSE = ("dense_flash", "dense_cudnn")
_REFERENCES = (*_DENSE, "compact_flash", "compact_cudnn")
_MASKED = ("intervals", "key_mask", "boolean", *_REFERENCES, "sdpa", "sdpa_expanded")
# On CPUs SDPA has two backends, and chooses its FlashAttention wherever no mask needs a gradient.
_CPU_SDPA = ("sdpa_expanded", "sdpa_gqa", "sdpa")
_CPU_REFERENCES = ("dense_flash", "compact_flash")


def _set(about: str, workloads: Iterable[Workload], quick: Sequence[str] = ()) -> WorkloadSet:
    return WorkloadSet(about, {workload.name: workload for workload in workloads}, tuple(quick))


def _doubling(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << step for step in range((last // first).bit_length()))


def _standard(case: Case, name: str, *contestants: str, **changes: Any) -> Workload:
    return Workload(replace(case, name=name, **changes), contestants)


def _decode(case: Case, *contestants: str) -> Workload:
    # The only query sees every key, so this is what causal attention does.
    case = replace(case, name="decode-64k", length=65536, causal=False, queries=1)
    return Workload(case, contestants, DECODE_QUANTITIES)


_GPU_CASE = Case(
    "", "bfloat16", heads=32, kv_heads=8, head_dim=128, length=8192, window=1024, device="cuda"
)
_ONE_GROUP = {"heads": 2, "kv_heads": 1}
_gpu = partial(_standard, _GPU_CASE)
GPU = _set(
    "every kind of mask at the shapes of today's models; the bars are of these",
    [
        # FlexAttention compiles for up to a minute a shape: on one shape, unless asked for.
        _gpu("heads32-8k", *_MASKED, "flex"),
        _gpu("heads16-16k", *_MASKED, heads=16, kv_heads=2, length=16384, window=2048),
        _gpu("heads2-32k", *_MASKED, **_ONE_GROUP, length=32768),
        _gpu("heads2-16k-d64", *_MASKED, **_ONE_GROUP, head_dim=64, length=16384),
        _gpu("dense-8k", "no_mask", *_DENSE, window=None),
        *(
            _gpu(f"growth-{n}k", "intervals", *_REFERENCES, heads=8, kv_heads=2, length=n << 10)
            for n in (8, 16, 32, 64)
        ),
        replace(_gpu("selection-32k", "intervals", length=32768), quantities=("selection",)),
        _decode(_GPU_CASE, "key_mask", *_REFERENCES, "sdpa"),
    ],
    quick=("heads32-8k", "dense-8k", "decode-64k"),
)

_CPU_CASE = Case("", window=256)
_cpu = partial(_standard, _CPU_CASE)
_CPU_MASKED = ("intervals", "key_mask", "boolean", *_CPU_REFERENCES, *_CPU_SDPA, "sdpa_augmented")
_cpu_dense = partial(_cpu, window=None)
CPU = _set(
    "masked and dense attention at 4096 tokens, growth and decoding; the bars are of these",
    [
        _cpu("masked-4k", *_CPU_MASKED),
        *(
            _cpu_dense(f"dense-4k-{dtype}{end}", "no_mask", *_CPU_SDPA, dtype=dtype, causal=not end)
            for dtype in ("float32", "float16", "bfloat16")
            for end in ("", "-full")
        ),
        *(
            _cpu(
                f"growth-{n}k",
                "intervals",
                *_CPU_REFERENCES,
                *(["sdpa"] if n <= 4 else []),
                length=n << 10,
            )
            for n in (1, 2, 4, 8)
        ),
        _decode(_CPU_CASE, "key_mask", *_CPU_REFERENCES, "sdpa"),
    ],
    quick=("masked-4k", "dense-4k-float32", "decode-64k"),
)


@dataclass(frozen=True)
class Sizes:
    """How large the sweeps of flash-dmattn 1.2.2's performance scripts are taken.

    ``at`` is the length of the sweeps over batches and heads. What compiles, runs at that length
    only, since each shape costs up to a minute.
    """

    dtype: str
    window: int
    at: int
    lengths: int  # from 256 on
    windows_at: int
    dims_at: int
    decode_lengths: int | None
    contestants: tuple[str, ...]
    compiled: tuple[str, ...] = ()


_ON_GPU = ("boolean", *_REFERENCES, "sdpa", "sdpa_math", "sdpa_efficient", "sdpa_cudnn")
_ON_CPU = ("boolean", *_CPU_REFERENCES, "sdpa", "sdpa_math", "sdpa_flash")
_GPU_FORWARD = Sizes("bfloat16", 1024, 4096, 32768, 32768, 4096, 524288, _ON_GPU, ("flex",))
_CPU_FORWARD = Sizes("float32", 256, 1024, 4096, 2048, 1024, 65536, _ON_CPU)
_GPU_BACKWARD = replace(
    _GPU_FORWARD, lengths=16384, windows_at=16384, dims_at=16384, decode_lengths=None
)
_CPU_BACKWARD = replace(_CPU_FORWARD, lengths=2048, windows_at=1024, decode_lengths=None)
_FORWARD = ("selection", "forward", "forward_with_mask", "memory_forward")
_BACKWARD = ("selection", "backward", "forward_backward", "end_to_end", "memory_with_mask")


def _sweeps(sizes: Sizes) -> Iterator[Case]:
    """1.2.2's configurations; the sweeps that say most come first."""
    base = Case(
        "", sizes.dtype, heads=2, kv_heads=1, length=sizes.at, window=sizes.window, per_query=True
    )
    for length in _doubling(256, sizes.lengths):
        yield replace(base, name=f"length-{length}", length=length)
    for window in _doubling(32, sizes.windows_at):
        yield replace(base, name=f"window-{window}", length=sizes.windows_at, window=window)
    for length in _doubling(256, sizes.decode_lengths or 0):
        yield replace(base, name=f"decode-{length}", length=length, queries=1, causal=False)
    for head_dim in (32, 64, 96, 128, 192, 256):
        yield replace(base, name=f"dim-{head_dim}", length=sizes.dims_at, head_dim=head_dim)
    for heads, kv_heads in ((1, 1), (2, 1), (4, 1), (8, 2)):
        yield replace(base, name=f"heads-{heads}x{kv_heads}", heads=heads, kv_heads=kv_heads)
    for batch in (1, 2, 4, 8):
        yield replace(base, name=f"batch-{batch}", batch=batch)


def _legacy(script: str, sizes: Sizes, quantities: tuple[str, ...]) -> WorkloadSet:
    workloads = []
    for case in _sweeps(sizes):
        decode = case.queries is not None
        contestants = ("key_mask", *sizes.contestants[1:]) if decode else sizes.contestants
        if case.name == f"length-{sizes.at}":
            contestants = (*contestants, *sizes.compiled)
        workloads.append(Workload(case, contestants, DECODE_QUANTITIES if decode else quantities))
    about = f"the sweeps of 1.2.2's {script}_performance script, a bias for each query and key"
    quick = [w.name for w in workloads if w.name.startswith(("length-", "window-"))]
    return _set(about, workloads, quick)


def density_map(
    gpu: bool, lengths: Sequence[int] | None = None, one_in: Sequence[int] | None = None
) -> WorkloadSet:
    """Lengths by shares of kept keys; ``one_in``: of so many keys one is kept.

    Ours is the whole call: the selection from a trainable bias, the plan and the attention. Dense
    attention has no mask and no bias, so that PyTorch's fused kernels serve it.
    """
    case = _GPU_CASE if gpu else _CPU_CASE
    workloads = []
    for length in lengths or _doubling(*((1024, 65536) if gpu else (512, 8192))):
        dense = replace(case, name=f"map-{length}-dense", length=length, window=None)
        theirs = _DENSE if gpu else _CPU_SDPA
        workloads.append(Workload(dense, theirs, ("forward", "forward_backward")))
        for share in one_in or _doubling(1, 64):
            kept = replace(dense, name=f"map-{length}-{share}", window=max(1, length // share))
            workloads.append(Workload(kept, ("intervals",), ("forward_with_mask", "end_to_end")))
    about = "where the whole call is faster than dense attention, by length and kept share"
    return _set(about, workloads)


_SETS: dict[str, Callable[[bool], WorkloadSet]] = {
    "standard": lambda gpu: GPU if gpu else CPU,
    "legacy-forward": lambda gpu: _legacy(
        "forward", _GPU_FORWARD if gpu else _CPU_FORWARD, _FORWARD
    ),
    "legacy-backward": lambda gpu: _legacy(
        "backward", _GPU_BACKWARD if gpu else _CPU_BACKWARD, _BACKWARD
    ),
    "map": density_map,
}
SET_NAMES = tuple(_SETS)


def workload_set(name: str, device: str) -> WorkloadSet:
    """The set of this name, in the sizes for a torch device such as ``cpu`` or ``cuda:0``."""
    return _SETS[name](device.startswith("cuda"))
