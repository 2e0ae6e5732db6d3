# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of masks: every kind of mask, intervals, and the growth of a causal selection."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib import pyplot

from flash_dmattn import IntervalMask, dynamic_mask

from .canvas import KEPT, SEEN, UNSEEN, draw_mask, legend, save

LENGTH = 20
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def random_bias(length: int, seed: int = 3) -> torch.Tensor:
    """Return a bias with one number for each key, (1, 1, 1, length)."""
    return torch.randn(1, 1, 1, length, generator=torch.Generator().manual_seed(seed))


def kinds(folder: Path) -> Path:
    """Draw masks of every kind side by side."""
    bias = random_bias(LENGTH)
    drawn = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    padding = torch.arange(LENGTH)[None] < LENGTH - 6
    ids = torch.tensor([[0] * 5 + [1] * 9 + [2] * 6])
    documents = IntervalMask.documents(ids)
    window = IntervalMask.sliding_window(4, 0, LENGTH, LENGTH)
    everything = torch.ones_like(CAUSAL)
    of_all_queries = dynamic_mask(bias, 5)
    assert isinstance(of_all_queries, torch.Tensor)
    titles_and_masks = {
        "boolean mask, is_causal": (drawn < 0.4, CAUSAL),
        "dynamic_mask(bias, 5, is_causal=True)": (dynamic_mask(bias, 5, is_causal=True), CAUSAL),
        "dynamic_mask(bias, 5)": (of_all_queries.expand(1, 1, LENGTH, LENGTH), everything),
        "from_key_padding": (IntervalMask.from_key_padding(padding, LENGTH), everything),
        "sliding_window(4, 0)": (window, everything),
        "documents, is_causal": (documents, CAUSAL),
        "prefix_lm(7)": (IntervalMask.prefix_lm(torch.tensor([7]), LENGTH, LENGTH), everything),
        "documents & sliding_window(4, 0)": (documents & window, everything),
    }
    figure, axes = pyplot.subplots(2, 4, figsize=(11, 6.1), layout="constrained")
    for axis, (title, (mask, seen)) in zip(axes.flat, titles_and_masks.items(), strict=True):
        kept = mask.to_bool(LENGTH) if isinstance(mask, IntervalMask) else mask
        draw_mask(axis, kept.reshape(LENGTH, LENGTH) & seen, title, seen)
    legend(figure, {"kept": KEPT, "dropped by the mask": SEEN, "behind the causal limit": UNSEEN})
    return save(figure, folder / "masks-kinds.png")


def intervals(folder: Path) -> Path:
    """Draw a causal selection as squares, and as it is stored: two integers for each key."""
    mask = dynamic_mask(random_bias(LENGTH), 5, is_causal=True)
    assert isinstance(mask, IntervalMask)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.6, 4.4), layout="constrained")
    draw_mask(left, mask.to_bool(LENGTH)[0, 0], "the mask: queries x keys", CAUSAL)
    draw_mask(right, torch.zeros_like(CAUSAL), "what is stored: start and end of each key")
    for key, (start, end) in enumerate(
        zip(mask.start[0, 0].tolist(), mask.end[0, 0].tolist(), strict=True)
    ):
        if start < end:
            right.plot([key + 0.5] * 2, [start, end], color=KEPT, linewidth=3, marker="_")
        else:
            right.text(key + 0.5, key + 0.5, "-", ha="center", va="center", fontsize=9)
    legend(figure, {"kept": KEPT, "seen, dropped": SEEN, "not seen": UNSEEN})
    return save(figure, folder / "masks-intervals.png")


def growth(folder: Path) -> Path:
    """Draw the keys that a causal top-w selection keeps for each query; above, their biases."""
    length, window = 40, 6
    bias = random_bias(length, seed=8)
    mask = dynamic_mask(bias, window, is_causal=True)
    assert isinstance(mask, IntervalMask)
    figure, (above, below) = pyplot.subplots(
        2,
        1,
        figsize=(7, 8.4),
        height_ratios=(1, 5),
        sharex=True,
        layout="constrained",
    )
    last = (mask.end[0, 0] == length).tolist()
    above.bar(
        [key + 0.5 for key in range(length)],
        bias.flatten().tolist(),
        color=[KEPT if held else SEEN for held in last],
    )
    above.axhline(0, color="black", linewidth=0.6)
    above.set_ylabel("bias", fontsize=8)
    above.set_title(
        f"dynamic_mask(bias, {window}, is_causal=True): dark bars are kept by the last query",
        fontsize=9,
    )
    above.tick_params(labelsize=7)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    draw_mask(below, mask.to_bool(length)[0, 0], "", seen)
    below.set_aspect("auto")
    legend(figure, {"kept": KEPT, "seen, dropped": SEEN, "not seen": UNSEEN})
    return save(figure, folder / "masks-growth.png")


PICTURES = (kinds, intervals, growth)
