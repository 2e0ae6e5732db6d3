# SPDX-License-Identifier: BSD-3-Clause
"""Rendering of results on pages: tables in marked blocks, figures, and a page for each file.

A block or a page without a results file says that nothing has been measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from docs_tools.blocks import filled

from .bars import bars_table, verdicts
from .comparisons import COMPARISONS, slower_table
from .density import dense_table, draw_maps, is_map, map_table
from .entrants import ALL_KEYS
from .equivalence import LIMIT, TENSORS, equivalence_tables, is_equivalence, ratios
from .figures import Drawing, drawings, write_figures
from .learning import report as learning
from .profile_tables import profile_tables
from .results import Record, Results, read
from .tables import COLUMNS, Table, run_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    "benchmarks/profiles/README.md",
    *(
        f"docs/{name}.md"
        for name in ("index", "benchmarks", "limits", "structural_biology", "relative_bias")
    ),
)
_STUDY = "learning"  # folder of results; if it exists, its page must, too
LEARNING = f"docs/{_STUDY}.md"
_FIGURE = re.compile(r"\]\((?:docs/)?figures/([\w-]+)\.png\)")
_ABSENT = "*Not measured yet.*\n"
_NAMED = 2  # number of missed targets of a run that are named


# Tables of a few numbers of ours, the fastest with the same mask and the fastest dense one. A line
# has file, case, contestant and quantity, and a label if these are unclear or too long.
HEADLINES = {
    "summary": """
        h200 heads32-8k intervals forward
        h200 heads32-8k intervals backward
        h200 growth-64k intervals forward
        h200 growth-64k intervals backward
        h100-decode decode-64k key_mask forward
        h200-generate generate-16k flash_dmattn attention
        cpu masked-4k intervals forward
        cpu masked-4k intervals forward_backward
        cpu-decode decode-64k key_mask forward
        cpu-generate generate-2k flash_dmattn attention""",
    "slower": """
        h100-legacy-forward length-4096 boolean forward
        h100-legacy-forward length-4096 boolean forward_with_mask
        h100-legacy-forward length-32768 boolean forward
        h100-legacy-forward length-32768 boolean forward_with_mask
        h200-legacy-backward length-4096 boolean backward
        h200-legacy-backward length-4096 boolean end_to_end
        h200-legacy-backward length-16384 boolean backward
        h200-legacy-backward length-16384 boolean end_to_end
        cpu-legacy-forward length-4096 boolean forward
        cpu-legacy-backward length-2048 boolean backward
        h200 dense-8k no_mask forward
        h200 dense-8k no_mask backward""",
    "portable": """
        h200-triton heads32-8k triton forward
        h200-triton heads32-8k triton backward""",
    "training": """
        h200-train train-2k flash_dmattn train_step = 32 x 2048 tokens
        h200-train train-4k flash_dmattn train_step = 16 x 4096 tokens
        h200-train train-16k flash_dmattn train_step = 4 x 16,384 tokens
        h200-train train-64k flash_dmattn train_step = 1 x 65,536 tokens""",
    "readme": """
        h200 heads32-8k intervals forward = forward, 8192 tokens, 1024 kept
        h200 heads32-8k intervals backward = backward, 8192 tokens, 1024 kept
        h100-decode decode-64k key_mask forward = one token decoded, 65,536 tokens cached, 1024 kept
        h200-train train-2k flash_dmattn train_step = training step, 32 x 2048 tokens, 1024 kept
        h200-train train-64k flash_dmattn train_step = training step, 65,536 tokens, 1024 kept
        cpu masked-4k intervals forward = forward, 4096 tokens, 256 kept
        cpu masked-4k intervals forward_backward = forward and backward, 4096 tokens, 256 kept
        cpu masked-4k intervals memory_with_mask = extra memory of both, mask included""",
}
_TITLES = {
    "summary": "At a glance",
    "slower": "Where it is slower, or nearly so",
    "portable": "Triton's kernels, for GPUs that no pack serves",
    "training": "A training step",
    "readme": "Time, and extra memory",
}
# Fields of a case that are not part of its problem.
_NO_PROBLEM = ("contestants", "query_bytes", "pair_bias")
_WORDS = {"forward_with_mask": "mask + forward", "end_to_end": "mask + forward + backward"}


def headline_keys(name: str) -> list[tuple[list[str], str]]:
    """Return file, case, contestant and quantity of each line of a table, and its label."""
    lines = (line.partition(" = ") for line in HEADLINES[name].strip().splitlines())
    return [(key.split(), label) for key, _, label in lines]


def tables_of(results: Results) -> list[Table]:
    """Return the tables of everything that was measured."""
    if is_map(results):
        return [map_table(results)]
    return equivalence_tables(results) if is_equivalence(results) else run_tables(results)


def headlines(name: str, found: Mapping[str, Results]) -> Table:
    """Return ours, the fastest with the same mask and the fastest dense attention, line by line,
    with the measured commits.

    The others are from every file that has the same problem on the same machine.
    """
    rows: list[tuple[str, ...]] = []
    files: dict[str, None] = {}
    for (file, case, who, quantity), label in headline_keys(name):
        known = _measured(found, file, case, quantity)
        mine = next((r for place, r in known if place == file and r.contestant == who), None)
        if mine is None:
            continue
        masked = [one for one in known if one[1].role != "ours" and one[1].mask == mine.mask]
        dense = [one for one in known if one[1].role == "baseline" and one[1].mask == ALL_KEYS]
        files[file] = None
        cells = [_shown(mine)]
        for others in (masked if mine.mask != ALL_KEYS else [], dense):
            place, best = min(others, key=lambda one: one[1].value or 0.0, default=(file, None))
            files[place] = None
            cells.append(_beside(best, mine))
        words = _WORDS.get(quantity, quantity.replace("_", " + "))
        what = label or f"{case}, {who}, {words}"
        rows.append((f"{found[file].machine}: {what}", *cells))
    heads = ("", "flash_dmattn", "best with the same mask", "best dense, no mask")
    note = f"measured: {', '.join(f'{file} ({found[file].commit})' for file in files)}"
    return Table(_TITLES[name], heads, tuple(rows), (note,) if rows else ())


def _measured(
    found: Mapping[str, Results], file: str, case: str, quantity: str
) -> list[tuple[str, Record]]:
    """Return the records of a file's problem, from all files with its machine and torch."""

    def problem(results: Results) -> tuple[Any, ...]:
        sizes = {k: v for k, v in results.cases.get(case, {}).items() if k not in _NO_PROBLEM}
        return (results.machine, results.environment["torch"], sizes)

    if file not in found:
        return []
    return [
        (name, record)
        for name, results in found.items()
        if problem(results) == problem(found[file])
        for record in results.records
        if (record.case, record.quantity) == (case, quantity) and record.value
    ]


