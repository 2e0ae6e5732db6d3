# SPDX-License-Identifier: BSD-3-Clause
"""The plot: loss of both trainings over time, and time by sequence length."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from matplotlib import pyplot

pyplot.switch_backend("Agg")

_STYLE = {
    "forgetting": {"color": "tab:blue", "linewidth": 2.0},
    "dense": {"color": "0.4", "linewidth": 2.0, "linestyle": "--"},
}


def write_plot(
    path: Path,
    losses: dict[str, tuple[list[float], list[float]]],
    seconds: dict[str, dict[int, float]],
) -> None:
    """Write a PNG with the losses by seconds of training and the layer's seconds by length.

    ``losses`` has, by name, the seconds and the loss of each step.
    """
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, (each, values) in losses.items():
        label = f"{name}: {len(values)} steps"
        left.plot([*accumulate(each)], values, label=label, **_STYLE[name])
    title = "Training loss, same batches"
    left.set(xlabel="seconds of training", ylabel="loss (nats per byte)", title=title)
    for name, by_length in seconds.items():
        milliseconds = [1e3 * s for s in by_length.values()]
        right.plot(list(by_length), milliseconds, marker="o", label=name, **_STYLE[name])
    right.set(
        xlabel="sequence length",
        ylabel="milliseconds",
        title="Attention layer, forward + backward",
        xscale="log",
        yscale="log",
    )
    ticks = sorted({n for by_length in seconds.values() for n in by_length})
    right.set_xticks(ticks, [str(n) for n in ticks])
    right.minorticks_off()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
