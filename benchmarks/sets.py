# SPDX-License-Identifier: BSD-3-Clause
"""The named sets of cases, in sizes for a GPU and smaller ones for a CPU, and their selection for a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import filter as matching
from functools import partial
from typing import Any

from .cases import Case
from .entrants import ENTRANTS, fits
from .tables import DECODE_QUANTITIES, QUANTITIES


@dataclass(frozen=True)
class Workload:
    """One case, its contestants, and the measured quantities."""

    shape: Case
    contestants: tuple[str, ...]
    quantities: tuple[str, ...] = tuple(QUANTITIES)

    @property
    def name(self) -> str:
        """The name on the command line and in results."""
        return self.shape.name


WorkloadSet = Mapping[str, Workload]

_DENSE = ("dense_flash", "dense_cudnn")
_REFERENCES = (*_DENSE, "compact_flash", "compact_cudnn")
_MASKED = ("intervals", "key_mask", "boolean", *_REFERENCES, "sdpa", "sdpa_expanded")
# On CPUs SDPA has two backends. It chooses its FlashAttention if no mask needs a gradient.
_CPU_SDPA = ("sdpa_expanded", "sdpa_gqa", "sdpa")
_CPU_REFERENCES = ("dense_flash", "compact_flash")
_CPU_MASKED = ("intervals", "key_mask", "boolean", *_CPU_REFERENCES, *_CPU_SDPA, "sdpa_augmented")


def _set(*workloads: Workload) -> WorkloadSet:
    return {workload.name: workload for workload in workloads}


def _doubling(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << step for step in range((last // first).bit_length()))


def _standard(case: Case, name: str, *contestants: str, **changes: Any) -> Workload:
    return Workload(replace(case, name=name, **changes), contestants)


def _decode(case: Case, *contestants: str) -> Workload:
    # The only query sees every key, as with causal attention.
    case = replace(case, name="decode-64k", length=65536, causal=False, queries=1)
    return Workload(case, contestants, DECODE_QUANTITIES)


_GPU_CASE = Case(
    "", "bfloat16", heads=32, kv_heads=8, head_dim=128, length=8192, window=1024, device="cuda"
)
_ONE_GROUP: dict[str, Any] = {"heads": 2, "kv_heads": 1}
_gpu = partial(_standard, _GPU_CASE)
# Every kind of mask at the shapes of current models; the bars apply to these.
GPU = _set(
    # FlexAttention compiles for up to a minute per shape, so it has one shape by default.
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
)

_CPU_CASE = Case("", window=256)
_cpu = partial(_standard, _CPU_CASE)
# Masked and dense attention at 4096 tokens, growth and decoding; the bars apply to these.
CPU = _set(
    _cpu("masked-4k", *_CPU_MASKED),
    *(
        _cpu(
            f"dense-4k-{dtype}{end}",
            *("no_mask", *_CPU_SDPA),
            dtype=dtype,
            causal=not end,
            window=None,
        )
        for dtype in ("float32", "float16", "bfloat16")
        for end in ("", "-full")
    ),
    *(
        _cpu(f"growth-{n}k", "intervals", *_CPU_REFERENCES, *sdpa, length=n << 10)
        for n, sdpa in ((1, ["sdpa"]), (2, ["sdpa"]), (4, ["sdpa"]), (8, []))
    ),
    _decode(_CPU_CASE, "key_mask", *_CPU_REFERENCES, "sdpa"),
)

# The sweeps of 1.2.2's performance scripts: their quantities, and the largest numbers on a GPU and
# on a CPU. "at" is the length of the sweeps over batches and heads. Compiled contestants run only
# at that length, because each shape costs up to a minute.
_SWEPT = ("selection", "forward", "forward_with_mask", "memory_forward")
_SWEPT_BACKWARD = ("selection", "backward", "forward_backward", "end_to_end", "memory_with_mask")
_LARGEST = ("length", "window", "dim", "decode", "at")
_LEGACY = {
    "legacy-forward": (_SWEPT, (32768, 32768, 4096, 524288, 4096), (4096, 2048, 1024, 65536, 1024)),
    "legacy-backward": (
        _SWEPT_BACKWARD,
        (16384, 16384, 16384, 0, 4096),
        (2048, 1024, 1024, 0, 1024),
    ),
}
_FORMS_OF_SDPA = ("sdpa", "sdpa_math", "sdpa_efficient", "sdpa_cudnn")
_ON_GPU = ("boolean", *_REFERENCES, *_FORMS_OF_SDPA, "earlier")
_ON_CPU = ("boolean", *_CPU_REFERENCES, "sdpa", "sdpa_math", "sdpa_flash")


def _sweeps(base: Case, largest: dict[str, int]) -> Iterator[Case]:
    """Yield 1.2.2's configurations, the most informative sweeps first."""
    at = largest["window"]
    for length in _doubling(256, largest["length"]):
        yield replace(base, name=f"length-{length}", length=length)
    for window in _doubling(32, at):
        yield replace(base, name=f"window-{window}", length=at, window=window)
    for length in _doubling(256, largest["decode"]):
        yield replace(base, name=f"decode-{length}", length=length, queries=1, causal=False)
    for head_dim in (32, 64, 96, 128, 192, 256):
        yield replace(base, name=f"dim-{head_dim}", length=largest["dim"], head_dim=head_dim)
    for heads, kv_heads in ((1, 1), (2, 1), (4, 1), (8, 2)):
        yield replace(base, name=f"heads-{heads}x{kv_heads}", heads=heads, kv_heads=kv_heads)
    for batch in (1, 2, 4, 8):
        yield replace(base, name=f"batch-{batch}", batch=batch)


