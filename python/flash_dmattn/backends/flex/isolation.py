# SPDX-License-Identifier: BSD-3-Clause
"""Running compiled code and autograd inside an operator."""

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
    """Call a function in a thread without the dispatcher state of the calling thread.

    An operator's kernel runs below autograd, and below all modes and transforms of the call.
    FlexAttention needs these to be compiled and differentiated. The state belongs to a thread, so
    a new thread starts without it. The thread costs less than making the block mask.
    """
    outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> None:
        try:
            # Compute the gradients in this thread, too: autograd's own thread for the device may be
            # waiting for this call.
            with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
                outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    # The caller's context holds its options of torch.compile.
    target = functools.partial(contextvars.copy_context().run, run)
    thread = threading.Thread(target=target, name="flash_dmattn.flex", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()