def _shown(record: Record) -> str:
    quantity = COLUMNS[record.quantity]
    value = (record.value or 0.0) / quantity.scale
    return f"{value:.3g} {quantity.unit}" if value < 1000 else f"{value:.0f} {quantity.unit}"


def _beside(best: Record | None, mine: Record) -> str:
    """Return the best of others, and its ratio to ours."""
    if best is None or not best.value or not mine.value:
        return "-"
    times = best.value / mine.value
    shown = f"{times:.2g}" if times < 99.5 else f"{times:.0f}"
    return f"{_shown(best)} ({best.contestant}), {shown} x"


def _bars(found: Mapping[str, Results]) -> Table:
    """Return how many bars of each run are met, and the first missed ones."""
    rows = []
    for name, results in found.items():
        judged = [verdict for verdict in verdicts(results) if verdict.met is not None]
        if judged:
            missed = [verdict.bar.work for verdict in judged if not verdict.met]
            count = f"{len(judged) - len(missed)} of {len(judged)}"
            more = [f"{len(missed) - _NAMED} more"] if len(missed) > _NAMED else []
            named = "; ".join([*missed[:_NAMED], *more])
            rows.append((f"{results.machine}: `{name}`", count, named or "-"))
    return Table("Performance targets", ("", "met", "missed"), tuple(rows))


