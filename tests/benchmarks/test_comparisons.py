# SPDX-License-Identifier: BSD-3-Clause
"""Tables that compare over many problems, and tables of profiler data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment, pages, profile_tables, sets
from benchmarks.comparisons import COMPARISONS, Judged, Peers, slower_table
from benchmarks.entrants import ENTRANTS
from benchmarks.results import Record, Results

WHERE = {
    **environment.describe_environment("cpu", "a clock"),
    "gpu": "a GPU",
    "commit": "0123456789",
    "peers": {"trifast": "7"},
    "date": "2026-01-02T03:04:05",
}
MADE = {
    "h100-shapes": sets.shapes(gpu=True),
    "h200-shapes": sets.shapes(gpu=True),
    "h200-pairs": sets.pairs(gpu=True),
    "h200-legacy-earlier-forward": sets.workload_set("legacy-forward", "cuda"),
    "h200-legacy-earlier-backward": sets.workload_set("legacy-backward", "cuda"),
}


def results(cases: sets.WorkloadSet, *left_out: str) -> Results:
    """Return complete results: the first contestant takes 1 s, each further one 1 s more."""
    records = [
        Record(name, who, ENTRANTS[who].role, "", quantity, 1.0 + place)
        for name, workload in cases.items()
        for place, who in enumerate(workload.contestants)
        for quantity in workload.quantities
        if who not in left_out
    ]
    return Results(WHERE, {}, sets.plain_cases([*cases.values()]), records)


def kinds(one: Judged | Peers) -> tuple[str, ...]:
    return one.kinds if isinstance(one, Peers) else (one.kind,)


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_block_is_of_what_a_default_run_measures(name: str) -> None:
    found = {file: results(cases) for file, cases in MADE.items()}
    for one in COMPARISONS[name]:
        table = one.table(found)
        lines = [case for case in MADE[one.file] if case.partition("-")[0] in kinds(one)]
        assert len(table.rows) == len(lines) > 0
        versions = "trifast 7, " if isinstance(one, Peers) else ""
        told = f"measured: {one.file} (a GPU, {versions}commit 0123456, 2026-01-02)"
        assert table.notes == (told,)
        assert [row for row in table.rows if "-" in row] == []
        # Without measurements the table has no rows.
        assert one.table({}).rows == ()


def test_line_beside_a_reference_has_the_target_of_its_bar() -> None:
    found = {"h100-shapes": results(MADE["h100-shapes"])}
    judged = Judged("title", "compact", "forward", "theirs")
    table = judged.table(found)
    assert table.heads == ("problem", "ours, ms", "theirs, ms", "ours / theirs", "target")
    line = ("1, 32, 8, 128, 8192, 1024", "1000.000", "2000.000", "0.50", "at most 1.2")
    assert table.rows[0] == line
    table = judged._replace(kind="short", quantity="end_to_end").table(found)
    assert table.heads[3] == "theirs / ours"
    line = ("32, 12, 12, 64, 512, 128", "1000.000", "2000.000", "2.00", "at least 1")
    assert table.rows[0] == line
    # Rows whose reference failed are omitted.
    found = {"h100-shapes": results(MADE["h100-shapes"], "compact_cudnn")}
    assert judged.table(found).rows == ()


def test_line_of_peers_names_the_best_of_them() -> None:
    found = {"h200-pairs": results(MADE["h200-pairs"], "cuequivariance")}
    columns = {"pair_bias": "ours", "cuequivariance": "a", "trifast": "b", "pair_sdpa": "c"}
    table = Peers("title", ("triangle",), "forward", columns).table(found)
    assert table.heads == ("", "ours", "b", "c", "best of the others / ours")
    assert table.notes[0] == "not measured in this run: a"
    shape = "triangle: 256 x 256 tokens, 4 heads of 32"
    assert table.rows[0] == (shape, "1000.000", "4000.000", "3000.000", "3.00")


def test_slower_lines_compare_the_best_with_the_same_mask_as_measured_last() -> None:
    def run(date: str, **seconds: float) -> Results:
        (case, *_) = sets.shapes(gpu=True).values()
        name = case.name
        records = [
            Record(name, who, ENTRANTS[who].role, ENTRANTS[who].mask, "forward", value)
            for who, value in seconds.items()
        ]
        return Results({**WHERE, "date": date}, {}, sets.plain_cases([case]), records)

    others: dict[str, float] = {"sdpa": 3e-3, "flex": 2e-3, "dense_cudnn": 1e-4}
    slow = run("2026-01-02", intervals=2.2e-3, boolean=4e-3, **others)
    table = slower_table({"a": slow})
    assert [row[2:] for row in table.rows] == [("forward", "2.200", "2.000 (flex)", "1.10")]
    assert table.notes == ("measured: a (commit 0123456, 2026-01-02)",)
    assert slower_table({"a": run("2026-01-02", intervals=2.19e-3, **others)}).rows == ()
    # A later run of the same problem wins, whatever the order of the files.
    fast = run("2026-01-03", intervals=1e-3, **others)
    assert slower_table({"a": fast, "b": slow}).rows == ()
    assert slower_table({}).notes == ()


# --- profiler data


def test_every_profile_is_on_a_page() -> None:
    found = profile_tables.profile_tables()
    assert set(found) <= pages.block_bodies({}).keys()
    for table in found.values():
        assert table.title
        assert table.notes[-1].startswith("measured: ")


def written(folder: Path, **changes: Any) -> Path:
    where = {"machine": "a GPU", "date": "2026-01-02", "commit": "0123456789", "how": "a clock"}
    table = {"title": "title", "columns": ["", "ms"], "rows": [["a", "1"]], "notes": ["a note"]}
    content = {"schema": 1, **where, "torch": "2", "cudnn": "9", "tables": {"name": table}}
    path = folder / f"{len([*folder.iterdir()])}.json"
    path.write_text(json.dumps({**content, **changes}))
    return folder


def test_profiles_are_tables_that_tell_their_commit(tmp_path: Path) -> None:
    table = profile_tables.profile_tables(written(tmp_path))["name"]
    assert (table.title, table.heads, table.rows) == ("title", ("", "ms"), (("a", "1"),))
    told = "measured: a GPU, torch 2, cuDNN 9, commit 0123456, 2026-01-02"
    assert table.notes == ("a note", told)


def test_wrong_profiles_are_refused(tmp_path: Path) -> None:
    for place, (changes, message) in enumerate(
        (
            ({"schema": 2}, "schema is 2; profiles have 1"),
            (
                {"tables": {"x": {"title": "", "columns": ["", "ms"], "rows": [["a"]]}}},
                "every row must have 2 cells",
            ),
        )
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        with pytest.raises(ValueError, match=message):
            profile_tables.profile_tables(written(folder, **changes))
    with pytest.raises(ValueError, match="another file has a table 'name'"):
        profile_tables.profile_tables(written(written(tmp_path)))
