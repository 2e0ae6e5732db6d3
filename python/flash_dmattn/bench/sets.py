# SPDX-License-Identifier: BSD-3-Clause
"""The named sets of cases, in sizes for a GPU and smaller ones for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .cases import Case
from .workloads import DECODE_QUANTITIES, Workload, WorkloadSet

_DENSE = ("dense_flash", "dense_cudnn")
_REFERENCES = (*_DENSE, "compact_flash", "compact_cudnn")
_MASKED = ("intervals", "key_mask", "boolean", *_REFERENCES, "sdpa", "sdpa_expanded")
_SDPA_BACKENDS = ("sdpa", "sdpa_math", "sdpa_efficient", "sdpa_cudnn")
# On CPUs SDPA has two backends, and chooses its FlashAttention wherever no mask needs a gradient.
_CPU_SDPA = ("sdpa_expanded", "sdpa_gqa", "sdpa")
_CPU_REFERENCES = ("dense_flash", "compact_flash")


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


def _thousands(length: int) -> str:
    return f"{length // 1024}k"


def _gpu(name: str, heads: int, kv_heads: int, head_dim: int, length: int, w: int | None) -> Case:
    return Case(
        name=name,
        dtype="bfloat16",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        length=length,
        window=w,
        device="cuda",
    )


GPU = WorkloadSet(
    "every kind of mask at the shapes of today's models; the bars are of these",
    _by_name(
        # FlexAttention compiles for up to a minute a shape: on one shape, unless asked for.
        Workload(_gpu("heads32-8k", 32, 8, 128, 8192, 1024), (*_MASKED, "flex")),
        Workload(_gpu("heads16-16k", 16, 2, 128, 16384, 2048), _MASKED),
        Workload(_gpu("heads2-32k", 2, 1, 128, 32768, 1024), _MASKED),
        Workload(_gpu("heads2-16k-d64", 2, 1, 64, 16384, 1024), _MASKED),
        Workload(_gpu("dense-8k", 32, 8, 128, 8192, None), ("no_mask", *_DENSE)),
        *(
            Workload(
                _gpu(f"growth-{_thousands(length)}", 8, 2, 128, length, 1024),
                ("intervals", *_REFERENCES),
            )
            for length in (8192, 16384, 32768, 65536)
        ),
        Workload(_gpu("selection-32k", 32, 8, 128, 32768, 1024), ("intervals",), ("selection",)),
        Workload(
            # The only query sees every key, so this is what causal attention does.
            replace(_gpu("decode-64k", 32, 8, 128, 65536, 1024), causal=False, queries=1),
            ("key_mask", *_REFERENCES, "sdpa"),
            DECODE_QUANTITIES,
        ),
    ),
    quick=("heads32-8k", "dense-8k", "decode-64k"),
)

_CPU_CASE = Case("masked-4k", window=256)
CPU = WorkloadSet(
    "masked and dense attention at 4096 tokens, growth and decoding; the bars are of these",
    _by_name(
        Workload(
            _CPU_CASE,
            ("intervals", "key_mask", "boolean", *_CPU_REFERENCES, *_CPU_SDPA, "sdpa_augmented"),
        ),
        *(
            Workload(
                replace(
                    _CPU_CASE,
                    name=f"dense-4k-{dtype}" + ("" if causal else "-full"),
                    dtype=dtype,
                    window=None,
                    causal=causal,
                ),
                ("no_mask", *_CPU_SDPA),
            )
            for dtype in ("float32", "float16", "bfloat16")
            for causal in (True, False)
        ),
        *(
            Workload(
                replace(_CPU_CASE, name=f"growth-{_thousands(length)}", length=length),
                ("intervals", *_CPU_REFERENCES, *(("sdpa",) if length <= 4096 else ())),
            )
            for length in (1024, 2048, 4096, 8192)
        ),
        Workload(
            replace(_CPU_CASE, name="decode-64k", length=65536, causal=False, queries=1),
            ("key_mask", *_CPU_REFERENCES, "sdpa"),
            DECODE_QUANTITIES,
        ),
    ),
    quick=("masked-4k", "dense-4k-float32", "decode-64k"),
)


@dataclass(frozen=True)
class _Sizes:
    """How large the sweeps of flash-dmattn 1.2.2's performance scripts are taken."""

    dtype: str
    lengths: tuple[int, ...]
    decode_lengths: tuple[int, ...]
    batches: tuple[int, ...]
    at: int  # the length of the sweeps over batches and heads
    dims_at: int
    windows_at: int
    window: int
    contestants: tuple[str, ...]
    compiled: tuple[str, ...] = ("flex",)  # on one case only, since each shape costs up to a minute


