# SPDX-License-Identifier: BSD-3-Clause
"""Command line of the benchmarks: ``python -m flash_dmattn.bench cpu --output cpu.json``.

Without a subcommand the GPU is measured where there is one, and the CPU elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from . import map as density_map
from .cases import PASSES, Case, dense_case, masked_case
from .contestants import CONTESTANTS
from .gpu import command as gpu
from .report import describe_environment, to_json, to_text
from .runner import AGREEMENT, DisagreementError, measure_memory, run_case


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(_with_command(sys.argv[1:] if arguments is None else arguments))
    if options.command == "gpu":
        return gpu.measure(options, parser)
    if options.command == "show":
        return gpu.show(options, parser)
    if options.command in ("map", "map-show"):
        return density_map.run(options, parser)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.command == "memory":
        use = measure_memory(options.case, options.contestant, options.which)
        print(json.dumps(asdict(use)))
        return 0
    try:
        cases = _cases(options)
    except ValueError as error:
        parser.error(str(error))
    return _benchmark(cases, options)


def _with_command(arguments: Sequence[str]) -> list[str]:
    """The arguments with a subcommand, should they begin with an option."""
    if arguments and (arguments[0] in ("-h", "--help") or not arguments[0].startswith("-")):
        return list(arguments)
    return ["gpu" if torch.cuda.is_available() else "cpu", *arguments]


def _benchmark(cases: list[Case], options: argparse.Namespace) -> int:
    environment = describe_environment("cpu")
    results = []
    try:
        for case in cases:
            print(f"measuring {case.name} ", end="", file=sys.stderr, flush=True)
            with_memory = options.memory and case.window is not None
            results += run_case(case, options.repeats, with_memory, _dot)
            print(file=sys.stderr)
    except DisagreementError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(to_text(environment, results))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(to_json(environment, results), indent=1) + "\n")
    missed = [ratio for result in results for ratio in result.ratios if ratio.met is False]
    return 2 if options.check and missed else 0


def _dot() -> None:
    print(".", end="", file=sys.stderr, flush=True)


def _cases(options: argparse.Namespace) -> list[Case]:
    shape = Case(
        name="shape",
        batch=options.batch,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        length=options.length,
        window=options.window,
        seed=options.seed,
    )
    cases = []
    if "masked" in options.kinds:
        cases.append(masked_case(shape, "float32"))
    if "dense" in options.kinds:
        cases += [dense_case(shape, d, causal) for d in options.dtypes for causal in (True, False)]
    return cases


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    cpu = commands.add_parser(
        "cpu",
        help="masked and dense attention on the CPU beside scaled_dot_product_attention",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cpu.add_argument("--batch", type=_positive, default=1)
    cpu.add_argument("--heads", type=_positive, default=8, help="query heads")
    cpu.add_argument("--kv-heads", type=_positive, default=2, help="key/value heads")
    cpu.add_argument("--head-dim", type=_positive, default=64)
    cpu.add_argument("--length", type=_positive, default=4096, help="queries, and keys")
    cpu.add_argument("--window", type=_positive, default=256, help="keys that each query keeps")
    cpu.add_argument("--repeats", type=_positive, default=7, help="timed calls of each contestant")
    cpu.add_argument("--seed", type=int, default=0)
    cpu.add_argument("--kinds", nargs="+", choices=("masked", "dense"), default=["masked", "dense"])
    cpu.add_argument(
        "--dtypes",
        nargs="+",
        choices=tuple(AGREEMENT),
        default=list(AGREEMENT),
        help="of the dense cases; the masked case is float32",
    )
    cpu.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the masked case's peak extra memory, each in a fresh process",
    )
    cpu.add_argument("--output", type=Path, help="write the results here as JSON")
    cpu.add_argument("--check", action="store_true", help="exit with 2 when a target is missed")

    memory = commands.add_parser("memory", help="peak extra memory of one contestant, as JSON")
    memory.add_argument("--case", type=_case, required=True, help="the case as a JSON object")
    memory.add_argument("--contestant", choices=tuple(CONTESTANTS), required=True)
    memory.add_argument("--pass", dest="which", choices=PASSES, required=True)

    gpu.add_commands(commands)
    density_map.add_commands(commands)

    for command in (cpu, memory):
        command.add_argument("--threads", type=_positive, help="default: what torch uses")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _case(text: str) -> Case:
    try:
        return Case(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"not a case: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
