# SPDX-License-Identifier: BSD-3-Clause
"""Problems with all options drawn together, each from one integer."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flash_dmattn import IntervalMask
from support import HALF_TYPES, cotangent

from .calls import GRADIENT_OF, Call
from .mask_blocks import BlockSize, draw_blocks
from .masks import draw_bias, draw_bool, draw_mask, draw_shape, with_bytes
from .poison import poison
from .sizes import Sizes, draw_sizes
from .source import Source, strided

PAGE_SIZES = (1, 8, 16, 48, 64)
BLOCKS_SHARE = 0.03  # of the calls whose family is "any"


@dataclasses.dataclass
class Drawn:
    """A call, and the way and conditions in which it is made."""

    seed: int
    call: Call
    poisoned: list[str]  # tensors with NaN in elements that must not affect any result
    planned: bool  # with a plan made before
    selected: bool  # by dynamic_mask, followed by attention with its mask
    deterministic: bool  # requested, and the call is repeated
    probabilities: bool  # requested
    poisoned_buffers: bool  # the package's allocations hold NaN
    threads: int  # of a CPU
    block_size: BlockSize | None = None  # the mask is given as a BlockMask of such blocks

    def describe(self) -> str:
        """Return one line about the drawn options."""
        call = self.call
        words = [str(call.query.dtype).removeprefix("torch.")]
        for name in ("query", "key", "value", "mask", "bias", "sink", "indices", "index_bias"):
            words.append(f"{name} {_described(getattr(call, name))}")
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            sides = (call.cu_seqlens_q, call.cu_seqlens_k)
            words += [f"lengths {side.diff().tolist()}" for side in sides]
        words += [f"{name}={getattr(call, name)}" for name in ("scale", "softcap", "window")]
        words += [f"{name}={getattr(call, name)}" for name in ("keep_last", "keep_first")]
        words += [name for name in ("causal", "key_mass") if getattr(call, name)]
        words += [name for name, value in vars(self).items() if value is True]
        words += [] if self.block_size is None else [f"a BlockMask of {self.block_size}"]
        words += [f"NaN in {'+'.join(self.poisoned) or 'nothing'}"]
        words += [f"threads={self.threads}", f"of {'+'.join(call.of)}"]
        return ", ".join([*words, f"wanted {'+'.join(call.wanted) or 'nothing'}"])


def _described(tensor: Tensor | IntervalMask | None) -> str:
    if tensor is None:
        return "none"
    if isinstance(tensor, IntervalMask):
        return f"intervals {list(tensor.start.shape)}"
    kind = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return f"{kind} {list(tensor.shape)}{strides}"


def draw(
    seed: int,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, *HALF_TYPES),
    *,
    small: bool = False,
    family: str = "any",
    other_widths: bool = True,
) -> Drawn:
    """Draw a problem on the CPU; equal arguments give the same problem on every machine.

    Args:
        seed: any integer from 0.
        dtypes: of query, key and value, one of which is drawn.
        small: draw sizes for tools under which a call takes a hundred times as long.
        family: of `draw_sizes`.
        other_widths: let values of some calls have another head dimension than keys.
    """
    source = Source(seed)
    if family == "any" and other_widths and not small and Source(seed + 2**41).chance(0.01):
        family = "narrow"
    if family == "any" and not small and Source(seed + 2**42).chance(BLOCKS_SHARE):
        family = "blocks"
    sizes = draw_sizes(source, small=small, family=family)
    dtype = source.choice(dtypes)
    paged = sizes.packed and source.chance(0.2)
    longest = (
        max(sizes.q_lengths) + source.choice([0, 0, 0, 1, 70]),
        max(sizes.k_lengths) + source.choice([0, 0, 0, 1, 70]),
    )
    call = draw_tensors(source, sizes, dtype)
    if family == "narrow":
        set_width(source, call, source.choice([8, 64, 72, 120, 128, 128, 128]))
    elif other_widths:
        change_width(seed, call)
    draw_scores(source, call)
    if sizes.packed:
        call.cu_seqlens_q, call.cu_seqlens_k = bounds(sizes.q_lengths), bounds(sizes.k_lengths)
        if sizes.q_lengths == sizes.k_lengths:
            call.cu_seqlens_k = call.cu_seqlens_q
            longest = longest[:1] * 2
        call.longest = longest
    selects, block_size = False, None
    call.mask = draw_mask(source, sizes, longest[1])
    if family in ("pairs", "windows", "rows"):
        shape = (source.choice([1, sizes.batch]), sizes.heads, sizes.queries, sizes.keys)
        call.bias = draw_bias(source, shape, dtype, selects=False)
        call.mask = draw_bool(source, shape) if family == "rows" else None
    elif family == "shared_bias":
        shape = (source.choice([1, sizes.batch]), source.choice([1, sizes.heads]), 1, 1)
        call.bias = draw_bias(source, shape, dtype, selects=False)
    elif family == "boxes":
        call.mask = None
        if source.chance(0.5):
            call.bias = draw_bias(source, (1, sizes.heads, 1, sizes.keys), dtype, selects=False)
    elif family == "selections" and not isinstance(call.mask, IntervalMask):
        selects, call.causal = True, source.chance(0.7)
        shape = (source.choice([1, sizes.batch]), source.choice([1, sizes.kv_heads]), 1, sizes.keys)
        call.bias = draw_bias(source, shape, dtype, selects=True)
    elif family == "blocks":
        call.mask, block_size = draw_blocks(source, sizes)
        if source.chance(0.5):
            heads = source.choice([1, sizes.kv_heads, sizes.heads])
            shape = (source.choice([1, sizes.batch]), heads, 1, sizes.keys)
            call.bias = draw_bias(source, shape, dtype, selects=False)
    elif source.chance(0.7):
        may_select = not isinstance(call.mask, IntervalMask)
        selects = may_select and source.chance(0.8 if family == "long" else 0.4)
        call.bias = draw_bias(source, draw_shape(source, sizes, longest[1]), dtype, selects=selects)
    if selects:
        most = max(sizes.k_lengths)
        call.window = source.weighted(
            {0: 0.2, 1: 0.5, source.integer(2, 40): 2, source.integer(41, most + 50): 2}
        )
        if call.causal or longest[0] == 1:
            _keep_by_place(source, call, most)
    elif call.mask is None and source.chance(0.1):
        call.mask = draw_bool(source, draw_shape(source, sizes, longest[1]))
    if source.chance(0.25):
        call.sink = draw_sink(source, sizes.heads, dtype)
    call.wanted = GRADIENT_OF
    if source.chance(0.25) or paged:
        call.wanted = () if paged else tuple(source.some(GRADIENT_OF))
    call.of = source.weighted({("out", "lse"): 4, ("out",): 2, ("lse",): 1})
    expanded, poisoned = poison(source, call)
    _lay_out(source, call, sizes, expanded)
    if paged:
        cut_into_pages(source, call, sizes)
    drawn = Drawn(
        seed,
        call,
        poisoned,
        planned=call.window is None and source.chance(0.2),
        selected=call.window is not None
        and call.bias is not None
        and source.chance(0.6 if family == "long" else 0.3),
        deterministic=source.chance(0.15),
        probabilities=source.chance(0.05),
        poisoned_buffers=source.chance(0.15),
        threads=draw_threads(source),
        block_size=block_size,
    )
    call.key_mass = not paged and source.chance(0.25)
    return drawn


def draw_scores(source: Source, call: Call) -> None:
    """Draw causality, the softcap and the scale."""
    call.causal = source.chance(0.5)
    call.softcap = source.weighted({0.0: 6, 0.5: 0.5, 5.0: 2, 20.0: 1, 100.0: 0.5})
    call.scale = source.weighted({None: 7, 0.3: 1, 1e-3: 0.5, 0.0: 0.3, -0.2: 0.7, 2.0: 0.3})


def draw_threads(source: Source) -> int:
    """Draw the number of threads of a call."""
    return source.weighted({1: 5, 2: 1, 3: 1, 7: 0.5})


def _keep_by_place(source: Source, call: Call, most: int) -> None:
    """Draw keep_last and keep_first of a selection; some selections keep nothing else."""
    if source.chance(0.5):
        call.keep_last = source.weighted(
            {0: 0.5, 1: 0.5, source.integer(2, 40): 2, source.integer(1, most + 5): 1}
        )
    if source.chance(0.3):
        call.keep_first = source.weighted({source.integer(1, 9): 2, source.integer(1, most + 5): 1})
    if (call.keep_last or call.keep_first) and source.chance(0.1):
        call.window, call.bias = 0, None


def draw_tensors(source: Source, sizes: Sizes, dtype: torch.dtype) -> Call:
    batch = () if sizes.packed else (sizes.batch,)
    rows = (*batch, sizes.queries, sizes.heads, sizes.head_dim)
    columns = (*batch, sizes.keys, sizes.kv_heads, sizes.head_dim)
    large = source.weighted({1.0: 8, 4.0: 1, 0.05: 1})
    query, key, value, dout = (source.randn(*shape) for shape in (rows, columns, columns, rows))
    dlse = source.randn(*batch, sizes.heads, sizes.queries)
    return Call(
        (query * large).to(dtype), key.to(dtype), value.to(dtype), cotangent(dout).to(dtype), dlse
    )


def change_width(seed: int, call: Call) -> None:
    """Give the values of some calls another head dimension; no other draw changes."""
    source = Source(seed + 2**40)
    if not source.chance(0.12):
        return
    before = call.value.shape[-1]
    others = {before // 2, before * 2 // 3, before - 1, before + 8, before * 2, 8, 64, 128}
    width = source.choice(
        sorted(width for width in others if 1 <= width <= 256 and width != before)
    )
    set_width(source, call, width)


def set_width(source: Source, call: Call, width: int) -> None:
    """Set the values' head dimension."""
    for name in ("value", "dout"):
        states = getattr(call, name)[..., :width]
        more = source.randn(*states.shape[:-1], width - states.shape[-1]).to(states.dtype)
        more = cotangent(more) if name == "dout" and more.numel() else more
        setattr(call, name, torch.cat([states, more], -1))


