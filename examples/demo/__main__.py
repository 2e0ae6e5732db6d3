# SPDX-License-Identifier: BSD-3-Clause
"""Train a small byte-level language model on real text, with forget gates and with dense attention.

The gates let attention weights decay, and flash_dmattn drops decayed keys. The dense model has a
rotary embedding and PyTorch's scaled_dot_product_attention. Both see the same batches. The demo
compares what they learn, and at which cost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import cpu_model, describe_pack
from benchmarks.memory import PEAK_METHOD
from benchmarks.text import VOCABULARY, load_corpus
from demo.attention import ATTENTIONS
from demo.model import LanguageModel, ModelConfig
from demo.plot import write_plot
from demo.sweep import time_layers
from demo.training import Run, make_run, train
from flash_dmattn.loader import trace_for

OURS, THEIRS = ATTENTIONS
HELD_OUT_PIECES = 4
# Beyond this length a step of dense attention takes many seconds.
LONGEST_DENSE = 8192
MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Return 1 if a loss did not fall."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        corpus = load_corpus(options.text, minimum=options.context + 2)
    except ValueError as error:
        parser.error(str(error))
    config = ModelConfig(VOCABULARY, options.layers, options.width)

    print_setting(options)
    print(
        f"Text      {len(corpus.train):,} bytes of {corpus.files} files to train on, "
        f"{len(corpus.held_out):,} of {corpus.held_out_files} others held out"
    )
    runs = make_runs(config, options)
    size = sum(p.numel() for p in runs[OURS].model.parameters())
    print(
        f"Model     {size:,} parameters, {config.layers} layers, {config.heads} heads on "
        f"{config.kv_heads} kv heads of {config.head_dim}, {options.context} bytes of context\n",
        flush=True,
    )
    generator = torch.Generator().manual_seed(options.seed)
    batches = [
        corpus.batch(options.batch, options.context, generator) for _ in range(options.steps)
    ]
    held_out = corpus.held_out_batches(HELD_OUT_PIECES, options.context)
    train(runs, batches, held_out, options.learning_rate)
    seconds = time_layers(
        config,
        {OURS: options.lengths, THEIRS: [n for n in options.lengths if n <= LONGEST_DENSE]},
    )
    print_results(runs, seconds)
    write_plot(options.output, {n: (r.seconds, r.losses) for n, r in runs.items()}, seconds)
    record = options.output.with_suffix(".json")
    record.write_text(json.dumps(to_json(runs, seconds), indent=1) + "\n")
    print(f"\nWrote {options.output} and {record}")
    return verdict(runs)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="demo",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=positive, default=60, help="training steps")
    parser.add_argument("--context", type=positive, default=2048, help="bytes in a sequence")
    parser.add_argument("--batch", type=positive, default=2, help="sequences in a batch")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--width", type=positive, default=256, help="a multiple of 8")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="folder of text; None: Python's own library")
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[512, 1024, 2048, 4096, 8192, 16384],
        help="sequence lengths at which the attention layer is timed "
        f"(dense attention up to {LONGEST_DENSE})",
    )
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="the plot; .json too")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def make_runs(config: ModelConfig, options: argparse.Namespace) -> dict[str, Run]:
    """Return one model for each attention."""
    runs = {}
    for name in ATTENTIONS:
        torch.manual_seed(options.seed)
        runs[name] = make_run(LanguageModel(config, name), options.learning_rate)
    return runs


def print_setting(options: argparse.Namespace) -> None:
    pack = describe_pack("cpu")
    if pack is None:
        print(f"Binary    none: the plain PyTorch reference runs instead\n{trace_for('cpu')}")
    else:
        print(f"Binary    kernel pack {pack['name']} {pack['version']} [{pack['features']}]")
        entry = next(trace_for("cpu").accepted())
        print(f"          {entry}, {entry.candidate.path}")
    print(f"Machine   {cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}")


def print_results(runs: dict[str, Run], seconds: dict[str, dict[int, float]]) -> None:
    ours, theirs = runs[OURS], runs[THEIRS]

    def row(title: str, left: str, right: str, note: str = "") -> None:
        print(f"{title:34}{left:>16}{right:>16}  {note}".rstrip())

    def losses(title: str, left: float, right: float) -> None:
        row(title, f"{left:.4f}", f"{right:.4f}")

    def times(title: str, left: float, right: float) -> None:
        note = compare(left, right, "faster", "slower")
        row(title, f"{1e3 * left:.1f} ms", f"{1e3 * right:.1f} ms", note)

    print()
    row("", OURS, THEIRS)
    losses("training loss, first step", ours.losses[0], theirs.losses[0])
    losses("training loss, last step", ours.losses[-1], theirs.losses[-1])
    losses("held-out loss, before", ours.held_out[0], theirs.held_out[0])
    losses("held-out loss, after", ours.held_out[-1], theirs.held_out[-1])
    times("time of a training step", ours.step_seconds, theirs.step_seconds)
    used = [run.peak_memory for run in (ours, theirs)]
    note = compare(used[0], used[1], "less", "more")
    mebibytes = [f"{size / MIB:.1f} MiB" for size in used]
    row("peak extra memory of a step", mebibytes[0], mebibytes[1], note)
    for length, left in seconds[OURS].items():
        title = f"attention layer, length {length}"
        if length in seconds[THEIRS]:
            times(title, left, seconds[THEIRS][length])
        else:
            row(title, f"{1e3 * left:.1f} ms", "-")
    print(
        "\nLosses are in nats per byte.\n"
        "Times are medians, and those of the layer include backward.\n"
        f"Memory: {PEAK_METHOD}; weights and optimizer state are not in it."
    )


def compare(ours: float, theirs: float, better: str, worse: str) -> str:
    if ours <= theirs:
        return f"{theirs / max(ours, 1e-9):.1f} x {better}"
    return f"{ours / max(theirs, 1e-9):.1f} x {worse}"


def to_json(runs: dict[str, Run], seconds: dict[str, dict[int, float]]) -> dict[str, Any]:
    return {
        "pack": describe_pack("cpu"),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "runs": {
            name: {
                "losses": run.losses,
                "held_out_before": run.held_out[0],
                "held_out_after": run.held_out[-1],
                "step_seconds": run.step_seconds,
                "peak_extra_bytes": run.peak_memory,
                "memory_method": PEAK_METHOD,
                "layer_seconds": seconds[name],
            }
            for name, run in runs.items()
        },
    }


def verdict(runs: dict[str, Run]) -> int:
    for name, run in runs.items():
        if not run.held_out[-1] < run.held_out[0]:
            print(f"FAILED: the held-out loss of {name} did not fall", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
