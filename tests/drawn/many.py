# SPDX-License-Identifier: BSD-3-Clause
"""Calls with up to thousands of sequences and heads, built from a small call that float64 judges.

The chosen kernel, the numbering of thread blocks and the wrap-around of schedules depend on the
number of sequences and heads. A drawn small call is therefore repeated: each sequence and head of
the large call is one of the small call. float64 judges the small call, and every element of the
large call is compared with that.
"""

from __future__ import annotations

import dataclasses
import math
import os

import torch
from torch import Tensor

from flash_dmattn import IntervalMask, loader
from support import Target

from .calls import Call
from .coverage import tile_arch
from .exact import mass_shape
from .judge import Expected, expected
from .problems import Drawn, draw
from .source import Source
from .ways import Sizes, draw_way

# Resident thread blocks per SM, and full waves over all SMs.
RESIDENT = (1, 2, 3, 4, 5)
FILLED = (1, 2, 3)
TILE_ROWS = (64, 128)
FAMILIES = {
    "any": 5,
    "short": 3,
    "pairs": 2,
    "windows": 3,
    "rows": 2,
    "long": 3,
    "selections": 5,
    "decode": 2,
    "boxes": 1.5,
    "shared_bias": 1,
    "narrow": 2.5,
}
# GPU kernels only: calls drawn by ways.py.
WAYS = {"ways": 16.0}
# Weights by share of the most elements; judging takes time in proportion to them.
SHARES = {1 / 100: 5, 1 / 20: 2, 1: 0.4}
# Elements of one sequence and head: small units may repeat often, large ones a few times.
SMALL_UNIT, LARGE_UNIT = 1e4, 1e6


@dataclasses.dataclass(frozen=True)
class Limits:
    """Size limits of the repeated call."""

    elements: float  # of all its tensors
    work: float  # of its forward pass, in products
    most: int  # sequences times KV heads
    sms: int
    tile_arch: int = 0  # of a pack with GPU kernels

    @classmethod
    def of(cls, target: Target) -> Limits:
        """Return the limits for milliseconds on a GPU, or for seconds on an emulated one."""
        arch = 0
        if target.is_pack and target.has_kernels_of_gpu:
            arch = tile_arch(loader.pack_for(target.device).name)
        if target.device == "cuda":
            sms = torch.cuda.get_device_properties(target.device).multi_processor_count
            return cls(elements=8e7, work=3e10, most=70_000, sms=sms, tile_arch=arch)
        sms = int(os.environ.get("FDM_EMULATOR_SMS", "3"))
        return cls(elements=1e6, work=1e8, most=2_000, sms=sms, tile_arch=arch)


@dataclasses.dataclass(frozen=True)
class Repetition:
    """The sequence and head of a small call that each one of the large call repeats.

    An axis of a tensor is "sequences", "heads" (of queries), "kv_heads", "rows" or "keys" (of
    packed sequences); any other axis is as in the small call.
    """

    places: dict[str, Tensor]
    sizes: dict[str, int]  # of the small call
    moved: dict[tuple[str, str, torch.device], Tensor] = dataclasses.field(default_factory=dict)

    def on(self, device: torch.device, axis: str, what: str = "places") -> Tensor:
        """Return an axis's places or their counts; each is copied to a device once."""
        key = (axis, what, device)
        if key not in self.moved:
            places = self.places[axis]
            if what == "counts":
                places = places.bincount(minlength=self.sizes[axis])
            self.moved[key] = places.to(device)
        return self.moved[key]

    def gather(self, tensor: Tensor, axes: tuple[str | None, ...]) -> Tensor:
        """Repeat a tensor of the small call along the named axes."""
        for dimension, axis in enumerate(axes):
            if axis is not None:
                tensor = tensor.index_select(dimension, self.on(tensor.device, axis))
        return tensor

    def sums(self, tensor: Tensor, axes: tuple[str | None, ...], shape: torch.Size) -> Tensor:
        """Repeat along the axes, and sum along those of size 1 in the large call's tensor."""
        for dimension, axis in enumerate(axes):
            if axis is None:
                continue
            if shape[dimension] == len(self.places[axis]):
                tensor = tensor.index_select(dimension, self.on(tensor.device, axis))
            else:  # broadcast: each element counts as often as it is repeated
                counts = self.on(tensor.device, axis, "counts").to(tensor.dtype)
                counts = counts.view([-1] + [1] * (tensor.dim() - 1 - dimension))
                tensor = (tensor * counts).sum(dimension, keepdim=True)
        return tensor


