# SPDX-License-Identifier: BSD-3-Clause
"""The performance targets on one H200 and on CPUs, and their comparison with a run.

A tool for maintainers: no test depends on the speed of a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .results import Results
from .sets import GPU, pairs, shapes
from .tables import COLUMNS, Table

Key = tuple[str, str, str]  # case, contestant, quantity


class Bar(NamedTuple):
    """A bound on ``measured / (reference * scale)``; without reference on ``measured / scale``."""

    measured: str  # a case, a contestant and a quantity
    limit: float
    about: str = ""
    others: str = ""  # contestants; the smallest value is the reference
    first: str = ""  # a case, which is the reference
    scale: float | None = None  # if not the unit of the quantity
    than: str = ""  # the quantity of others, if different
    fastest: str = ""  # a quantity; its smallest value selects the reference among the others
    speed: bool = False  # bounds the inverse ratio, reference by ours, from below

    @property
    def key(self) -> Key:
        """The bounded number."""
        case, who, quantity = self.measured.split()
        return case, who, quantity

    @property
    def references(self) -> list[Key]:
        """The numbers that may be the divisor."""
        case, who, quantity = self.key
        others = [(case, other, self.than or quantity) for other in self.others.split()]
        return others + ([(self.first, who, quantity)] if self.first else [])

    @property
    def work(self) -> str:
        """The bounded quantity as text."""
        case, who, quantity = self.key
        words = [f"{case}: {who}", quantity.replace("_", " "), self.about]
        return ", ".join(filter(None, words))


class Verdict(NamedTuple):
    """The measured value for a bar; None if the run has no numbers for it."""

    bar: Bar
    seen: float | None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met."""
        if self.seen is None:
            return None
        return self.seen >= self.bar.limit if self.bar.speed else self.seen <= self.bar.limit


_FA2 = ("of FA2 on w compacted keys", "compact_flash")
_INTERVALS = ("of the intervals' time", "intervals")
_DENSE = ("speed of dense FA2", "dense_flash")
_SDPA = ("best form of SDPA by ours", "sdpa_expanded sdpa_gqa sdpa")
_GROWTH = ("of linear growth from growth-8k", "", "growth-8k", 8.0)


BARS = (
    Bar("heads32-8k intervals forward", 1.1, *_FA2),
    Bar("heads32-8k intervals backward", 1.1, *_FA2),
    Bar("heads16-16k intervals forward", 1.05, *_FA2),
    Bar("heads16-16k intervals backward", 1.1, *_FA2),
    Bar("heads2-32k intervals forward", 1.3, *_FA2),
    Bar("heads2-32k intervals backward", 0.25, *_FA2),
    *(
        Bar(f"{case} key_mask {quantity}", 0.7, *_INTERVALS)
        for case in ("heads32-8k", "heads16-16k", "heads2-32k")
        for quantity in ("forward", "backward")
    ),
    Bar("heads32-8k boolean forward", 0.75),
    Bar("heads32-8k intervals selection", 0.08),
    Bar("selection-32k intervals selection", 0.4),
    Bar("dense-8k no_mask forward", 0.9, *_DENSE, speed=True),
    Bar("dense-8k no_mask backward", 0.85, *_DENSE, speed=True),
    *(
        Bar(
            f"{case} intervals memory_forward_backward",
            8,
            "of q's bytes",
            scale=float(GPU[case].shape.query_bytes),
        )
        for case in ("heads2-32k", "growth-32k")
    ),
    Bar("growth-64k intervals forward", 1.15, *_GROWTH),
    Bar("growth-64k intervals backward", 1.15, *_GROWTH),
    Bar("heads32-8k intervals host", 25),
)
CPU_BARS = (
    Bar("masked-4k intervals forward", 8, *_SDPA, speed=True),
    Bar("masked-4k intervals forward_backward", 6, *_SDPA, speed=True),
    Bar("masked-4k intervals memory_with_mask", 10, *_SDPA, speed=True),
    *(
        Bar(f"{case} no_mask {quantity}", 1 / 2.5, *_SDPA, speed=True)
        for case in ("dense-4k-float32", "dense-4k-float32-full")
        for quantity in ("forward", "forward_backward")
    ),
)
DECODE_BARS = (
    Bar("decode-64k key_mask forward_planned", 0.03),
    Bar("decode-64k key_mask forward", 0.06),
)
GENERATE_BARS = (Bar("generate-16k flash_dmattn attention", 0.25, "of eager attention's", "eager"),)
_TRAIN = ("speed of the same model with dense attention", "dense")
TRAIN_BARS = tuple(
    Bar(f"{name}-{length} flash_dmattn train_step", limit, *_TRAIN, speed=True)
    for name in ("train", "train-compiled")
    for length, limit in {"2k": 1.0, "4k": 1.1, "16k": 1.8, "64k": 5.0}.items()
)

# For the set "shapes", by difficulty: bounds of forward and backward, relative to cuDNN over w keys
# that are gathered beforehand.
_OVER_COMPACT = {
    "compact-1x32x8x128x8192x1024": (1.2, 1.35),
    "compact-1x32x8x128x65536x1024": (1.2, 1.35),
    "compact-1x2x1x64x16384x1024": (1.6, 0.6),
}
_MOST_OVER_COMPACT = (1.3, 1.5)
_UNMASKED = (0.95, 0.85)


