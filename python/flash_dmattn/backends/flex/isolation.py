# SPDX-License-Identifier: BSD-3-Clause
"""Compiled code and autograd inside of an operator."""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def isolated(function: Callable[[], Result], device: torch.device) -> Result:
    """Call a function where nothing is set of what the dispatcher has set for this thread.

    An operator's implementation runs below autograd, and below whatever mode or transform the call
    passed through, all of which FlexAttention needs when it is compiled and differentiated. What is
    set belongs to a thread, so another one starts without it. It costs less than making the block
    mask.
    """
    outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> None:
        try:
            # The gradients too are computed in this thread: the one that autograd keeps for the
            # device may be waiting for us.
            with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
                outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    # The caller's options of torch.compile are in its context.
    target = functools.partial(contextvars.copy_context().run, run)
    thread = threading.Thread(target=target, name="flash_dmattn.flex", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()