@dataclasses.dataclass
class Repeated(Expected):
    """The expected results of the large call, stored as those of the small call."""

    repetition: Repetition
    axes: dict[str, tuple[str | None, ...]]
    shapes: dict[str, torch.Size]

    def shape(self, name: str) -> torch.Size:
        return self.shapes[name]

    def floor(self, name: str, largest: float) -> float:
        """Return no floor for sums over repeated parts: equal rounding errors add up instead of
        cancelling, so only the bounds judge sums.
        """
        places = self.repetition.places
        is_sum = name == "dsink" or any(
            axis is not None and size != len(places[axis])
            for axis, size in zip(self.axes[name], self.shapes[name], strict=True)
        )
        return math.inf if is_sum else super().floor(name, largest)

    def repeated(self, name: str, small: Tensor) -> Tensor:
        large = self.repetition.sums(small.double(), self.axes[name], self.shapes[name])
        if name != "dsink":
            return large
        # dsink also sums over sequences, which are repeated equally often.
        return large * (
            len(self.repetition.places["sequences"]) // self.repetition.sizes["sequences"]
        )


def draw_many(seed: int, dtypes: tuple[torch.dtype, ...], limits: Limits) -> tuple[Drawn, Repeater]:
    """Draw a small call and its repetition; equal arguments give equal draws."""
    source = Source(seed)
    family = source.weighted(FAMILIES | WAYS if limits.tile_arch else FAMILIES)
    if family == "ways":
        most = (limits.elements, limits.work)
        drawn, sizes = draw_way(source, dtypes, limits.tile_arch, limits.sms, most)
        drawn = dataclasses.replace(drawn, seed=seed)
        return drawn, Repeater(source, drawn.call, limits, sizes)
    while True:
        drawn = draw(seed, dtypes, family=family, other_widths=False)
        if _may_repeat(drawn.call):
            drawn = dataclasses.replace(drawn, probabilities=False, poisoned_buffers=False)
            return drawn, Repeater(source, drawn.call, limits)
        seed += 1_000_003


def _may_repeat(call: Call) -> bool:
    """Return whether the sizes of all tensors identify their axes."""
    if 0 in call.query.shape or 0 in call.key.shape:
        return False
    if call.cu_seqlens_q is None:
        return True
    return call.query.shape[0] > 1 and (call.block_table is not None or call.key.shape[0] > 1)