def draw_sink(source: Source, heads: int, dtype: torch.dtype) -> Tensor:
    """Return sinks near the log-sum-exp of some hundred keys, some of them far from it."""
    sink = source.randn(heads) * source.choice([1.0, 3.0]) + source.weighted(
        {0.0: 2, 5.0: 2, 60: 1}
    )
    for head in range(heads):
        if source.chance(0.1):
            sink[head] = source.choice([-torch.inf, torch.inf, -1e4, 1e4, 0.0])
    return sink.to(source.choice([dtype, torch.float32]))


def _lay_out(source: Source, call: Call, sizes: Sizes, expanded: dict[str, int]) -> None:
    """Give every tensor its own strides, some of them 0."""
    for name in ("query", "key", "value", "dout", "dlse", "mask", "bias", "sink"):
        tensor = getattr(call, name)
        if not isinstance(tensor, Tensor):
            continue
        if name in expanded:
            dimension = expanded[name]
            alike = strided(source, tensor.narrow(dimension, 0, 1).clone())
            setattr(call, name, alike.expand(tensor.shape))
            continue
        tensor = strided(source, tensor)
        if name == "mask":
            tensor = with_bytes(source, tensor)
        if name in ("mask", "bias"):
            tensor = _expanded(source, tensor, sizes)
        setattr(call, name, tensor)


