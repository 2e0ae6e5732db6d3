# SPDX-License-Identifier: BSD-3-Clause
"""One token more in the rows that a state keeps: a decoding step is mostly launches."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .common import INTERPRETED

# They differ from call to call; Triton would compile again for each that is 1 or a multiple of 16.
SIZES = ["rows", "key_batch", "key_head", "value_batch", "value_head", "bias_batch", "bias_set"]


# Where the bias of the token comes from: it is given, or computed as the layer computes it.
GIVEN = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
EXPONENTIAL = tl.constexpr(2)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)) by the functions that PyTorch's kernel calls, to the same bits."""
    small = tl.minimum(x, 20.0)
    if INTERPRETED:
        soft = tl.log(1.0 + tl.exp(small))
    else:
        soft = libdevice.log1p(libdevice.exp(small))
    return tl.where(x > 20.0, x, soft)


@triton.jit(do_not_specialize=SIZES)
def insert(
    held_key,
    held_value,
    held_bias,
    held_position,
    key,
    value,
    bias,
    amplitude,
    states_bias,
    counter,
    rows,
    key_batch,
    key_head,
    value_batch,
    value_head,
    bias_batch,
    bias_set,
    KEY_BIAS: tl.constexpr,
    HAS_STATES_BIAS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SETS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch = program // SETS
    of_set = program % SETS
    position = tl.load(counter)
    if KEY_BIAS == GIVEN:
        new_bias = tl.load(bias + batch * bias_batch + of_set * bias_set)
    else:
        # Of all heads' values, a line of weights for each head of the bias.
        column = tl.arange(0, BLOCK_VALUE)
        is_column = column < VALUE_WIDTH
        all_values = tl.load(value + batch * value_batch + column, is_column, 0.0)
        weight = tl.load(bias + of_set * VALUE_WIDTH + column, is_column, 0.0)
        state = tl.sum(all_values.to(tl.float32) * weight.to(tl.float32), 0)
        if HAS_STATES_BIAS:
            state += tl.load(states_bias + of_set).to(tl.float32)
        # PyTorch's operations round to the dtype of the biases.
        dtype = held_bias.dtype.element_ty
        soft = _softplus(state.to(value.dtype.element_ty).to(tl.float32)).to(dtype)
        new_bias = tl.load(amplitude + of_set).to(tl.float32) * soft.to(tl.float32)
        new_bias = new_bias.to(dtype).to(tl.float32)
        if KEY_BIAS == EXPONENTIAL:
            new_bias = tl.exp(new_bias) if INTERPRETED else libdevice.exp(new_bias)
            new_bias = new_bias.to(dtype).to(tl.float32)
    # The worst row: the smallest bias, of equal ones the latest. Rows that hold nothing come first.
    worst_bias = tl.full((), float("inf"), tl.float32)
    worst_position = tl.full((), -1, tl.int64)
    worst = tl.full((), 0, tl.int64)
    for begin in range(0, rows, BLOCK_ROWS):
        row = begin + tl.arange(0, BLOCK_ROWS)
        is_row = row < rows
        biases = tl.load(held_bias + program * rows + row, is_row, float("inf"))
        positions = tl.load(held_position + program * rows + row, is_row, -1)
        least = tl.min(biases, 0)
        candidates = tl.where(is_row & (biases == least), positions, -1)
        latest = tl.max(candidates, 0)
        place = tl.min(tl.where(candidates == latest, row, rows), 0)
        is_worse = (least < worst_bias) | ((least == worst_bias) & (latest > worst_position))
        worst = tl.where(is_worse, place.to(tl.int64), worst)
        worst_position = tl.where(is_worse, latest, worst_position)
        worst_bias = tl.where(is_worse, least.to(tl.float32), worst_bias)
    # False for NaN; and for -inf, as no bias is less.
    if new_bias > worst_bias:
        tl.store(held_bias + program * rows + worst, new_bias)
        tl.store(held_position + program * rows + worst, position)
        element = tl.arange(0, BLOCK_WIDTH)
        inside = element < WIDTH
        head = element // DIM + of_set * (WIDTH // DIM)
        within = element % DIM
        to = ((batch * rows + worst) * SETS + of_set) * WIDTH + element
        states = tl.load(key + batch * key_batch + head * key_head + within, inside)
        tl.store(held_key + to, states, inside)
        states = tl.load(value + batch * value_batch + head * value_head + within, inside)
        tl.store(held_value + to, states, inside)
    # Those that come later must still read the position, so the last to come counts it on.
    programs = tl.num_programs(0)
    if tl.atomic_add(counter + 2, 1) == programs - 1:
        tl.store(counter, position + 1)
        tl.store(counter + 2, 0)