def _legacy(name: str, gpu: bool) -> WorkloadSet:
    """Return a set of 1.2.2's sweeps, with a bias for each query and key."""
    quantities, on_gpu, on_cpu = _LEGACY[name]
    largest = dict(zip(_LARGEST, on_gpu if gpu else on_cpu, strict=True))
    base = replace(_GPU_CASE, head_dim=64) if gpu else _CPU_CASE
    base = replace(base, **_ONE_GROUP, device="cpu", length=largest["at"], per_query=True)
    contestants = _ON_GPU if gpu else _ON_CPU
    workloads = []
    for case in _sweeps(base, largest):
        if case.queries is not None:
            workloads.append(Workload(case, ("key_mask", *contestants[1:]), DECODE_QUANTITIES))
            continue
        compiled = ("flex",) if gpu and case.name == f"length-{largest['at']}" else ()
        workloads.append(Workload(case, (*contestants, *compiled), quantities))
    return _set(*workloads)


def density_map(
    gpu: bool, lengths: Sequence[int] | None = None, one_in: Sequence[int] | None = None
) -> WorkloadSet:
    """Return lengths by shares of kept keys; for ``one_in`` n, one of n keys is kept.

    Ours is one call with ``window_size``: the selection from a trainable bias, and the attention.
    Dense attention has no mask and no bias, so that PyTorch's fused kernels serve it.
    """
    case = _GPU_CASE if gpu else _CPU_CASE
    workloads = []
    for length in lengths or _doubling(*((1024, 65536) if gpu else (512, 8192))):
        dense = replace(case, name=f"map-{length}-dense", length=length, window=None)
        theirs = _DENSE if gpu else _CPU_SDPA
        workloads.append(Workload(dense, theirs, ("forward", "forward_backward")))
        for share in one_in or _doubling(1, 64):
            kept = replace(dense, name=f"map-{length}-{share}", window=max(1, length // share))
            workloads.append(Workload(kept, ("window_size",), ("forward_with_mask", "end_to_end")))
    return _set(*workloads)


# Problems with tables in docs/benchmarks.md: batch, query heads, KV heads, head dimension, tokens,
# and with a mask the keys that each query keeps.
_COMPACT = (
    (1, 32, 8, 128, 8192, 1024),
    (1, 32, 8, 64, 8192, 1024),
    (4, 16, 16, 128, 4096, 512),
    (1, 8, 2, 256, 8192, 1024),
    (1, 2, 1, 64, 16384, 1024),
    (1, 32, 8, 128, 65536, 1024),
    (16, 12, 12, 64, 2048, 1024),
    (4, 32, 8, 128, 4096, 2048),
)
_UNMASKED = (
    (1, 32, 8, 64, 8192),
    (1, 32, 8, 128, 8192),
    (1, 8, 2, 256, 8192),
    (4, 16, 16, 128, 4096),
    (8, 16, 4, 64, 2048),
    (16, 12, 12, 64, 1024),
    (32, 12, 12, 64, 512),
    (1, 32, 8, 128, 32768),
)
_SHORT = (
    (32, 12, 12, 64, 512, 128),
    (16, 12, 12, 64, 1024, 256),
    (8, 16, 4, 64, 2048, 512),
    (4, 32, 8, 128, 4096, 2048),
    (1, 32, 8, 128, 1024, 256),
    (1, 32, 8, 128, 2048, 512),
    (64, 8, 8, 32, 256, 64),
)
HOST = (1, 8, 2, 64, 512, 64)
SIZES = ("batch", "heads", "kv_heads", "head_dim", "length", "window")
# Problems, contestants and quantities, by the first part of the cases' names.
_SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[str, ...], tuple[str, ...]]] = {
    "compact": (
        _COMPACT,
        ("intervals", "compact_cudnn", "compact_flash", "compact_fa4"),
        ("forward", "backward"),
    ),
    "unmasked": (
        _UNMASKED,
        ("no_mask", "dense_cudnn", "dense_fa4"),
        ("forward", "backward", "forward_backward"),
    ),
    "short": (
        _SHORT,
        ("window_size", "dense_cudnn"),
        ("forward", "forward_with_mask", "forward_backward", "end_to_end"),
    ),
    "host": (
        (HOST,),
        ("window_size", "no_mask", "dense_sdpa", "dense_cudnn"),
        ("host", "host_forward_backward"),
    ),
}
# CPUs have neither cuDNN nor FlashAttention-4, and get smaller problems of the same kinds.
_ON_CPU_SHAPES = {
    "compact": ((1, 8, 2, 64, 512, 64), (1, 2, 1, 32, 1024, 64), (2, 4, 4, 32, 256, 32)),
    "unmasked": ((1, 8, 2, 64, 512), (2, 4, 4, 32, 256), (4, 3, 3, 32, 128)),
    "short": ((4, 3, 3, 32, 128, 32), (2, 4, 4, 32, 256, 64), (1, 8, 2, 64, 512, 256)),
    "host": (HOST,),
}


