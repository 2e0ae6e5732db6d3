# SPDX-License-Identifier: BSD-3-Clause
"""The picture: loss of both trainings, and time against sequence length."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot

pyplot.switch_backend("Agg")

_STYLE = {
    "flash_dmattn": {"color": "tab:blue", "linewidth": 2.0},
    "masked SDPA": {"color": "tab:orange", "linewidth": 2.0, "linestyle": "--"},
}


def write_plot(
    path: Path,
    losses: dict[str, list[float]],
    seconds: dict[str, dict[int, float]],
    window: int,
) -> None:
    """Write a PNG with the losses by step and the layer's seconds by sequence length."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, values in losses.items():
        left.plot(range(1, len(values) + 1), values, label=name, **_STYLE[name])
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss, same batches")
    for name, by_length in seconds.items():
        milliseconds = [1e3 * s for s in by_length.values()]
        right.plot(list(by_length), milliseconds, marker="o", label=name, **_STYLE[name])
    right.set(
        xlabel="sequence length",
        ylabel="milliseconds",
        title=f"Attention layer, forward + backward, {window} keys kept",
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
