# SPDX-License-Identifier: BSD-3-Clause
"""Time in attention of one Doge model of transformers, and of the whole model.

In attention is what makes masks, and the attention function, whichever the model has:

* once in a forward pass, the function that makes the model's causal mask;
* in each layer, from the call of the module's ``prepare_dynamic_mask`` until the attention function
  returns. Nothing else is computed between the two: eager attention and SDPA repeat the mask for
  the query heads there.

What comes before in a layer is no attention and the same for all: projections, the bias's own
included, norms, rotary embedding and the cache. Two moments are taken for each span, so that taking
them costs little.
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
    """A part of the work, by the moments at which it begins and ends."""

    phase: str
    kind: str  # mask, layer or model
    start: Any
    stop: Any

    @property
    def seconds(self) -> float:
        """How long it took."""
        if isinstance(self.stop, (float, int)):
            return float(self.stop - self.start)
        self.stop.synchronize()
        return float(self.start.elapsed_time(self.stop)) / 1e3


def event_now() -> Any:
    """The moment on a GPU: a CUDA event on the current stream."""
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class AttentionClock:
    """Takes the time of a model's forward passes, of which the first is the prefill.

    ``now`` gives moments: numbers of seconds, or CUDA events.
    """

    def __init__(self, now: Callable[[], Any] = time.perf_counter) -> None:
        self.now = now
        self.spans: list[Span] = []
        self._open: list[Any] = []
        self._calls = self._layers = 0

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Take the times of this model. Afterwards all is as it was, in it and in transformers."""
        attentions = [layer.self_attn for layer in model.model.layers]
        self._layers = len(attentions)
        # The functions that the model calls are names in the module that defines it.
        modeling: Any = importlib.import_module(type(model).__module__)
        find, make_mask = (
            modeling.ALL_ATTENTION_FUNCTIONS.get_interface,
            modeling.create_causal_mask,
        )

        def get_interface(*names: Any) -> Function:
            """What looks attention functions up, and lets those that it finds end a span."""
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
        """Forget what was seen."""
        self.spans.clear()
        self._open.clear()
        self._calls = 0

    def seconds(self) -> dict[str, float]:
        """The quantities of one generation.

        Raises:
            RuntimeError: the model did not call what is timed, once for each mask and layer: a
                function that is called in another way would be left out, and nobody would notice.
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
        """A function that begins or ends a span, where ``of`` says so of its arguments."""

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
