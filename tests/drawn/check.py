# SPDX-License-Identifier: BSD-3-Clause
"""Make a drawn call with its drawn options, and judge its results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import IntervalMask
from flash_dmattn.backends import pack
from flash_dmattn.plan import AttentionPlan
from support import Target, reads_float64

from .buffers import poisoned_buffers
from .calls import Call, assert_same_bits
from .exact import EPS32, smallest
from .gates import SHARE, check_gates
from .judge import Expected, expected
from .many import Repeater
from .mask_blocks import block_mask_of
from .problems import Drawn

# One in this many eligible calls has a float64 bias.
FLOAT64_SHARE = 6


def check(drawn: Drawn, target: Target, *, judged_on: str | None = None) -> None:
    """Raise AssertionError if a result is wrong; exceptions of the call itself propagate.

    The expected results are computed on the device `judged_on`, by default that of the call.
    """
    if target.is_pack and drawn.seed % SHARE == 1:
        check_gates(drawn.seed, target)
    drawn = dataclasses.replace(drawn, call=in_float64(drawn.call, drawn.seed, target))
    call = drawn.call.to(target.device)
    want = expected(call if judged_on in (None, target.device) else drawn.call)
    compare(drawn, call, want, target)


def in_float64(call: Call, seed: int, target: Target) -> Call:
    """Make the per-key bias of some calls float64, if the target reads it."""
    if seed % FLOAT64_SHARE or call.window is not None:
        return call
    if not reads_float64(target):
        return call
    if call.bias is None or (call.bias.dim() > 2 and call.bias.shape[-2] != 1):
        return call
    # Row tiles share the reference that is subtracted from a bias, and rows may differ by more.
    if (call.bias.abs() > 1e5).logical_and(call.bias.isfinite()).any():
        return call
    return dataclasses.replace(call, bias=call.bias.double())


# Large calls per small call.
REPETITIONS = 4


def check_many(drawn: Drawn, repeater: Repeater, target: Target) -> None:
    """Check large calls that repeat a drawn one; some are queued several times."""
    repeater.call = in_float64(repeater.call, drawn.seed, target)
    for number in range(REPETITIONS):
        if number > 0:
            repeater.draw()
        call = repeater.large(target.device)
        want = repeater.expected(call, target.device)
        large = dataclasses.replace(drawn, call=call, deterministic=number % 2 == 1)
        compare(large, call, want, target)
    if drawn.seed % 4 == 0:
        check_queued(call, want, target)


def check_queued(call: Call, want: Expected, target: Target, times: int = 4) -> None:
    """Judge calls that are queued on two streams without a wait between them."""
    for deterministic in (False, True):
        options = {"backend": target.backend, "deterministic": deterministic}
        queued = []
        streams = [torch.cuda.Stream() for _ in range(2)] if target.device == "cuda" else []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for number in range(times):
            with torch.cuda.stream(streams[number % 2]) if streams else contextlib.nullcontext():
                queued.append(call.results(**options))
        if streams:
            torch.cuda.synchronize()
        for got in queued:
            want.check(got, clamps=target.has_kernels_of_gpu)
            if deterministic:
                assert_same_bits(got, queued[0])


def compare(drawn: Drawn, call: Call, want: Expected, target: Target) -> None:
    """Make a call with its drawn options, and compare its results."""
    if drawn.block_size is not None:
        given = block_mask_of(call.mask, drawn.block_size, call.query.shape[2])
        call = dataclasses.replace(call, mask=given)
    options: dict[str, Any] = {"backend": target.backend}
    if drawn.deterministic:
        options["deterministic"] = True
    # The GPU packs' key-mass kernels are off without a mask; every other seed enables them.
    own = mock.patch.object(pack, "KEY_MASS_WITHOUT_MASK", drawn.seed % 2 == 0)
    with threads(drawn.threads), own:
        if drawn.planned:
            options |= {"plan": plan_of(call, target), "attn_mask": None, "is_causal": None}
        if drawn.selected:
            options |= {"window_size": None, "keep_last": 0, "keep_first": 0}
            options |= {"attn_mask": selected(call, target)}
        if drawn.poisoned_buffers and target.is_pack:
            with poisoned_buffers() as buffers:
                got = call.results(**options)
            assert buffers.guards_are_whole(), "bytes beside a buffer have been written"
        else:
            got = call.results(**options)
        want.check(got, clamps=target.has_kernels_of_gpu)
        if drawn.deterministic:
            assert_same_bits(call.results(**options), got)
        if drawn.probabilities:
            check_probabilities(call, want, options)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plan_of(call: Call, target: Target) -> AttentionPlan:
    """Return a plan of the call's mask."""
    return flash_dmattn.make_plan(
        call.query,
        call.key,
        call.mask,
        call.causal,
        **_packing(call),
        block_table=call.block_table,
        backend=target.backend,
    )


def selected(call: Call, target: Target) -> Tensor | IntervalMask:
    """Return the mask that a call's window selects."""
    assert call.bias is not None
    assert call.window is not None
    sizes = _packing(call) or {
        "query_length": call.query.shape[1],
        "key_length": call.key.shape[1],
    }
    return flash_dmattn.dynamic_mask(
        call.bias,
        call.window,
        call.causal,
        call.mask,
        keep_last=call.keep_last,
        keep_first=call.keep_first,
        num_heads=call.query.shape[-2],
        num_kv_heads=call.key.shape[-2],
        backend=target.backend,
        **sizes,
    )


def _packing(call: Call) -> dict[str, Any]:
    if call.cu_seqlens_q is None:
        return {}
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.longest[0],
        "max_seqlen_k": call.longest[1],
    }


def check_probabilities(call: Call, want: Expected, options: dict[str, Any]) -> None:
    """Check the probabilities of return_attn_probs, which plain PyTorch computes in float32."""
    with torch.no_grad():
        got = call.attend({}, **options, return_attn_probs=True)[2]
    dtype = call.query.dtype
    for number, (part, exact) in enumerate(want.probabilities):
        place = got if call.cu_seqlens_q is None else got[number : number + 1]
        queries, keys = exact.shape[2:]
        error = (place[:, :, :queries, :keys].to(exact.device).double() - exact).abs()
        # Beside a large bias, float32 has few digits left for differences of scores.
        largest = 0.0
        if part.bias is not None and part.bias.numel():
            largest = part.bias.abs().amax(-1, keepdim=True)
        relative = torch.finfo(dtype).eps + (1000 + 4 * largest) * EPS32
        bound = relative * exact + smallest(dtype)
        wrong = ~(error <= bound) & ~part.spoiled[..., None, None]
        assert not wrong.any(), f"probabilities: error {error[wrong].max().item():.3g}"
        rest = place.clone()
        rest[:, :, :queries, :keys] = 0
        assert not rest.any(), "probabilities outside of a sequence are not 0"