def _doubling(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << step for step in range((last // first).bit_length()))


_ON_GPU = ("boolean", *_REFERENCES, *_SDPA_BACKENDS)
_ON_CPU = ("boolean", *_CPU_REFERENCES, "sdpa", "sdpa_math", "sdpa_flash")
_SMALLER: dict[str, Any] = {
    "dtype": "float32",
    "at": 1024,
    "dims_at": 1024,
    "window": 256,
    "contestants": _ON_CPU,
    "compiled": (),
}
_LEGACY_FORWARD = _Sizes(
    dtype="bfloat16",
    lengths=_doubling(256, 32768),
    decode_lengths=_doubling(256, 524288),
    batches=(1, 2, 4, 8),
    at=4096,
    dims_at=4096,
    windows_at=32768,
    window=1024,
    contestants=_ON_GPU,
)
_LEGACY_BACKWARD = replace(
    _LEGACY_FORWARD,
    lengths=_doubling(256, 16384),
    decode_lengths=(),
    dims_at=16384,
    windows_at=16384,
)
_CPU_FORWARD = replace(
    _LEGACY_FORWARD,
    **_SMALLER,
    lengths=_doubling(256, 4096),
    decode_lengths=_doubling(256, 65536),
    windows_at=2048,
)
_CPU_BACKWARD = replace(_LEGACY_BACKWARD, **_SMALLER, lengths=_doubling(256, 2048), windows_at=1024)


def _sweeps(sizes: _Sizes) -> Iterator[Case]:
    """1.2.2's configurations; the sweeps that say most come first."""
    base = Case(
        "base",
        sizes.dtype,
        heads=2,
        kv_heads=1,
        length=sizes.at,
        window=sizes.window,
        per_query=True,
    )
    for length in sizes.lengths:
        yield replace(base, name=f"length-{length}", length=length)
    for window in _doubling(32, sizes.windows_at):
        yield replace(base, name=f"window-{window}", length=sizes.windows_at, window=window)
    for length in sizes.decode_lengths:
        yield replace(base, name=f"decode-{length}", length=length, queries=1, causal=False)
    for head_dim in (32, 64, 96, 128, 192, 256):
        yield replace(base, name=f"dim-{head_dim}", length=sizes.dims_at, head_dim=head_dim)
    for heads, kv_heads in ((1, 1), (2, 1), (4, 1), (8, 2)):
        yield replace(base, name=f"heads-{heads}x{kv_heads}", heads=heads, kv_heads=kv_heads)
    for batch in sizes.batches:
        yield replace(base, name=f"batch-{batch}", batch=batch)


def _legacy(sizes: _Sizes, about: str, quantities: tuple[str, ...]) -> WorkloadSet:
    workloads = []
    for case in _sweeps(sizes):
        decode = case.queries is not None
        contestants = ("key_mask", *sizes.contestants[1:]) if decode else sizes.contestants
        if case.name == f"length-{sizes.at}":
            contestants = (*contestants, *sizes.compiled)
        workloads.append(Workload(case, contestants, DECODE_QUANTITIES if decode else quantities))
    quick = tuple(w.name for w in workloads if w.name.startswith(("length-", "window-")))
    return WorkloadSet(about, _by_name(*workloads), quick)


_FORWARD = ("selection", "forward", "forward_with_mask", "memory_forward")
_BACKWARD = ("selection", "backward", "forward_backward", "end_to_end", "memory_with_mask")
_SETS: dict[str, Callable[[bool], WorkloadSet]] = {
    "standard": lambda gpu: GPU if gpu else CPU,
    "legacy-forward": lambda gpu: _legacy(
        _LEGACY_FORWARD if gpu else _CPU_FORWARD,
        "the sweeps of 1.2.2's forward_performance script, a bias for each query and key",
        _FORWARD,
    ),
    "legacy-backward": lambda gpu: _legacy(
        _LEGACY_BACKWARD if gpu else _CPU_BACKWARD,
        "the sweeps of 1.2.2's backward_performance script, a bias for each query and key",
        _BACKWARD,
    ),
}
SET_NAMES = tuple(_SETS)


def workload_set(name: str, device: str) -> WorkloadSet:
    """The set of this name, in the sizes for a torch device such as ``cpu`` or ``cuda:0``."""
    return _SETS[name](device.startswith("cuda"))