def shapes(gpu: bool) -> WorkloadSet:
    """Return calls and the fastest kernels for comparable work, over the shapes of models."""
    workloads = []
    for kind, (problems, contestants, quantities) in _SHAPES.items():
        entered = [
            name if gpu else name.replace("cudnn", "flash")
            for name in contestants
            if gpu or not name.endswith("fa4")
        ]
        for sizes in problems if gpu else _ON_CPU_SHAPES[kind]:
            fields: dict[str, Any] = dict(zip(SIZES, sizes, strict=False))
            case = Case(shape_name(kind, *sizes), "bfloat16", **fields)
            workloads.append(Workload(case, tuple(dict.fromkeys(entered)), quantities))
    return _set(*workloads)


def shape_name(kind: str, *sizes: int) -> str:
    """Return the name of such a case."""
    return f"{kind}-{'x'.join(map(str, sizes))}"


# Batch, heads, head dimension and tokens of cases that share one pair bias: rows of a pair
# representation with as many residues, a T5 encoder, one long sequence, and windows of Swin.
_PAIRS = {
    **{f"triangle-{n}": (n, 4, 32, n) for n in (256, 384, 512, 768, 1024)},
    "t5-512": (8, 12, 64, 512),
    "single-1024": (1, 16, 64, 1024),
    "swin-64": (2048, 6, 32, 64),
    "swin-49": (2048, 6, 32, 49),
}
_ON_CPU_PAIRS = {
    **{f"triangle-{n}": (n, 2, 16, n) for n in (16, 24, 32)},
    "t5-64": (2, 3, 32, 64),
    "swin-49": (8, 3, 32, 49),
}
_PAIR_SIZES = ("batch", "heads", "head_dim", "length")
_PAIR_QUANTITIES = ("forward", "forward_backward", "memory_forward_backward")


