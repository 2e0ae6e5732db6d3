# SPDX-License-Identifier: BSD-3-Clause
"""Check any number of drawn calls against float64; scripts/fuzz runs this module."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from flash_dmattn import loader
from support import Target

from .coverage import LEAST, instances_of, known_ways, launched_by, report, report_ways, tile_arch
from .lists import draw_listed
from .problems import draw
from .records import Record, facts_of
from .ways import compiled
from .workers import Outcome, outcome_of, run

SAVED_EVERY = 5.0  # seconds


def main() -> int:
    arguments = parse()
    target = Target(arguments.device, arguments.backend or arguments.device)
    if arguments.coverage:
        return show_coverage(target, arguments.coverage)
    if arguments.verbose:
        return replay(target, arguments)
    facts = facts_of(
        target,
        small=arguments.small,
        many=arguments.many,
        lists=arguments.lists,
        first_seed=arguments.seed,
        commit=arguments.commit,
    )
    record = Record(facts, arguments.seed)
    if arguments.many and target.is_pack and target.has_kernels_of_gpu:
        compiled()  # for the processes that start below
    path: Path | None = arguments.output
    if arguments.resume and path is not None and path.exists():
        record = Record.read(path, facts)
    begin = time.monotonic()
    saved, before = begin, record.seconds
    outcomes = run(
        iter(range(record.next_seed, arguments.seed + arguments.cases)),
        functools.partial(
            outcome_of,
            target=target,
            small=arguments.small,
            many=arguments.many,
            lists=arguments.lists,
        ),
        workers=arguments.workers,
        limit=arguments.limit,
        until=begin + 60 * arguments.minutes,
    )
    with tqdm(total=arguments.cases, initial=record.done, unit="case", mininterval=1) as bar:
        for outcome in outcomes:
            record.add(outcome)
            bar.update()
            if outcome.kind not in ("right", "refused"):
                bar.write(line_of(outcome), file=sys.stderr)
            record.seconds = before + time.monotonic() - begin
            if path is not None and time.monotonic() - saved > SAVED_EVERY:
                record.write(path)
                saved = time.monotonic()
    if path is not None:
        record.write(path)
    left = arguments.cases - record.done
    print(
        f"{record.done} cases from seed {arguments.seed} in {record.seconds:.0f} s on "
        f"{facts['device']} ({facts['pack'] or target.backend}, {facts['commit'][:12]}): "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(record.counts.items()))
        + (f"; {left} are left, --resume goes on" if left > 0 else "")
    )
    return 1 if record.wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description="Draw calls with all options together, and compare out, lse and gradients with "
        "float64. Every seed is one call, the same on every machine.",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", help="the device's kernel pack unless given")
    parser.add_argument("--seed", type=int, default=0, help="the first; each case takes the next")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument(
        "--small", action="store_true", help="only small problems, judged on the CPU"
    )
    parser.add_argument(
        "--many", action="store_true", help="repeat each problem to thousands of sequences or heads"
    )
    parser.add_argument("--lists", action="store_true", help="queries list their keys")
    parser.add_argument(
        "--coverage",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="check nothing: tell which kernels of the pack the cases of --output files launched, "
        f"and fail if one was launched by fewer than {LEAST}",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="start nothing new after this time"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds that a case may take")
    parser.add_argument("--output", type=Path, help="a JSON file of what was checked and was wrong")
    parser.add_argument(
        "--resume", action="store_true", help="go on where --output ends, if it is there"
    )
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument(
        "--verbose", action="store_true", help="show each case, in this process, with a traceback"
    )
    return parser.parse_args()


def show_coverage(target: Target, runs: list[Path]) -> int:
    """Print for each kernel of the target's pack how many cases launched it."""
    pack = loader.pack_for(target.device)
    cases = launched_by(runs)
    table, missing = report(instances_of(Path(pack.path)), cases)
    ways, untaken = report_ways(known_ways(tile_arch(pack.name)), cases)
    print("\n".join([table, ways, *missing, *untaken]))
    return 1 if missing or untaken else 0


def replay(target: Target, arguments: argparse.Namespace) -> int:
    """Check seeds in this process; errors other than wrong results propagate."""
    torch.set_num_threads(1)
    wrong = 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        if not arguments.many:
            draws = draw_listed if arguments.lists else draw
            drawn = draws(seed, target.dtypes, small=arguments.small)
            print(f"seed {seed}: {drawn.describe()}", flush=True)
        outcome = outcome_of(
            seed,
            target,
            small=arguments.small,
            many=arguments.many,
            lists=arguments.lists,
            strict=True,
        )
        print(f"seed {seed}: {outcome.kind} {outcome.message} {outcome.problem}", flush=True)
        wrong += outcome.kind not in ("right", "refused")
    print(f"{arguments.cases} cases, {wrong} wrong")
    return 1 if wrong else 0


def line_of(outcome: Outcome) -> str:
    """Return two lines: the failure and the drawn call."""
    return f"seed {outcome.seed}: {outcome.kind}: {outcome.message}\n    {outcome.problem}"


if __name__ == "__main__":
    sys.exit(main())
