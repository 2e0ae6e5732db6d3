# SPDX-License-Identifier: BSD-3-Clause
"""Time in attention of a language model that generates, ours beside eager attention and SDPA.

The model is transformers' Doge, whose attention is dynamic mask attention, with random weights:
the same for all. Time in attention is that of the attention function and of what makes its masks;
`.attention_clock` tells where it begins and ends. Prefill is the first call of the model, with the
whole prompt; decoding are the others.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from .attention_clock import AttentionClock, CpuStamps, GpuStamps
from .cases import Case
from .contestants.entrants import TOP_KEYS_OF_EACH_QUERY
from .engine import release_memory
from .environment import describe_environment, gpu_state
from .memory import peak_extra_memory
from .options import (
    add_cpu_time,
    add_measuring,
    default_device,
    positive,
    progress_bar,
    usable_device,
)
from .records import Record, short_reason
from .results import write_json, written
from .show import add_presentation, present
from .timing import Deadline, clock_for

QUANTITIES = {
    "prefill_attention": "making masks, and the attention function, while the prompt is read",
    "decode_attention": "making masks, and the attention function, while tokens are generated",
    "attention": "making masks, and the attention function, of both",
    "prefill": "reading the prompt, the whole model",
    "decode": "generating the tokens, the whole model",
    "generate": "both, the whole model",
    "memory_generate": "peak extra memory of both",
}


@dataclass(frozen=True)
class Setting:
    """A model, its prompt, and how many tokens are generated."""

    shape: Case
    new_tokens: int
    layers: int
    repeats: int
    cpu_time: bool = False


_GPU = Setting(
    Case("", "bfloat16", heads=8, kv_heads=4, head_dim=128, length=16384, window=1024),
    new_tokens=32,
    layers=4,
    repeats=3,
)
_CPU = Setting(
    Case("", "float32", heads=4, kv_heads=2, head_dim=64, length=2048, window=256),
    new_tokens=16,
    layers=2,
    repeats=3,
)


@dataclass(frozen=True)
class Method:
    """How attention is computed: the name that transformers knows, and what is done after that."""

    implementation: str
    role: str
    adapt: Callable[[Any], object] = lambda model: None


def _patch(model: Any) -> None:
    importlib.import_module("flash_dmattn.integrations").apply_flash_dmattn(model)


METHODS = {
    "eager": Method("eager", "baseline"),
    "flash_dmattn": Method("eager", "ours", _patch),
    "sdpa": Method("sdpa", "baseline"),
}


# Of a model that is small enough to compute with whenever something is measured.
_SMALL = Setting(
    Case("", "float32", heads=2, kv_heads=1, head_dim=8, length=48, window=8),
    new_tokens=1,
    layers=2,
    repeats=1,
)
_TOLERANCE = 1e-3


def make_model(setting: Setting, method: Method) -> Any:
    """The model with its weights, the same for every method.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    transformers: Any = importlib.import_module("transformers")
    shape = setting.shape
    width = shape.heads * shape.head_dim
    config = transformers.DogeConfig(
        vocab_size=_words(shape),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=setting.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length + setting.new_tokens,
        keep_window_size=shape.window,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(shape.seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=method.implementation
    )
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.A)  # zero as it is made: all keys would be alike
    model = model.to(device=shape.device, dtype=shape.torch_dtype).eval()
    method.adapt(model)
    return model


def make_prompt(shape: Case) -> torch.Tensor:
    """Tokens that all differ: equal ones have equal biases, and which of these are kept is open."""
    generator = torch.Generator().manual_seed(shape.seed)
    tokens = 1 + torch.randperm(_words(shape) - 1, generator=generator)[: shape.length]
    return tokens.expand(shape.batch, -1).to(shape.device)


def _words(shape: Case) -> int:
    return shape.length + 64  # the first stands for padding


def check_method(name: str) -> None:
    """Compare a method with eager attention on a small model, on the CPU and in float32.

    There no rounding hides what a version of transformers leaves out: 5.17 gives SDPA no causal
    mask where a dynamic one is added to it.

    Raises:
        RuntimeError: the method computes something else.
    """
    prompt = make_prompt(_SMALL.shape)
    with torch.no_grad():
        logits, expected = (
            make_model(_SMALL, METHODS[method])(prompt).logits for method in (name, "eager")
        )
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    if not difference <= _TOLERANCE:
        version = importlib.import_module("transformers").__version__
        raise RuntimeError(
            f"transformers {version} computes something else than eager attention: the logits of "
            f"a small model differ by {difference:.2g} of the largest"
        )