def _errors(found: Mapping[str, Results]) -> Table:
    """Return the worst ratio of each tensor's error over all measured configurations."""
    rows = []
    for results in filter(is_equivalence, found.values()):
        known = ratios(results)
        worst = [max(v for (*_, what), v in known.items() if what == name) for name in TENSORS]
        count = f"{len({case for case, *_ in known})} of {len(results.cases)}"
        rows.append((results.machine, count, *(f"{ratio:.2f}" for ratio in worst)))
    title = f"Largest error, relative to PyTorch's in 16 bit; at most {LIMIT:g} is allowed"
    return Table(title, ("", "configurations", *TENSORS), tuple(rows))


def block_bodies(found: Mapping[str, Results]) -> dict[str, str]:
    """Return the contents of each block of a page."""
    tables = {name: [headlines(name, found)] for name in HEADLINES}
    maps = [results for results in found.values() if is_map(results)]
    tables |= {"map-table": [*map(map_table, maps)], "map-dense": [dense_table(maps)]}
    tables |= {"bars": [_bars(found)], "errors": [_errors(found)]}
    tables["slower-same"] = [slower_table(found)]
    tables |= {name: [one.table(found) for one in all_] for name, all_ in COMPARISONS.items()}
    tables |= {name: [table] for name, table in profile_tables().items()}
    bodies = {name: "\n\n".join(str(t) for t in ts if t.rows) for name, ts in tables.items()}
    return {name: f"{body}\n" if body else _ABSENT for name, body in bodies.items()}


def results_page(name: str, results: Results) -> str:
    """Return all numbers of a results file as a page next to it."""
    tables, judged = tables_of(results), verdicts(results)
    if any(verdict.met is not None for verdict in judged):
        tables.append(bars_table(judged))
    heading = results.heading.replace("\n", "  \n")
    about = f"Made from [{name}.json]({name}.json) by `python -m benchmarks render`."
    return "\n\n".join([f"# {name}", heading, about, *map(str, tables)]) + "\n"


def rendered(root: Path, results: Path) -> dict[Path, str]:
    """Return every page that is made from results, with its required text.

    Raises:
        ValueError: a file is not a results file, or a block of a page does not end.
        OSError: a page is absent.
    """
    found = read_folder(results)
    texts = {results / f"{name}.md": results_page(name, one) for name, one in found.items()}
    studied = learning.tables(_study(results))
    bodies = block_bodies(found) | {name: f"{table}\n" for name, table in studied.items()}
    pages = (*PAGES, LEARNING) if studied else PAGES
    return texts | {root / page: filled((root / page).read_text(), bodies) for page in pages}


def draw_pages(root: Path, results: Path) -> list[Path]:
    """Draw the figures that pages show, and return the files."""
    found, runs = read_folder(results), _study(results)
    pages = (*PAGES, LEARNING) if runs else PAGES
    shown = {n for page in pages for n in _FIGURE.findall((root / page).read_text())}
    maps = [one for one in found.values() if is_map(one)]
    known: dict[str, Drawing] = (
        {"map": ("", lambda pyplot: draw_maps(pyplot, maps))} if maps else {}
    )
    for name, group in learning.groups(runs).items():
        known[name] = ("", partial(learning.draw, grouped=[group]))
    for name, one in found.items():
        if not is_map(one):
            known |= {f"{name}-{picture}": drawing for picture, drawing in drawings(one).items()}
    wanted = {name: drawing for name, drawing in known.items() if name in shown}
    return write_figures(wanted, root / "docs" / "figures")


def _study(results: Path) -> list[learning.Run]:
    return learning.read(sorted((results / _STUDY).glob("*.json")))


def read_folder(folder: Path) -> dict[str, Results]:
    """Return all results in a folder by name, except the demo's, which has its own format."""
    return {p.stem: read(p) for p in sorted(folder.glob("*.json")) if p.stem != "demo"}