def _expanded(source: Source, tensor: Tensor, sizes: Sizes) -> Tensor:
    """Expand some dimensions of size 1, which gives them a stride of 0."""
    if tensor.dim() == 4:
        full = [sizes.batch, sizes.heads, sizes.queries, sizes.keys]
    elif sizes.packed:
        full = [sizes.heads, *tensor.shape[1:]]
    else:
        return tensor
    return tensor.expand(
        [
            large if size == 1 and source.chance(0.3) else size
            for size, large in zip(tensor.shape, full, strict=True)
        ]
    )


def cut_into_pages(source: Source, call: Call, sizes: Sizes) -> None:
    """Cut keys and values into pages in random order; unused rows hold NaN."""
    page = source.choice(PAGE_SIZES)
    needed = [-(-length // page) for length in sizes.k_lengths]
    numbers = source.permutation(sum(needed) + 3)
    # Entries past a sequence's pages are not read.
    table = torch.zeros(len(needed), max(1, *needed) + source.choice([0, 1]), dtype=torch.int32)
    pages = [
        torch.full((len(numbers), page, *t.shape[1:]), torch.nan, dtype=t.dtype)
        for t in (call.key, call.value)
    ]
    begin = 0
    for sequence, length in enumerate(sizes.k_lengths):
        for first in range(0, length, page):
            number = numbers.pop()
            table[sequence, first // page] = number
            keys = slice(begin + first, begin + min(first + page, length))
            for side, tensor in zip(pages, (call.key, call.value), strict=True):
                side[number, : keys.stop - keys.start] = tensor[keys]
        begin += length
    call.key, call.value = (strided(source, side) for side in pages)
    call.block_table = strided(source, table)


def bounds(lengths: list[int]) -> Tensor:
    """Return the bounds of packed sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