def pairs(gpu: bool) -> WorkloadSet:
    """Return cases with a pair bias that the batch shares, its gradient, and a key mask."""
    workloads = []
    for name, sizes in (_PAIRS if gpu else _ON_CPU_PAIRS).items():
        fields: dict[str, Any] = dict(zip(_PAIR_SIZES, sizes, strict=True))
        case = Case(name, "bfloat16", kv_heads=sizes[1], causal=False, pair_bias=True, **fields)
        names = [n for n, entrant in ENTRANTS.items() if entrant.pair and fits(n, case)]
        entered = names if gpu else ["pair_bias", "pair_sdpa"]
        workloads.append(Workload(case, tuple(entered), _PAIR_QUANTITIES))
    return _set(*workloads)


_MADE: dict[str, Callable[[bool], WorkloadSet]] = {
    "map": density_map,
    "shapes": shapes,
    "pairs": pairs,
}
# Sets with so many cases that each gets less time.
SWEEPS = (*_LEGACY, "map")
SET_NAMES = ("standard", *_LEGACY, *_MADE)


def workload_set(name: str, device: str) -> WorkloadSet:
    """Return a set by name, in the sizes for a torch device such as ``cpu`` or ``cuda:0``."""
    gpu = device.startswith("cuda")
    if name == "standard":
        return GPU if gpu else CPU
    return _MADE[name](gpu) if name in _MADE else _legacy(name, gpu)


def chosen_workloads(
    cases: WorkloadSet,
    device: str,
    patterns: Sequence[str] = (),
    contestants: Sequence[str] | None = None,
    quantities: Sequence[str] | None = None,
    **changes: Any,
) -> list[Workload]:
    """Return the workloads whose names match a pattern, reduced to the wanted parts, with
    ``changes`` of their shapes.

    A contestant that is named explicitly also runs on cases where it is not a default, if it can.
    Compiled contestants come last, so that a run that ends early, or spends its time budget, has
    everything else.

    Raises:
        ValueError: no case matches a pattern, a shape is invalid, or nothing is left to measure.
    """
    names: dict[str, None] = {}
    for pattern in patterns or ["*"]:
        found = matching(cases, pattern)
        if not found:
            raise ValueError(f"no case matches {pattern!r}; cases are {', '.join(cases)}")
        names.update(dict.fromkeys(found))
    chosen = []
    for workload in map(cases.__getitem__, names):
        window = None if workload.shape.window is None else changes.get("window")
        shape = replace(workload.shape, device=device, **changes)
        shape = replace(shape, window=window or workload.shape.window)
        entered = [n for n in contestants or workload.contestants if fits(n, shape)]
        wanted = tuple(q for q in workload.quantities if q in (quantities or QUANTITIES))
        for compiled in (False, True):
            group = tuple(name for name in entered if ENTRANTS[name].compiled is compiled)
            chosen += [Workload(shape, group, wanted)] if group and wanted else []
    if not chosen:
        what = ", ".join([*(contestants or ()), *(quantities or ())])
        raise ValueError(f"none of {', '.join(names)} measures {what}")
    return sorted(chosen, key=lambda workload: ENTRANTS[workload.contestants[0]].compiled)


def plain_cases(workloads: Sequence[Workload]) -> dict[str, dict[str, Any]]:
    """Return the cases in the form of results files."""
    cases: dict[str, dict[str, Any]] = {}
    for workload in workloads:
        earlier = cases.get(workload.name, {"contestants": ()})["contestants"]
        cases[workload.name] = {
            **asdict(workload.shape),
            "contestants": [*earlier, *workload.contestants],
            "query_bytes": workload.shape.query_bytes,
        }
    return cases
