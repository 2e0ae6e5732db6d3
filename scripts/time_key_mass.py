#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Time the pass that sums the attention of each key, and the forward pass of the same call.

    python scripts/time_key_mass.py                # on a GPU, as calls do it
    python scripts/time_key_mass.py --pack-kernel  # always by the kernel of its pack
    python scripts/time_key_mass.py --device cpu

Each line has the time of the forward pass, the additional time of return_key_mass, and their ratio.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from flash_dmattn import IntervalMask, dynamic_mask, explain, flash_dmattn_func
from flash_dmattn.backends import pack

# Tokens, heads, KV heads, head dimension, and the kept keys.
CALLS = (
    (16384, 16, 16, 64, "all"),
    (16384, 16, 4, 64, "window 1024"),
    (16384, 16, 16, 64, "sliding 1024"),
    (16384, 32, 8, 128, "all"),
    (16384, 32, 8, 128, "window 2048"),
    (4096, 32, 8, 128, "window 1024"),
    (4096, 32, 8, 128, "half of the keys"),
    (2048, 16, 16, 256, "all"),
)


def milliseconds(call: Callable[[], Any], device: str, repetitions: int) -> float:
    """Return the median time of a call."""
    times = []
    for number in range(repetitions + 3):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            call()
            taken = (time.perf_counter() - start) * 1000
        if number >= 3:
            times.append(taken)
    return statistics.median(times)


def options_of(kept: str, tokens: int, kv_heads: int, device: str) -> dict[str, Any]:
    """Return the arguments that keep these keys. A selection is made here and is not timed."""
    if kept == "all":
        return {"is_causal": True}
    if kept == "half of the keys":
        return {"attn_mask": torch.rand(1, tokens, device=device) < 0.5}
    kind, _, width = kept.partition(" ")
    if kind == "sliding":
        mask = IntervalMask.sliding_window(int(width) - 1, 0, tokens, tokens, device=device)
        return {"attn_mask": mask, "is_causal": True}
    bias = torch.randn(1, kv_heads, 1, tokens, device=device)
    mask = dynamic_mask(bias, int(width), is_causal=True)
    return {"attn_mask": mask, "attn_bias": bias, "is_causal": True}


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--pack-kernel", action="store_true", help="of a GPU's pack, without a mask, too"
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--most-tokens", type=int, default=16384)
    arguments = parser.parse_args()
    device = arguments.device
    pack.KEY_MASS_WITHOUT_MASK = arguments.pack_kernel
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for tokens, heads, kv_heads, head_dim, kept in CALLS:
        if tokens > arguments.most_tokens:
            continue
        query, key, value = (
            torch.randn(1, tokens, count, head_dim, device=device, dtype=dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        options = options_of(kept, tokens, kv_heads, device)
        call = functools.partial(flash_dmattn_func, query, key, value, **options)
        with torch.no_grad():
            forward = milliseconds(call, device, arguments.repetitions)
            with_mass = functools.partial(call, return_key_mass=True)
            both = milliseconds(with_mass, device, arguments.repetitions)
            told = explain(query, key, value, **options, return_key_mass=True).key_mass
        assert told is not None
        print(
            f"{tokens:6} tokens, heads {heads:2} on {kv_heads:2} of {head_dim:3}, {kept:16} "
            f"forward {forward:8.3f} ms, mass {both - forward:8.3f} ms, "
            f"ratio {(both - forward) / forward:5.2f}  ({told['kernel']})",
            flush=True,
        )


if __name__ == "__main__":
    main()
