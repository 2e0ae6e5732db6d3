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

from . import engine, equivalence, generate, sets, train
from .bars import bars_table, verdicts
from .cases import shape_text
from .entrants import ENTRANTS
from .environment import describe_environment, gpu_state
from .figures import drawings, load_pyplot, write_figures
from .learning import command as learning
from .pages import RESULTS, ROOT, draw_pages, rendered, tables_of
from .results import Results, Step, read, short_reason
from .tables import (
    GENERATE_QUANTITIES,
    QUANTITIES,
    TRAIN_QUANTITIES,
    Table,
    about,
)
from .timing import clock_for

# Seconds of timing for each contestant and quantity; the smaller one is for sweeps.
_SECONDS, _FEWER_SECONDS = 0.2, 0.05
# The longest sequence on a CPU by default, which takes about a minute.
_LONGEST_ON_CPU = 1024

# Subcommands that measure the chosen cases: a help text, and the quantities; None: all.
VIEWS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "all": ("every quantity", None),
    "gpu": ("the same on a GPU", None),
    "forward": ("forward, and making the mask", ("selection", "forward", "forward_with_mask")),
    "backward": (
        "backward pass, alone and after the forward pass",
        ("selection", "backward", "forward_backward", "end_to_end"),
    ),
    "memory": ("peak extra memory", tuple(q for q in QUANTITIES if q.startswith("memory"))),
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
Add = Callable[..., Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
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

    def command(name: str, text: str, run: Callable[[Any], int]) -> Add:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run, parser=added, view=name)
        return added.add_argument

    for name, (text, _) in VIEWS.items():
        add = command(name, text, _measure_view)
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
    _add_model(add, generate.METHODS)
    add("--length", type=_positive, help="tokens of the prompt")
    add("--new-tokens", type=_positive, help="tokens that are generated")
    add("--repeats", type=_positive, help="generations that are timed")
    add = command("train", "steps of a language model, and with dense attention", _train)
    _add_measuring(add)
    _add_model(add, train.METHODS)
    add("--lengths", nargs="+", type=_positive, help="tokens of a sequence")
    add("--tokens", type=_positive, help="of a step, all sequences together")
    add("--modes", nargs="+", choices=[*train.MODES], help="how models run (default: all)")
    add("--seconds", type=float, default=2.0, help="of timing each (default: 2)")
    add = command("learn", "what models with different attention learn of text", _learn)
    _add_device(add)
    learning.add_options(add)
    add = command("show", "tables, bars and plots of results", _show)
    add("results", type=Path, nargs="+", help="the JSON that --output wrote")
    _add_presentation(add)
    add = command("render", "pages and figures from all results in a folder", _render)
    add("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    add("--results", type=Path, default=RESULTS, help="folder of JSON")
    add("--check", action="store_true", help="write nothing; exit with 1 where a page is not so")
    return parser


def _add_measuring(add: Add) -> None:
    """Add the options of every subcommand that measures calls."""
    _add_device(add)
    add(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="begin nothing new after this time; what is missing is recorded as not measured",
    )
    add("--note", help="kept with the results: who else used the machine, say")
    add("--output", type=Path, help="write the results here as JSON")
    add(
        "--cpu-time",
        action="store_true",
        help="on a CPU: the process's own time, for a machine that others use; with --threads 1",
    )
    _add_presentation(add)


def _add_device(add: Add) -> None:
    add("--device", help="a torch device (default: a GPU where there is one)")
    add("--threads", type=_positive, help="of the CPU (default: what torch uses)")
    add("--commit", help="of the sources, where the program is not in a git checkout")


def _add_presentation(add: Add) -> None:
    add("--bars", action="store_true", help="also show the performance targets")
    add("--plot", type=Path, metavar="FOLDER", help="write plots here")


def _add_model(add: Add, methods: Iterable[str]) -> None:
    add("--contestants", nargs="+", choices=[*methods], default=[*methods])
    add("--window", type=_positive, help="keys that each query keeps")
    add("--layers", type=_positive, help="of the model")


def _add_cases(add: Add) -> None:
    add(
        "--set",
        default="standard",
        choices=sets.SET_NAMES,
        help="cases to choose from (default: standard); legacy: 1.2.2's performance scripts",
    )
    add("--list", action="store_true", help="show the set's cases, contestants and quantities")
    add("--cases", nargs="+", default=[], metavar="PATTERN", help="by name, as 'growth-*'")
    add("--contestants", nargs="+", choices=[*ENTRANTS], metavar="NAME", help="see --list")
    add("--quantities", nargs="+", choices=[*QUANTITIES], metavar="NAME", help="see --list")
    for name, text in _SHAPE_OPTIONS.items():
        add(f"--{name.replace('_', '-')}", type=_positive, help=f"{text}, for every case")
    add("--dtype", choices=("float32", "float16", "bfloat16"))
    add("--seconds", type=float, help=f"of timing each contestant (default: {_SECONDS})")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _device(options: argparse.Namespace) -> str:
    """Return the name of the device, a GPU with its index; set it current, or set CPU threads."""
    on_gpu = options.view == "gpu" or torch.cuda.is_available()
    name = options.device or ("cuda" if on_gpu else "cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.plot is not None:
        load_pyplot()  # fail now instead of after minutes
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"the device is {name}, and torch finds no CUDA device")
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        name = f"cuda:{index}"
    options.device = str(name)
    return str(name)


def _measure(
    options: argparse.Namespace,
    measurement: str,
    quantities: dict[str, str],
    cases: dict[str, dict[str, Any]],
    steps: Iterable[Step],
    count: int,
) -> Results:
    """Measure, write the results after each step, and show them.

    An interrupted run keeps its results so far. ``count`` is the number of steps.
    """
    where = describe_environment(options.device, measurement, options.commit, options.note)
    results = Results(where, quantities, cases)
    begun, every = time.monotonic(), 0.1 if sys.stderr.isatty() else 5
    with tqdm(steps, total=count, unit="step", dynamic_ncols=True, mininterval=every) as bar:
        for step in bar:
            bar.set_postfix_str(step.title[:80], refresh=False)
            reason = None
            try:
                if options.budget is not None and time.monotonic() - begun >= options.budget:
                    reason = f"not measured: the time budget of {options.budget:g} s was spent"
                else:
                    results.records.extend(record.rounded() for record in step.run())
            except Exception as error:  # continue with the other steps after any error
                reason = short_reason(error)
            except KeyboardInterrupt:
                print("interrupted: here is what was measured", file=sys.stderr)
                break
            if reason is not None:
                results.records.extend(step.missing(reason))
            engine.release_memory()
            results.write(options.output)
    results.environment["state_after"] = gpu_state(options.device)
    results.write(options.output)
    _present(results, options)
    return results


def _measure_view(options: argparse.Namespace) -> int:
    device = _device(options)
    if options.view == "map":
        options.set = "map"
        cases = sets.density_map(device.startswith("cuda"), options.lengths, options.one_in)
    else:
        cases = sets.workload_set(options.set, device)
    if options.list:
        print("\n\n".join(map(str, _lists(options.set, cases))))
        return 0
    workloads = sets.chosen_workloads(
        cases,
        device,
        options.cases,
        options.contestants,
        options.quantities or VIEWS[options.view][1],
        **_given(options, *_SHAPE_OPTIONS, "dtype"),
    )
    clock = clock_for(device, cpu_time=options.cpu_time)
    seconds = options.seconds or (_FEWER_SECONDS if options.set in sets.SWEEPS else _SECONDS)
    steps = (s for w in workloads for s in engine.Measurement(w, clock, seconds).steps())
    count = sum(len(engine.groups(workload)) for workload in workloads)
    _measure(
        options, clock.description, about(QUANTITIES), sets.plain_cases(workloads), steps, count
    )
    return 0


def _lists(chosen: str, cases: sets.WorkloadSet) -> list[Table]:
    shapes = sets.plain_cases([*cases.values()])
    rows = [
        (name, shape_text(case), " ".join(case["contestants"])) for name, case in shapes.items()
    ]
    entrants = [(name, entrant.about, entrant.mask) for name, entrant in ENTRANTS.items()]
    quantities = [(name, quantity.about) for name, quantity in QUANTITIES.items()]
    what = ("", "what it is", "attends to")
    return [
        Table(f"Cases of {chosen} (--cases)", ("", "shape", "contestants"), tuple(rows)),
        Table("Contestants (--contestants)", what, tuple(entrants)),
        Table("Quantities (--quantities)", what[:2], tuple(quantities)),
    ]


def _equivalence(options: argparse.Namespace) -> int:
    """Return 1 if an error is too large or a call failed, 3 if the time budget was spent."""
    device = _device(options)
    longest = options.longest or (_LONGEST_ON_CPU if device == "cpu" else max(equivalence.LENGTHS))
    cases = equivalence.configurations(device, options.dtype, longest)
    if not cases:
        raise ValueError(f"--longest is {longest}; the shortest sequence is 128")
    plain = {case.name: asdict(case) for case in cases}
    steps = (equivalence.step(case, options.backends) for case in cases)
    taken = "largest error against float64"
    results = _measure(options, taken, equivalence.QUANTITIES, plain, steps, len(cases))
    if equivalence.failures(results):
        return 1
    measured = len({case for case, *_ in equivalence.ratios(results)})
    print(f"{measured} of {len(cases)} configurations were measured, none failed", file=sys.stderr)
    return 0 if measured == len(cases) else 3


def _generate(options: argparse.Namespace) -> int:
    device, who = _device(options), options.contestants
    clock = clock_for(device, cpu_time=options.cpu_time)
    importlib.import_module("transformers")
    setting = generate.GPU if device.startswith("cuda") else generate.CPU
    shape = replace(setting.shape, device=device, **_given(options, "length", "window"))
    shape = replace(shape, name=f"generate-{shape.length / 1024:g}k")
    sizes = _given(options, "cpu_time", "new_tokens", "layers", "repeats")
    setting = setting._replace(shape=shape, **sizes)
    more = {"contestants": who, "new_tokens": setting.new_tokens, "layers": setting.layers}
    expected: dict[str, torch.Tensor] = {}
    steps = (generate.step(name, setting, expected) for name in who)
    cases = {shape.name: {**asdict(shape), **more}}
    _measure(options, clock.description, about(GENERATE_QUANTITIES), cases, steps, len(who))
    return 0


def _train(options: argparse.Namespace) -> int:
    device, who = _device(options), options.contestants
    clock = clock_for(device, cpu_time=options.cpu_time)
    setting = train.GPU if device.startswith("cuda") else train.CPU
    shape = replace(setting.shape, device=device, **_given(options, "window"))
    given = _given(options, "layers", "tokens", "lengths", "modes")
    setting = setting._replace(shape=shape, **given)
    cases = setting.cases()
    more = {"contestants": who, "layers": setting.layers}
    plain = {case.name: {**asdict(case), **more, "mode": mode} for case, mode in cases}
    steps, count = train.steps(setting, who, clock, options.seconds), len(cases) * len(who)
    _measure(options, clock.description, about(TRAIN_QUANTITIES), plain, steps, count)
    return 0


def _learn(options: argparse.Namespace) -> int:
    return learning.learn(options, _device(options))


def _show(options: argparse.Namespace) -> int:
    for path in options.results:
        _present(read(path), options)
    return 0


def _present(results: Results, options: argparse.Namespace) -> None:
    """Print tables and write plots."""
    tables = tables_of(results) + ([bars_table(verdicts(results))] if options.bars else [])
    print("\n\n".join([results.heading, *map(str, tables)]))
    if options.plot is not None:
        for path in write_figures(drawings(results), options.plot):
            print(f"wrote {path}", file=sys.stderr)


def _render(options: argparse.Namespace) -> int:
    texts = rendered(options.root, options.results)
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if options.check:
        for path in stale:
            print(f"{path} is not what {options.results} gives; run render", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(texts[path])
    draw_pages(options.root, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