class Repeater:
    """Builds large calls from a small one, with their expected results."""

    def __init__(
        self, source: Source, call: Call, limits: Limits, sizes: Sizes | None = None
    ) -> None:
        self.source = source
        self.sizes = sizes  # sizes of the large call, if they are given
        self.limits = limits
        self.is_packed = call.cu_seqlens_q is not None
        self.call = self._with_known_axes(call)
        self._small: Expected | None = None
        self.draw()

    def draw(self) -> None:
        """Draw the number of sequences and heads, their places in the small call, and a layout."""
        source, call = self.source, self.call
        heads, kv_heads = call.query.shape[-2], call.key.shape[-2]
        group = heads // kv_heads
        if call.cu_seqlens_q is None:
            count, lengths = call.query.shape[0], (call.query.shape[1], call.key.shape[1])
        else:
            count, lengths = len(call.cu_seqlens_q) - 1, call.longest
        if self.sizes is None:
            total = self._total(count * kv_heads, max(lengths), group)
            large_kv_heads = kv_heads * source.choice(
                [n for n in (1, 1, 2, 3, 4, 8, 12, 16, 32) if n * kv_heads <= max(kv_heads, total)]
            )
        else:
            large_kv_heads = self.sizes.kv_heads
            total = self.sizes.sequences * large_kv_heads
        of_kv_heads = self._places(kv_heads, large_kv_heads)
        in_group = torch.arange(group)
        places = {
            "kv_heads": of_kv_heads,
            "heads": (of_kv_heads[:, None] * group + in_group).flatten(),
        }
        sequences = max(count, total // large_kv_heads)
        if call.sink is not None:  # its gradient is a sum over sequences
            sequences = sequences // count * count
        places["sequences"] = self._places(count, sequences)
        sizes = {"kv_heads": kv_heads, "heads": heads, "sequences": count}
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            for axis, bounds in (("rows", call.cu_seqlens_q), ("keys", call.cu_seqlens_k)):
                places[axis] = _packed_places(bounds, places["sequences"])
                sizes[axis] = int(bounds[-1])
        self.repetition = Repetition(places, sizes)
        # Whether a mask or bias repeats an axis of size 1 or leaves it broadcast.
        self.repeats_ones = {axis: source.chance(0.5) for axis in ("sequences", "kv_heads")}
        layouts = {"rows first": 6.0, "heads first": 2.0, "not aligned": 1.0}
        self.layout = source.weighted(layouts) if self.sizes is None else "rows first"

    def describe(self) -> str:
        """Return the number of sequences and KV heads."""
        places = self.repetition.places
        return f"{len(places['sequences'])} sequences, {len(places['kv_heads'])} KV heads"

    def large(self, device: str) -> Call:
        """Build the large call."""
        call, changed = self.call.to(device), {}
        for name in ("query", "key", "value", "dout", "dlse", "mask", "bias", "sink"):
            tensor = getattr(call, name)
            if isinstance(tensor, IntervalMask):
                ends = (self._gathered(name, end) for end in (tensor.start, tensor.end))
                mask = IntervalMask(
                    *ends, query_length=tensor.query_length, max_kept=tensor.max_kept
                )
                mask._keeps_runs = tensor._keeps_runs
                changed[name] = mask
            elif tensor is not None:
                tensor = self._gathered(name, tensor)
                is_rows = name in ("query", "key", "value", "dout")
                changed[name] = self._laid_out(tensor) if is_rows else tensor
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            of = self.repetition.on(call.query.device, "sequences")
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                lengths = getattr(call, name).diff()[of]
                changed[name] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
            if call.cu_seqlens_k is call.cu_seqlens_q:
                changed["cu_seqlens_k"] = changed["cu_seqlens_q"]
            if call.block_table is not None:
                changed["block_table"] = call.block_table[of]
        return dataclasses.replace(call, **changed)

    def expected(self, large: Call, judged_on: str) -> Repeated:
        """Return the expected results of a large call; float64 judges the small call once."""
        if self._small is None:
            self._small = expected(self._with_own_biases(self.call.to(judged_on)))
        names = {"out": "dout", "lse": "dlse"} | {f"d{name}": name for name in self.call.wanted}
        axes, shapes = {}, {}
        for result in self._small.results:
            if result == "mass":
                by_head = ("heads", "keys") if self.is_packed else ("sequences", "heads", None)
                axes[result], shapes[result] = by_head, torch.Size(mass_shape(large))
                continue
            axes[result] = self._axes(names[result], getattr(self.call, names[result]))
            shapes[result] = getattr(large, names[result]).shape
        small = vars(self._small)
        return Repeated(**small, repetition=self.repetition, axes=axes, shapes=shapes)

    def _with_own_biases(self, call: Call) -> Call:
        """Give a bias with a gradient its own values for each sequence and head."""
        if call.bias is None or "bias" not in call.wanted:
            return call
        axes = self._axes("bias", call.bias)
        sizes = [
            size if axis is None or size > 1 else self.repetition.sizes[axis]
            for size, axis in zip(call.bias.shape, axes, strict=True)
        ]
        return dataclasses.replace(call, bias=call.bias.expand(sizes))

    def _with_known_axes(self, call: Call) -> Call:
        """Make the bias 4-D, or drop the gradient of one number for all packed keys."""
        bias = call.bias
        if bias is None or "bias" not in call.wanted:
            return call
        if not self.is_packed:
            return dataclasses.replace(call, bias=bias[:, None, None] if bias.dim() == 2 else bias)
        if bias.shape[1] > 1 or bias.shape[2] == _total_keys(call):
            return call
        return dataclasses.replace(call, wanted=tuple(n for n in call.wanted if n != "bias"))

    def _total(self, units: int, length: int, group: int) -> int:
        """Draw the product of sequences and KV heads."""
        source, limits = self.source, self.limits
        elements = sum(tensor.numel() for tensor in self.call.tensors()) / units
        work = length * length * group * (self.call.query.shape[-1] + 16.0)
        share = source.weighted(SHARES)
        share = 2 if elements > LARGE_UNIT else max(share, 0.3 if elements < SMALL_UNIT else 0)
        most = int(min(limits.most, share * limits.elements / elements, limits.work / work))
        if most <= units:
            return units
        kind = source.weighted({"wraps": 6, "any": 3, "most": 0.5})
        if kind == "most":
            return most
        if kind == "any":
            return int(math.exp(source.choices.uniform(math.log(units), math.log(most))))
        tiles = -(-length // source.choice(TILE_ROWS)) * source.choice([1, group])
        wraps = [
            resident * filled * limits.sms // tiles + more
            for resident in RESIDENT
            for filled in FILLED
            for more in (-1, 0, 1)
        ]
        fitting = [number for number in wraps if units <= number <= most]
        return source.choice(fitting or [most])

    def _places(self, count: int, large: int) -> Tensor:
        """Draw a place of the small call for each large one, each equally often if possible."""
        order = torch.arange(large) % count
        return order[self.source.permutation(large)]

    def _axes(self, name: str, tensor: Tensor) -> tuple[str | None, ...]:
        if name in ("query", "dout"):
            return ("rows", "heads", None) if self.is_packed else ("sequences", None, "heads", None)
        if name in ("key", "value"):
            if self.call.block_table is not None:
                return (None, None, "kv_heads", None)
            if self.is_packed:
                return ("keys", "kv_heads", None)
            return ("sequences", None, "kv_heads", None)
        if name == "dlse":
            return ("heads", "rows") if self.is_packed else ("sequences", "heads", None)
        if name == "sink":
            return ("heads",)
        if not self.is_packed and tensor.dim() == 2:
            return ("sequences", None)
        is_of_queries = tensor.shape[0 if self.is_packed else 1] == self.repetition.sizes["heads"]
        of_heads = "heads" if is_of_queries else "kv_heads"
        if not self.is_packed:
            return ("sequences", of_heads, None, None)[: tensor.dim()]
        if tensor.dim() == 2:  # bounds of intervals
            return (of_heads, "keys")
        if tensor.shape[1] > 1:
            return (of_heads, "rows", None)
        return (of_heads, None, "keys" if tensor.shape[2] == _total_keys(self.call) else None)

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Repeat along every axis, except an axis of size 1 that stays broadcast."""
        axes = list(self._axes(name, tensor))
        for dimension, axis in enumerate(axes):
            if axis is None or name not in ("mask", "bias") or tensor.shape[dimension] > 1:
                continue
            is_alone = self.repetition.sizes[axis] == 1
            if is_alone and axis == "sequences" and tensor.dim() < 4:
                continue  # only a 4-D tensor broadcasts over sequences
            if not (is_alone and self.repeats_ones.get(axis, True)):
                axes[dimension] = None
        return self.repetition.gather(tensor, tuple(axes))

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if self.layout == "heads first":
            return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
        if self.layout == "not aligned":
            room = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 1), math.nan)
            return room[..., 1:].copy_(tensor)
        return tensor


def _total_keys(call: Call) -> int:
    assert call.cu_seqlens_k is not None
    return call.key.shape[0] if call.block_table is None else int(call.cu_seqlens_k[-1])


def _packed_places(bounds: Tensor, sequences: Tensor) -> Tensor:
    """Return for each packed row of the large call its row of the small call."""
    lengths = bounds.diff().long()[sequences]
    begins = bounds[:-1].long()[sequences] - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + begins.repeat_interleave(lengths)
