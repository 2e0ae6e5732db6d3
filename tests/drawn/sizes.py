# SPDX-License-Identifier: BSD-3-Clause
"""The sizes of drawn problems: near the tiles of kernels, and small enough to draw thousands."""

from __future__ import annotations

import dataclasses

from .source import Source

COMMON_HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
ODD_HEAD_DIMS = (1, 2, 3, 7, 8, 15, 17, 24, 31, 33, 40, 48, 63, 65, 72, 80, 100, 127, 129, 160, 255)
EDGES = (
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    79,
    80,
    81,
    127,
    128,
    129,
    191,
    192,
    193,
    255,
    256,
    257,
)
# Products of a forward pass by weight; a float64 backward pass has five times as many.
BUDGETS = {2e6: 3.0, 8e6: 3.0, 2e7: 1.0, 1.5e8: 0.07}
SMALL_BUDGETS = {5e5: 1.0, 2e6: 1.0}


@dataclasses.dataclass
class Sizes:
    """The sizes of a dense problem, or of packed sequences, whose lengths are in lists."""

    q_lengths: list[int]
    k_lengths: list[int]
    kv_heads: int
    group: int
    head_dim: int
    packed: bool
    batch: int  # of a dense problem, which has one query length and one key length

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def queries(self) -> int:
        return sum(self.q_lengths)

    @property
    def keys(self) -> int:
        return sum(self.k_lengths)

    def work(self) -> float:
        pairs = sum(q * k for q, k in zip(self.q_lengths, self.k_lengths, strict=True))
        # Some passes over the pairs cost as much as a product over 64 columns.
        rows = self.queries + self.keys
        return self.batch * self.heads * (pairs * (self.head_dim + 64.0) + rows * self.head_dim)


def draw_sizes(source: Source, *, small: bool, family: str = "any") -> Sizes:
    """Draw sizes within a drawn budget: few large problems, many small ones.

    A family has sizes with kernels of their own that are rarely drawn otherwise; it may exceed the
    budget.
    """
    if family != "any":
        return _sizes_of(source, family)
    budget = source.weighted(SMALL_BUDGETS if small else BUDGETS)
    while True:
        sizes = _any_sizes(source)
        if sizes.work() <= budget:
            return sizes


def _any_sizes(source: Source) -> Sizes:
    head_dim = source.choice(
        source.weighted({COMMON_HEAD_DIMS: 6.0, ODD_HEAD_DIMS: 2.0, tuple(range(1, 257)): 1.0})
    )
    kv_heads = source.weighted({1: 4, 2: 4, 3: 1, 4: 1})
    group = source.weighted({1: 4, 2: 4, 3: 1, 4: 2, 5: 0.5, 8: 1, 16: 0.3})
    packed = source.chance(0.3)
    if packed:
        lengths = [_lengths(source) for _ in range(source.weighted({1: 1, 2: 2, 3: 3, 5: 2, 8: 1}))]
        # A sequence may lack its queries, its keys, or both.
        lengths = [
            (source.weighted({q: 8, 0: 1}), source.weighted({k: 8, 0: 1})) for q, k in lengths
        ]
        if source.chance(0.3):  # like documents that are packed for training
            lengths = [(queries, queries) for queries, _ in lengths]
        q_lengths, k_lengths = (list(side) for side in zip(*lengths, strict=True))
        return Sizes(q_lengths, k_lengths, kv_heads, group, head_dim, True, 1)
    queries, keys = _lengths(source)
    batch = source.weighted({1: 4, 2: 4, 3: 1, 4: 1})
    return Sizes([queries], [keys], kv_heads, group, head_dim, False, batch)


def _sizes_of(source: Source, family: str) -> Sizes:
    """Draw sizes of a family.

    "short" sequences; "pairs", with a bias row for each query; "windows": short pairs; "rows" of
    many keys with mask and bias rows; "long" sequences with few queries; "selections" of a window
    among some hundred keys; "decode" with one query; "boxes" of consecutive keys, too many for the
    short-sequence kernels; "shared_bias", one bias value for all keys; "narrow" values, sized by
    `draw`; "blocks" of pairs in the mask.
    """
    if family == "blocks":
        queries, keys = source.integer(100, 400), source.integer(100, 500)
        keys = source.choice([queries, keys])
        kv_heads, group, batch = (source.choice([1, 2]) for _ in range(3))
        head_dim = source.choice([16, 32, 64, 128])
        return Sizes([queries], [keys], kv_heads, group, head_dim, False, batch)
    short = source.choice([source.integer(1, 64), source.integer(33, 256), 64, 128, 192, 256])
    queries, keys = {
        "short": (short, source.choice([short, short, source.integer(1, 256)])),
        "pairs": (short, source.choice([short, short, source.integer(1, 256)])),
        "windows": (source.integer(46, 64), source.integer(46, 64)),
        "rows": (source.integer(200, 256), 16 * source.integer(136, 144)),
        "long": (
            source.choice([1, 2, 5, 17, 40]),
            source.choice([source.integer(1500, 9000), source.integer(16000, 18000)]),
        ),
        "selections": (source.integer(260, 900), source.integer(260, 900)),
        "decode": (1, source.choice([source.integer(1, 600), source.integer(600, 3000)])),
        "boxes": (source.integer(1, 200), source.integer(1025, 1400)),
        "shared_bias": (short, source.integer(1, 256)),
        "narrow": (
            source.choice([128, 129, 192, source.integer(130, 400)]),
            source.integer(1, 500),
        ),
    }[family]
    if family == "selections":
        keys = source.choice([queries, queries, keys])
    head_dims = {
        "short": (16, 24, 32, 40, 64),
        "windows": (8, 16, 32),
        "narrow": (136, 160, 184, 192, 192, 192),
    }
    head_dim = source.choice(head_dims.get(family, (16, 32, 64, 128)))
    has_groups = family not in ("pairs", "windows", "rows")
    group = source.choice([1, 1, 2, 4]) if has_groups else 1
    heads, batch = source.choice([1, 2, 3]), source.choice([1, 2])
    if family == "narrow" and source.chance(0.25):
        lengths = [queries, source.integer(1, 100)]
        return Sizes(lengths, lengths, heads, group, head_dim, True, 1)
    if family in ("rows", "long", "selections"):
        heads, batch = source.choice([1, 2]), 1
    return Sizes([queries], [keys], heads, group, head_dim, False, batch)


def _lengths(source: Source) -> tuple[int, int]:
    kind = source.weighted({"any": 5, "square": 3, "decode": 2, "many keys": 1, "many rows": 0.5})
    if kind == "square":
        length = _length(source)
        return length, length
    if kind == "decode":
        return source.weighted({1: 4, 2: 1, 3: 1, 5: 1}), source.integer(
            1, source.weighted({300: 2, 2500: 3, 20000: 0.5})
        )
    if kind == "many keys":
        return _length(source), source.integer(300, 1200)
    if kind == "many rows":
        return source.integer(300, 1200), _length(source)
    return _length(source), _length(source)


def _length(source: Source) -> int:
    kind = source.weighted({"few": 3, "edge": 5, "any": 3, "long": 1, "longer": 0.2, "none": 0.15})
    if kind == "few":
        return source.integer(1, 40)
    if kind == "edge":
        return source.choice(EDGES)
    if kind == "any":
        return source.integer(1, 300)
    if kind == "none":
        return 0
    return source.integer(300, 640) if kind == "long" else source.integer(640, 1500)
