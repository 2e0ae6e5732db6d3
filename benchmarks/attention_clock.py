# SPDX-License-Identifier: BSD-3-Clause
"""Time in attention of a Doge model of transformers, and of the whole model.

Attention includes making masks and the attention function, for any implementation:

* once per forward pass, the function that makes the model's causal mask;
* in each layer, from the call of the module's ``prepare_dynamic_mask`` until the attention function
  returns. Nothing else is computed between the two: eager attention and SDPA repeat the mask for
  the query heads there.

Earlier parts of a layer are not attention, and equal for all: projections, including that of the
bias, norms, rotary embedding and the cache. Each span takes only two timestamps, so that measuring
costs little.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

PHASES = ("prefill", "decode")
Function = Callable[..., Any]


class Span(NamedTuple):
    """A part of the work, with the timestamps of its begin and end."""

    phase: str
    kind: str  # mask, layer or model
    start: Any
    stop: Any

    @property
    def seconds(self) -> float:
        """The duration."""
        if isinstance(self.stop, (float, int)):
            return float(self.stop - self.start)
        self.stop.synchronize()
        return float(self.start.elapsed_time(self.stop)) / 1e3


def event_now() -> Any:
    """Return the current time on a GPU: a CUDA event on the current stream."""
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class AttentionClock:
    """Measures a model's forward passes; the first is the prefill.

    ``now`` returns timestamps: numbers of seconds, or CUDA events.
    """

    def __init__(self, now: Callable[[], Any] = time.perf_counter) -> None:
        self.now = now
        self.spans: list[Span] = []
        self._open: list[Any] = []
        self._calls = self._layers = 0

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Measure this model. Afterwards the model and transformers are restored."""
        attentions = [layer.self_attn for layer in model.model.layers]
        self._layers = len(attentions)
        # The model calls these functions by names of its defining module.
        modeling: Any = importlib.import_module(type(model).__module__)
        find, make_mask = (
            modeling.ALL_ATTENTION_FUNCTIONS.get_interface,
            modeling.create_causal_mask,
        )

        def get_interface(*names: Any) -> Function:
            """Look up an attention function, and make it end a span."""
            return self._timed(find(*names), ends="layer", of=lambda m, *_, **__: m in attentions)

        def is_of_model(*_: Any, config: Any = None, **__: Any) -> bool:
            return config is model.config

        interface = SimpleNamespace(get_interface=get_interface)
        make_mask = self._timed(make_mask, begins=True, ends="mask", of=is_of_model)
        with ExitStack() as stack:
            replace = mock.patch.object
            stack.enter_context(replace(modeling, "ALL_ATTENTION_FUNCTIONS", interface))
            stack.enter_context(replace(modeling, "create_causal_mask", make_mask))
            for module in attentions:
                prepare = self._timed(module.prepare_dynamic_mask, begins=True)
                stack.enter_context(replace(module, "prepare_dynamic_mask", prepare))
            stack.callback(model.register_forward_pre_hook(self._begin_call).remove)
            stack.callback(model.register_forward_hook(lambda *_: self._end("model")).remove)
            yield

    def restart(self) -> None:
        """Discard all measurements."""
        self.spans.clear()
        self._open.clear()
        self._calls = 0

    def seconds(self) -> dict[str, float]:
        """Return the quantities of one generation.

        Raises:
            RuntimeError: the model did not call the timed functions once per mask and layer. A
                function that is called in another way would be missing from the time.
        """
        for kind, expected in (("mask", self._calls), ("layer", self._calls * self._layers)):
            count = sum(span.kind == kind for span in self.spans)
            if count != expected:
                raise RuntimeError(
                    f"attention was timed {count} times by {kind}, not {expected} times, in "
                    f"{self._calls} forward passes: this version of transformers calls it otherwise"
                )
        found = dict.fromkeys((*PHASES, *(f"{phase}_attention" for phase in PHASES)), 0.0)
        for span in self.spans:
            found[span.phase + "_attention" * (span.kind != "model")] += span.seconds
        found["attention"] = found["prefill_attention"] + found["decode_attention"]
        found["generate"] = found["prefill"] + found["decode"]
        return found

    def _begin_call(self, *_: Any) -> None:
        self._calls += 1
        self._open.append(self.now())

    def _end(self, kind: str) -> None:
        phase = PHASES[self._calls > 1]
        self.spans.append(Span(phase, kind, self._open.pop(), self.now()))

    def _timed(
        self,
        function: Function,
        *,
        begins: bool = False,
        ends: str = "",
        of: Function = lambda *_, **__: True,
    ) -> Function:
        """Return a function that begins or ends a span if ``of`` accepts its arguments."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            watched = of(*args, **kwargs)
            if watched and begins:
                self._open.append(self.now())
            result = function(*args, **kwargs)
            if watched and ends:
                self._end(ends)
            return result

        return timed