def _shape_bars() -> Iterator[Bar]:
    for name in shapes(gpu=True):
        kind = name.partition("-")[0]
        if kind == "compact":
            limits = _OVER_COMPACT.get(name, _MOST_OVER_COMPACT)
            for which, limit in zip(("forward", "backward"), limits, strict=True):
                about = "of cuDNN on w compacted keys"
                yield Bar(f"{name} intervals {which}", limit, about, "compact_cudnn")
        if kind == "unmasked":
            for which, limit in zip(("forward", "backward"), _UNMASKED, strict=True):
                about = "speed of dense cuDNN"
                yield Bar(f"{name} no_mask {which}", limit, about, "dense_cudnn", speed=True)
            about = "of FlashAttention-4's"
            yield Bar(f"{name} no_mask forward_backward", 1.05, about, "dense_fa4")
        if kind == "short":
            ours, about = f"{name} window_size end_to_end", "speed of dense cuDNN's two passes"
            yield Bar(ours, 1.0, about, "dense_cudnn", than="forward_backward", speed=True)


SHAPE_BARS = tuple(_shape_bars())

_PEERS = "cuequivariance pair_flex pair_sdpa"
_BEST, _FASTEST = "of the best peer's", "of the fastest peer's"


def _pair_bars() -> Iterator[Bar]:
    for name in pairs(gpu=True):
        kind = name.partition("-")[0]
        ours = f"{name} pair_bias"
        if kind == "triangle":
            peers = f"{_PEERS} trifast"
            yield Bar(f"{ours} forward", 1.0, _BEST, peers)
            yield Bar(f"{ours} forward_backward", 0.9, _BEST, peers)
            memory = f"{ours} memory_forward_backward"
            yield Bar(memory, 1.0, _FASTEST, peers, fastest="forward_backward")
        elif kind == "swin":
            yield Bar(f"{ours} forward_backward", 1.0, _BEST, _PEERS)
        else:
            yield Bar(f"{ours} forward_backward", 0.8, "of SDPA's", "pair_sdpa")


PAIR_BARS = tuple(_pair_bars())

# By the first part of the name of a run's first case: bars of GPUs, and of CPUs. All kinds of cases
# in a set map to all bars of the set, because any of them may come first.
_OF_SETS: dict[str, tuple[tuple[Bar, ...], tuple[Bar, ...]]] = {
    "decode": (DECODE_BARS, ()),
    "generate": (GENERATE_BARS, GENERATE_BARS),
    "train": (TRAIN_BARS, TRAIN_BARS),
    **dict.fromkeys(("compact", "unmasked", "short", "host"), (SHAPE_BARS, ())),
    **dict.fromkeys(("triangle", "t5", "single", "swin"), (PAIR_BARS, ())),
}


def verdicts(results: Results) -> list[Verdict]:
    """Return the verdict on each bar that applies to a run."""
    kind = next(iter(results.cases), "").partition("-")[0]
    on_gpu, on_cpu = _OF_SETS.get(kind, (BARS, CPU_BARS))
    bars = on_gpu if results.environment["gpu"] else on_cpu
    return [_verdict(bar, results.values) for bar in bars]


def _verdict(bar: Bar, known: dict[Key, float]) -> Verdict:
    measured, quantity = known.get(bar.key), COLUMNS[bar.key[2]]
    found = [known[key] for key in _references(bar, known) if key in known]
    if measured is None or (bar.references and not found):
        return Verdict(bar, None)
    scale = bar.scale or (1.0 if bar.references else quantity.scale)
    ratio = max(measured, 1e-12) / (min(found, default=1.0) * scale)
    both = [measured, *sorted(found)[:1]]
    detail = ", ".join(f"{value / quantity.scale:.3f} {quantity.unit}" for value in both)
    return Verdict(bar, 1 / ratio if bar.speed else ratio, detail if found else "")


def _references(bar: Bar, known: dict[Key, float]) -> list[Key]:
    if not bar.fastest:
        return bar.references
    times = {key: known.get((*key[:2], bar.fastest)) for key in bar.references}
    measured = {key: time for key, time in times.items() if time is not None}
    return [min(measured, key=measured.__getitem__)] if measured else []


def bars_table(found: Sequence[Verdict]) -> Table:
    """Return the bars with the measured values as a table."""
    rows = []
    for verdict in found:
        bar = verdict.bar
        plain = bar.scale is None and not bar.references
        unit = COLUMNS[bar.key[2]].unit if plain else "x"
        bound = f"{'>=' if bar.speed else '<='} {bar.limit:g} {unit}"
        seen = "-" if verdict.seen is None else f"{verdict.seen:.3f} {unit}"
        outcome = {True: "pass", False: "MISS", None: "not measured"}[verdict.met]
        rows.append((bar.work, bound, seen, verdict.detail, outcome))
    heads = ("work", "bar", "seen", "ours, reference", "")
    return Table("Performance targets", heads, tuple(rows))