def measure(name: str, setting: Setting, expected: dict[str, torch.Tensor]) -> Iterator[Record]:
    """All quantities of one method; ``expected`` has the logits of the first."""
    check_method(name)
    shape = setting.shape
    method = METHODS[name]
    model = make_model(setting, method)
    prompt = make_prompt(shape)
    generate = partial(
        model.generate,
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=setting.new_tokens,
        min_new_tokens=setting.new_tokens,
        do_sample=False,
    )
    with torch.no_grad():
        # Also a warm-up. The first token that is generated is chosen by these.
        logits = model(prompt, logits_to_keep=1).logits.float()
        first = expected.setdefault("logits", logits)
        difference = ((logits - first).abs().max() / first.abs().max()).item()
        generate()
        on_gpu = shape.device.startswith("cuda")
        clock = AttentionClock(GpuStamps() if on_gpu else CpuStamps(setting.cpu_time))
        runs = []
        with clock.watching(model):
            for _ in range(setting.repeats):
                clock.restart()
                generate()
                runs.append(clock.seconds())
        peak = peak_extra_memory(generate, shape.device).extra_bytes
    for quantity in QUANTITIES:
        samples = [float(peak)]
        if quantity != "memory_generate":
            samples = [run[quantity] for run in runs]
        yield Record(
            case=shape.name,
            contestant=name,
            role=method.role,
            mask=TOP_KEYS_OF_EACH_QUERY,
            quantity=quantity,
            value=statistics.median(samples),
            low=min(samples),
            high=max(samples),
            samples=len(samples),
            difference=difference,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_measuring(parser)
    add_cpu_time(parser)
    add_presentation(parser)
    parser.add_argument("--contestants", nargs="+", choices=tuple(METHODS), default=[*METHODS])
    for name, text in (
        ("length", "tokens of the prompt"),
        ("window", "keys that each query keeps"),
        ("new-tokens", "tokens that are generated"),
        ("layers", "of the model"),
        ("repeats", "generations that are timed"),
    ):
        parser.add_argument(f"--{name}", type=positive, help=text)


def _setting(options: argparse.Namespace, device: str) -> Setting:
    setting = _GPU if device.startswith("cuda") else _CPU

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names if getattr(options, name)}

    shape = replace(setting.shape, device=device, **given("length", "window"))
    thousands = shape.length / 1024
    shape = replace(shape, name=f"generate-{thousands:g}k")
    return replace(setting, shape=shape, **given("cpu_time", "new_tokens", "layers", "repeats"))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure; returns the exit status."""
    try:
        device = usable_device(options.device or default_device())
        measurement = clock_for(device, cpu_time=options.cpu_time).description
        importlib.import_module("transformers")
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    except ModuleNotFoundError:
        parser.error("generate needs transformers; pip install transformers")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    setting = _setting(options, device)
    environment = describe_environment(device, options.commit, options.note)
    environment["measurement"] = measurement
    case = {
        **asdict(setting.shape),
        "contestants": options.contestants,
        "new_tokens": setting.new_tokens,
        "layers": setting.layers,
    }
    deadline = Deadline(options.budget)
    records: list[Record] = []
    expected: dict[str, torch.Tensor] = {}
    results: dict[str, Any] = {}
    bar, tick = progress_bar(len(options.contestants))
    with bar:
        for name in options.contestants:
            tick(f"{setting.shape.name}: {name}")
            reason = deadline.reason if deadline.passed else None
            try:
                if reason is None:
                    records += measure(name, setting, expected)
            except Exception as error:  # the others go on
                reason = short_reason(error)
            if reason is not None:
                role = METHODS[name].role
                records.append(
                    Record(
                        setting.shape.name,
                        name,
                        role,
                        TOP_KEYS_OF_EACH_QUERY,
                        "all",
                        None,
                        reason=reason,
                    )
                )
            release_memory()
            environment["state_after"] = gpu_state(device)
            cases = {setting.shape.name: case}
            results = written(environment, QUANTITIES, cases, records)
            if options.output is not None:
                write_json(options.output, results)
    return present(results, options)
