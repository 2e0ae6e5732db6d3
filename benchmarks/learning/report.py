# SPDX-License-Identifier: BSD-3-Clause
"""Tables and a figure of the study's runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from ..tables import Table

Run = dict[str, Any]
_PROBES = {
    "copy": "copied {} bytes later",
    "recall": "one of {} pairs",
    "needle": "needle at {}",
}


def read(paths: Iterable[Path]) -> list[Run]:
    """Return the runs of these files.

    Raises:
        ValueError: a file is not that of a run, or two files have different texts of one name.
    """
    runs: list[Run] = []
    texts: dict[str, str] = {}
    for path in paths:
        run = json.loads(path.read_text())
        if not isinstance(run, dict) or "by_position" not in run:
            raise ValueError(f"{path} is of no run of the study")
        name, digest = run["corpus"]["name"], run["corpus"]["sha256"]
        if texts.setdefault(name, digest) != digest:
            raise ValueError(f"{path} read another text as {name} than the files before it")
        runs.append(run)
    return runs


class Group(NamedTuple):
    """Comparable runs by variant, the best first."""

    title: str
    note: str
    variants: dict[str, list[Run]]

    @property
    def first(self) -> Run:
        """Any run of the group."""
        return next(iter(self.variants.values()))[0]


def groups(runs: Iterable[Run]) -> dict[str, Group]:
    """Return groups by the names of blocks of pages, such as ``learning-code-20s-2x16384-6x512``.

    Raises:
        ValueError: a run is repeated, or a group has runs of several machines.
    """
    found: dict[str, dict[str, list[Run]]] = {}
    machines: dict[str, str] = {}
    for run in runs:
        setting = run["setting"]
        budget = f"{setting['steps']}steps"
        if setting["seconds"] is not None:
            budget = f"{setting['seconds']:g}s"
        name = "learning-{corpus}-{budget}-{batch}x{length}-{layers}x{width}".format(
            budget=budget, **setting
        )
        if machines.setdefault(name, _machine(run)) != _machine(run):
            raise ValueError(f"{name} was run on {machines[name]} and on {_machine(run)}")
        same = found.setdefault(name, {}).setdefault(setting["variant"], [])
        if any(other["setting"]["seed"] == setting["seed"] for other in same):
            raise ValueError(f"two runs are of {setting}")
        same.append(run)

    def bits(variant: tuple[str, list[Run]]) -> float:
        return mean(float(run["bits_per_byte"]) for run in variant[1])

    return {name: _group(dict(sorted(of.items(), key=bits))) for name, of in found.items()}


def _group(variants: dict[str, list[Run]]) -> Group:
    run = next(iter(variants.values()))[0]
    setting, text, where = run["setting"], run["corpus"], run["environment"]
    budget = "{steps} steps" if setting["seconds"] is None else "{seconds:g} seconds"
    # The parameters of the best variant; others have slightly more or fewer.
    title = (
        f"{{corpus}}, {budget} each, {{batch}} x {{length}} tokens a step, {{layers}} layers of "
        f"width {{width}} ({run['parameters'] / 1e6:.1f} M parameters)"
    )
    note = (
        f"{_machine(run)}, torch {where['torch']}, commit {str(where['commit'])[:7]}, "
        f"{where['date'][:10]}; {text['name']}: sha256 {text['sha256'][:16]}"
    )
    return Group(title.format(**setting), note, variants)


def _machine(run: Run) -> str:
    return str(run["environment"]["gpu"] or run["environment"]["cpu"])


def _cell(values: Iterable[float], digits: int = 3) -> str:
    known = [*values]
    shown = f"{mean(known):.{digits}f}"
    return f"{shown} ± {stdev(known):.{digits}f}" if len(known) > 1 else shown


def learned(group: Group) -> Table:
    """Return bits per byte of held-out text, also by position. ± is the deviation over seeds."""
    places, rows = group.first["by_position"], []
    for name, same in group.variants.items():
        cells = [str(len(same)), _cell((run["steps"] for run in same), 0)]
        cells += [_cell((1e3 * run["seconds"] / run["steps"] for run in same), 1)]
        cells += [_cell(run["bits_per_byte"] for run in same)]
        cells += [_cell(run["by_position"][place] for run in same) for place in places]
        rows.append((f"`{name}`", *cells))
    heads = ("attention", "seeds", "steps", "ms a step", "bits per byte", *places)
    title = f"Bits per byte of held-out text: {group.title}"
    return Table(title, heads, tuple(rows), (group.note,))


def fetched(group: Group) -> Table:
    """Return the share of correct predictions of values in the context."""
    probes = [(kind, size) for kind in _PROBES for size in group.first.get(kind, {})]
    rows = [
        (f"`{name}`", *(_cell((run[kind][size] for run in same), 2) for kind, size in probes))
        for name, same in group.variants.items()
    ]
    heads = ("attention", *(_PROBES[kind].format(size) for kind, size in probes))
    note = "share of right bytes; what is asked for is hexadecimal: chance is 0.06"
    return Table(f"Recall: {group.title}", heads, tuple(rows), (note,))


def tables(runs: Iterable[Run]) -> dict[str, Table]:
    """Return both tables of each group, by the names of blocks of pages."""
    found: dict[str, Table] = {}
    for name, group in groups(runs).items():
        found |= {name: learned(group), f"{name}-recall": fetched(group)}
    return found


def draw(pyplot: Any, grouped: Collection[Group]) -> Any:
    """Draw a row for each group: the loss over training time, and held-out bits by position."""
    size: dict[str, Any] = {"figsize": (11, 4.2 * len(grouped)), "layout": "constrained"}
    figure, rows = pyplot.subplots(len(grouped), 2, squeeze=False, **size)
    for (left, right), group in zip(rows, grouped, strict=True):
        for name, same in group.variants.items():
            seconds, _, bits = zip(*same[0]["curve"], strict=True)
            (line,) = left.plot(seconds, bits, lw=1.2)
            places = list(same[0]["by_position"])
            held_out = [mean(run["by_position"][place] for run in same) for place in places]
            right.plot(places, held_out, color=line.get_color(), marker="o", label=name)
        left.set(xlabel="seconds of training", ylabel="bits per byte, trained on")
        left.set_title(group.title, fontsize=8, loc="left")
        right.set(xlabel="position in the text", ylabel="bits per byte, held out")
        right.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        for axis in (left, right):
            axis.grid(alpha=0.3)
    return figure
