# SPDX-License-Identifier: BSD-3-Clause
"""Time in attention of a language model that generates: ours, eager attention and SDPA.

The model is transformers' Doge, whose attention is dynamic mask attention, with random weights,
equal for all methods. Prefill is the first call of the model, with the whole prompt. Decoding is
all other calls. `.attention_clock` defines the time in attention.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from .attention_clock import AttentionClock, event_now
from .cases import Case
from .entrants import TOP_KEYS_OF_EACH_QUERY
from .memory import peak_extra_memory
from .results import Record, Step
from .tables import GENERATE_QUANTITIES
from .timing import summary


class Setting(NamedTuple):
    """A model, its prompt, and the number of generated tokens."""

    shape: Case
    new_tokens: int
    layers: int
    repeats: int = 3
    cpu_time: bool = False


GPU = Setting(
    Case("", "bfloat16", heads=8, kv_heads=4, head_dim=128, length=16384, window=1024),
    new_tokens=32,
    layers=4,
)
CPU = Setting(Case("", heads=4, length=2048, window=256), new_tokens=16, layers=2)
# A small model for the check before each measurement.
_SMALL = Setting(Case("", heads=2, kv_heads=1, head_dim=8, length=48, window=8), 1, 2)
_TOLERANCE = 1e-3


class Method(NamedTuple):
    """How attention is computed: its name in transformers, and a change of the model after that."""

    implementation: str
    role: str = "baseline"
    adapt: Callable[[Any], object] = lambda model: None


def _patch(model: Any) -> None:
    importlib.import_module("flash_dmattn.integrations").apply_flash_dmattn(model)


METHODS = {
    "eager": Method("eager"),
    "flash_dmattn": Method("eager", "ours", _patch),
    "sdpa": Method("sdpa"),
}


def make_model(setting: Setting, method: Method) -> Any:
    """Return the model with its weights, equal for every method.

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
        torch.nn.init.normal_(layer.self_attn.A)  # with the initial zeros all keys would tie
    model = model.to(device=shape.device, dtype=shape.torch_dtype).eval()
    method.adapt(model)
    return model


def make_prompt(shape: Case) -> torch.Tensor:
    """Return distinct tokens: equal ones have equal biases, and ties leave the kept keys open."""
    generator = torch.Generator().manual_seed(shape.seed)
    tokens = 1 + torch.randperm(_words(shape) - 1, generator=generator)[: shape.length]
    return tokens.expand(shape.batch, -1).to(shape.device)


def _words(shape: Case) -> int:
    return shape.length + 64  # the first token is padding


def check_method(name: str) -> None:
    """Compare a method with eager attention on a small model, on the CPU and in float32.

    Rounding then hides no difference between versions of transformers: 5.17 gives SDPA no causal
    mask if a dynamic one is added to it.

    Raises:
        RuntimeError: the method computes something else.
    """
    prompt = make_prompt(_SMALL.shape)
    with torch.no_grad():
        found, expected = (make_model(_SMALL, METHODS[n])(prompt).logits for n in (name, "eager"))
    difference = _difference(found, expected)
    if not difference <= _TOLERANCE:
        version = importlib.import_module("transformers").__version__
        raise RuntimeError(
            f"transformers {version} computes something else than eager attention: the logits of "
            f"a small model differ by {difference:.2g} of the largest"
        )


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((logits - expected).abs().max() / expected.abs().max()).item())


def step(name: str, setting: Setting, expected: dict[str, torch.Tensor]) -> Step:
    """Return the step that measures one method; ``expected`` keeps the logits of the first."""
    role, case = METHODS[name].role, setting.shape.name
    record = partial(Record, case, name, role, TOP_KEYS_OF_EACH_QUERY)
    run = partial(_measure, record, name, setting, expected)
    return Step(name, run, lambda reason: [record("all", reason=reason)])


def _measure(
    record: Callable[..., Record], name: str, setting: Setting, expected: dict[str, torch.Tensor]
) -> Iterator[Record]:
    check_method(name)
    shape = setting.shape
    model, prompt = make_model(setting, METHODS[name]), make_prompt(shape)
    generate = partial(
        model.generate,
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=setting.new_tokens,
        min_new_tokens=setting.new_tokens,
        do_sample=False,
    )
    host_now = time.process_time if setting.cpu_time else time.perf_counter
    clock = AttentionClock(event_now if shape.device.startswith("cuda") else host_now)
    runs: list[dict[str, float]] = []
    with torch.no_grad():
        # Also a warm-up. These logits determine the first generated token.
        logits = model(prompt, logits_to_keep=1).logits.float()
        difference = _difference(logits, expected.setdefault("logits", logits))
        generate()
        with clock.watching(model):
            for _ in range(setting.repeats):
                clock.restart()
                generate()
                runs.append(clock.seconds())
        memory = float(peak_extra_memory(generate, shape.device))
    for quantity in GENERATE_QUANTITIES:
        samples = [run[quantity] for run in runs if quantity in run] or [memory]
        yield record(quantity, **summary(samples), difference=difference)
