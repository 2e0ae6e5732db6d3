# SPDX-License-Identifier: BSD-3-Clause
"""Command line of the benchmarks: ``python -m benchmarks forward --output forward.json``.

Without a subcommand every quantity of the standard cases is measured, on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import engine, equivalence, generate, train
from .bars import bars_table, verdicts
from .cases import shape_text
from .entrants import ENTRANTS
from .environment import describe_environment, gpu_state
from .pages import RESULTS, ROOT, rendered, tables_of, write_figures
from .plot import drawings, load_pyplot, write_plots
from .quantities import GENERATE_QUANTITIES, QUANTITIES, TRAIN_QUANTITIES
from .results import Results, Step, read, short_reason
from .sets import SET_NAMES, density_map, workload_set
from .table import Table
from .timing import clock_for
from .workloads import Choice, chosen_workloads, plain_cases

# Seconds of timing for each contestant and quantity; the lesser of a quick run and of the sweeps.
_SECONDS, _FEWER_SECONDS = 0.2, 0.05
# What a CPU takes by default, so that it is done in a minute.
_LONGEST_ON_CPU = 1024

# Subcommands that measure the chosen cases: a line of help, and the quantities; None: all.
VIEWS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "all": ("every quantity", None),
    "gpu": ("the same on a GPU", None),
    "cpu": ("the same on the CPU", None),
    "forward": ("forward, and making the mask", ("selection", "forward", "forward_with_mask")),
    "backward": (
        "backward pass, alone and after the forward pass",
        ("selection", "backward", "forward_backward", "end_to_end"),
    ),
    "decode": ("one query against many cached keys", None),
    "selection": ("making the mask from the bias", ("selection",)),
    "memory": ("peak extra memory", tuple(q for q in QUANTITIES if q.startswith("memory"))),
    "end-to-end": (
        "with making the mask: forward, and training",
        ("forward_with_mask", "end_to_end"),
    ),
    "map": ("over lengths and shares of kept keys, beside dense attention", None),
}
_SHAPE_OPTIONS = {
    "batch": "sequences",
    "heads": "query heads",
    "kv_heads": "key/value heads",
    "head_dim": "dimension of a head",
    "length": "queries, and keys",
    "window": "keys that each query keeps",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given = ["all", *given]
    options = _parser().parse_args(given)
    try:
        status: int = options.run(options)
    except (OSError, RuntimeError, ValueError, ModuleNotFoundError) as error:
        options.parser.error(str(error))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, about: str, run: Callable[[Any], int]) -> Callable[..., Any]:
        added = commands.add_parser(name, help=about, description=about)
        added.set_defaults(run=run, parser=added, view=name)
        return added.add_argument

    for name, (about, _) in VIEWS.items():
        add = command(name, about, _measure_view)
        _add_measuring(add)
        _add_cases(add)
        if name == "map":
            add("--lengths", nargs="+", type=_positive, help="numbers of tokens")
            add("--one-in", nargs="+", type=_positive, metavar="N", help="of N keys one is kept")
    add = command(
        "equivalence", "errors beside PyTorch's at the shapes of 1.2.2's scripts", _equivalence
    )
    _add_measuring(add)
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--longest", type=_positive, help="leave longer sequences out (1024 on a CPU)")
    add("--backends", nargs="+", default=["auto"], metavar="NAME", help="default: auto")
    add = command("generate", "time in attention of a language model that generates", _generate)
    _add_measuring(add)
    add("--contestants", nargs="+", choices=[*generate.METHODS], default=[*generate.METHODS])
    for name, text in (
        ("length", "tokens of the prompt"),
        ("window", "keys that each query keeps"),
        ("new-tokens", "tokens that are generated"),
        ("layers", "of the model"),
        ("repeats", "generations that are timed"),
    ):
        add(f"--{name}", type=_positive, help=text)
    add = command("train", "steps of a language model, and with dense attention", _train)
    _add_measuring(add)
    add("--contestants", nargs="+", choices=[*train.METHODS], default=[*train.METHODS])
    add("--lengths", nargs="+", type=_positive, help="tokens of a sequence")
    add("--tokens", type=_positive, help="of a step, all sequences together")
    add("--window", type=_positive, help="keys that each query keeps")
    add("--layers", type=_positive, help="of the model")
    add("--seconds", type=float, default=2.0, help="of timing each (default: 2)")
    add = command("show", "tables, bars and plots of results", _show)
    add("results", type=Path, nargs="+", help="the JSON that --output wrote")
    _add_presentation(add)
    add = command("render", "pages and figures from all results in a folder", _render)
    add("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    add("--results", type=Path, default=RESULTS, help="folder of JSON")
    add("--check", action="store_true", help="write nothing; exit with 1 where a page is not so")
    return parser


def _add_measuring(add: Callable[..., Any]) -> None:
    """Options of every subcommand that measures something."""
    add("--device", help="a torch device (default: a GPU where there is one)")
    add("--threads", type=_positive, help="of the CPU (default: what torch uses)")
    add(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin nothing new after this time; what is missing is recorded as not measured",
    )
    add("--commit", help="of the sources, where the program is not in a git checkout")
    add("--note", help="kept with the results: who else used the machine, say")
    add("--output", type=Path, help="write the results here as JSON")
    add(
        "--cpu-time",
        action="store_true",
        help="on a CPU: the process's own time, for a machine that others use; with --threads 1",
    )
    _add_presentation(add)


def _add_presentation(add: Callable[..., Any]) -> None:
    add("--bars", action="store_true", help="also show what the kernels are held to")
    add("--check", action="store_true", help="exit with 2 when a bar is missed")
    add("--plot", type=Path, metavar="FOLDER", help="write plots here")
    add("--markdown", action="store_true", help="tables as Markdown")


def _add_cases(add: Callable[..., Any]) -> None:
    add(
        "--set",
        default="standard",
        choices=SET_NAMES,
        help="cases to choose from (default: standard); legacy: 1.2.2's performance scripts",
    )
    add("--list", action="store_true", help="show sets, cases, contestants and quantities")
    add("--cases", nargs="+", default=[], metavar="PATTERN", help="by name, as 'growth-*'")
    add("--contestants", nargs="+", choices=[*ENTRANTS], metavar="NAME", help="see --list")
    add("--without", nargs="+", choices=[*ENTRANTS], default=[], metavar="NAME", help="left out")
    add("--quantities", nargs="+", choices=[*QUANTITIES], metavar="NAME", help="see --list")
    for name, text in _SHAPE_OPTIONS.items():
        add(f"--{name.replace('_', '-')}", type=_positive, help=f"{text}, for every case")
    add("--dtype", choices=("float32", "float16", "bfloat16"))
    add("--seed", type=int, help="of the random numbers")
    add("--quick", action="store_true", help="few cases, no slow contestants, less time")
    add("--seconds", type=float, help=f"of timing each contestant (default: {_SECONDS})")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _device(options: argparse.Namespace) -> str:
    """The device by its number, and the current one; the CPU with its threads."""
    default = {"gpu": "cuda", "cpu": "cpu"}.get(options.view)
    name = options.device or default or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.plot is not None:
        load_pyplot()  # now, rather than after minutes
    device = torch.device(name)
    if device.type != "cuda":
        return str(name)
    if not torch.cuda.is_available():
        raise ValueError(f"the device is {name}, and torch finds no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return f"cuda:{index}"


def _run(
    steps: Iterable[Step], count: int, results: Results, options: argparse.Namespace
) -> Results:
    """Measure, and write after each step, so that an interrupted run leaves what it has."""
    begun, every = time.monotonic(), 0.1 if sys.stderr.isatty() else 5
    with tqdm(steps, total=count, unit="step", dynamic_ncols=True, mininterval=every) as bar:
        for step in bar:
            bar.set_postfix_str(step.title[:80], refresh=False)
            reason = None
            try:
                if options.budget is not None and time.monotonic() - begun >= options.budget:
                    reason = f"not measured: the time budget of {options.budget:g} s was spent"
                else:
                    results.records.extend(step.run())
            except Exception as error:  # whatever it is, the others go on
                reason = short_reason(error)
            except KeyboardInterrupt:
                print("interrupted: here is what was measured", file=sys.stderr)
                break
            if reason is not None:
                results.records.extend(step.missing(reason))
            engine.release_memory()
            results.environment["state_after"] = gpu_state(options.device)
            results.write(options.output)
    return results


def _measure_view(options: argparse.Namespace) -> int:
    device = options.device = _device(options)
    if options.view == "map":
        options.set = "map"
        cases = density_map(device.startswith("cuda"), options.lengths, options.one_in)
    else:
        cases = workload_set(options.set, device)
    if options.list:
        print("\n\n".join(table.text() for table in _lists(options.set, device)))
        return 0
    shape = {name: getattr(options, name) for name in (*_SHAPE_OPTIONS, "dtype", "seed")}
    choice = Choice(
        options.cases,
        options.contestants,
        options.without,
        options.quantities or VIEWS[options.view][1],
        options.quick,
        options.view == "decode",
        {name: value for name, value in shape.items() if value is not None},
    )
    workloads = chosen_workloads(cases, choice, device)
    clock = clock_for(device, cpu_time=options.cpu_time)
    few = options.quick or options.set != "standard"
    seconds = options.seconds or (_FEWER_SECONDS if few else _SECONDS)
    results = Results(
        describe_environment(device, clock.description, options.commit, options.note),
        {name: quantity.about for name, quantity in QUANTITIES.items()},
        plain_cases(workloads),
    )
    steps = (s for w in workloads for s in engine.Measurement(w, clock, seconds).steps())
    count = sum(len(engine.groups(workload)) for workload in workloads)
    return _present([_run(steps, count, results, options)], options)


def _lists(chosen: str, device: str) -> list[Table]:
    sets = {name: workload_set(name, device) for name in SET_NAMES}
    shapes = plain_cases([*sets[chosen].workloads.values()])
    cases = [(name, shape_text(c), " ".join(c["contestants"])) for name, c in shapes.items()]
    entrants = [(name, entrant.about, entrant.mask) for name, entrant in ENTRANTS.items()]
    taken = [(name, quantity.about) for name, quantity in QUANTITIES.items()]
    heads, what = ("", "shape", "contestants"), ("", "what it is", "attends to")
    return [
        Table("Sets (--set)", ("", "cases"), tuple((n, s.about) for n, s in sets.items())),
        Table(f"Cases of {chosen} (--cases)", heads, tuple(cases)),
        Table("Contestants (--contestants, --without)", what, tuple(entrants)),
        Table("Quantities (--quantities)", what[:2], tuple(taken)),
    ]


def _equivalence(options: argparse.Namespace) -> int:
    """Returns 1 where an error is too large or a call failed, 3 where time ran out."""
    device = options.device = _device(options)
    longest = options.longest or (_LONGEST_ON_CPU if device == "cpu" else max(equivalence.LENGTHS))
    cases = equivalence.configurations(device, options.dtype, longest)
    if not cases:
        raise ValueError(f"--longest is {longest}; the shortest sequence is 128")
    results = Results(
        describe_environment(device, "largest error against float64", options.commit, options.note),
        equivalence.QUANTITIES,
        {case.name: asdict(case) for case in cases},
    )
    steps = (equivalence.step(case, options.backends) for case in cases)
    _present([_run(steps, len(cases), results, options)], options)
    if equivalence.failures(results):
        return 1
    measured = len({case for case, *_ in equivalence.ratios(results)})
    print(f"{measured} of {len(cases)} configurations were measured, none failed", file=sys.stderr)
    return 0 if measured == len(cases) else 3


def _generate(options: argparse.Namespace) -> int:
    device = options.device = _device(options)
    clock = clock_for(device, cpu_time=options.cpu_time)
    importlib.import_module("transformers")
    setting = generate.GPU if device.startswith("cuda") else generate.CPU

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names if getattr(options, name)}

    shape = replace(setting.shape, device=device, **given("length", "window"))
    shape = replace(shape, name=f"generate-{shape.length / 1024:g}k")
    setting = replace(setting, shape=shape, **given("cpu_time", "new_tokens", "layers", "repeats"))
    sizes = {"new_tokens": setting.new_tokens, "layers": setting.layers}
    results = Results(
        describe_environment(device, clock.description, options.commit, options.note),
        {name: quantity.about for name, quantity in GENERATE_QUANTITIES.items()},
        {shape.name: {**asdict(shape), "contestants": options.contestants, **sizes}},
    )
    expected: dict[str, torch.Tensor] = {}
    steps = (generate.step(name, setting, expected) for name in options.contestants)
    return _present([_run(steps, len(options.contestants), results, options)], options)


def _train(options: argparse.Namespace) -> int:
    device = options.device = _device(options)
    clock = clock_for(device, cpu_time=options.cpu_time)
    setting = train.GPU if device.startswith("cuda") else train.CPU
    given = {n: getattr(options, n) for n in ("layers", "tokens", "lengths") if getattr(options, n)}
    window = options.window or setting.shape.window
    setting = replace(setting, shape=replace(setting.shape, device=device, window=window), **given)
    cases = [setting.case(length) for length in setting.lengths]
    taken = {"contestants": options.contestants, "layers": setting.layers}
    results = Results(
        describe_environment(device, clock.description, options.commit, options.note),
        {name: quantity.about for name, quantity in TRAIN_QUANTITIES.items()},
        {case.name: {**asdict(case), **taken} for case in cases},
    )
    steps = train.steps(setting, options.contestants, clock, options.seconds)
    count = len(cases) * len(options.contestants)
    return _present([_run(steps, count, results, options)], options)


def _show(options: argparse.Namespace) -> int:
    return _present([read(path) for path in options.results], options)


def _present(all_results: Sequence[Results], options: argparse.Namespace) -> int:
    """Print tables and write plots; returns 2 for a missed bar that is to be checked."""
    missed = False
    for results in all_results:
        tables, found = tables_of(results), verdicts(results)
        missed |= any(verdict.met is False for verdict in found)
        if options.bars:
            tables.append(bars_table(found))
        shown = [table.markdown() if options.markdown else table.text() for table in tables]
        print("\n\n".join([results.heading, *shown]))
        if options.plot is not None:
            for path in write_plots(drawings(results), options.plot):
                print(f"wrote {path}", file=sys.stderr)
    return 2 if options.check and missed else 0


def _render(options: argparse.Namespace) -> int:
    texts = rendered(options.root, options.results)
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path} is not what {options.results} gives; run render", file=sys.stderr)
        else:
            path.write_text(texts[path])
    if not options.check:
        write_figures(options.root, options.results)
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
