# SPDX-License-Identifier: BSD-3-Clause
"""Insertion of one token into the rows of a state. Launches dominate a decoding step."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .common import INTERPRETED

# These differ from call to call. Triton would recompile for each that is 1 or a multiple of 16.
SIZES = ["rows", "key_batch", "key_head", "value_batch", "value_head", "bias_batch", "bias_set"]


# Source of the token's bias: given, or computed by the formula of the layer.
GIVEN = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
EXPONENTIAL = tl.constexpr(2)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)) with the functions of PyTorch's kernel, for equal bits."""
    small = tl.minimum(x, 20.0)
    if INTERPRETED:
        soft = tl.log(1.0 + tl.exp(small))
    else:
        soft = libdevice.log1p(libdevice.exp(small))
    return tl.where(x > 20.0, x, soft)


@triton.jit
def _lowest(positions, begin, end, BLOCK_ROWS: tl.constexpr):
    """Return the first row of the lowest position, and that position. Empty rows count as -1."""
    lowest = tl.full((), 1 << 62, tl.int64)
    row_of_lowest = tl.full((), 0, tl.int64)
    for start in range(begin, end, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        is_row = row < end
        found = tl.load(positions + row, is_row, 1 << 62)
        found = tl.where(is_row & (found == 1 << 62), -1, found)
        least = tl.min(found, 0)
        place = tl.min(tl.where(found == least, row, end), 0)
        row_of_lowest = tl.where(least < lowest, place.to(tl.int64), row_of_lowest)
        lowest = tl.minimum(lowest, least)
    return row_of_lowest, lowest


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
    KEEP_LAST: tl.constexpr,
    KEEP_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch = program // SETS
    set_index = program % SETS
    position = tl.load(counter)
    if KEY_BIAS == GIVEN:
        new_bias = tl.load(bias + batch * bias_batch + set_index * bias_set)
    else:
        # Each bias head has a row of weights over the values of all heads.
        column = tl.arange(0, BLOCK_VALUE)
        is_column = column < VALUE_WIDTH
        all_values = tl.load(value + batch * value_batch + column, is_column, 0.0)
        weight = tl.load(bias + set_index * VALUE_WIDTH + column, is_column, 0.0)
        state = tl.sum(all_values.to(tl.float32) * weight.to(tl.float32), 0)
        if HAS_STATES_BIAS:
            state += tl.load(states_bias + set_index).to(tl.float32)
        # Round to the dtype of the biases, like PyTorch's operations.
        dtype = held_bias.dtype.element_ty
        soft = _softplus(state.to(value.dtype.element_ty).to(tl.float32)).to(dtype)
        new_bias = tl.load(amplitude + set_index).to(tl.float32) * soft.to(tl.float32)
        new_bias = new_bias.to(dtype).to(tl.float32)
        if KEY_BIAS == EXPONENTIAL:
            new_bias = tl.exp(new_bias) if INTERPRETED else libdevice.exp(new_bias)
            new_bias = new_bias.to(dtype).to(tl.float32)
    element = tl.arange(0, BLOCK_WIDTH)
    is_element = element < WIDTH
    head = element // DIM + set_index * (WIDTH // DIM)
    within = element % DIM
    new_key = tl.load(key + batch * key_batch + head * key_head + within, is_element)
    new_value = tl.load(value + batch * value_batch + head * value_head + within, is_element)
    first_row = program * rows
    first_state = (batch * rows * SETS + set_index) * WIDTH + element  # rows are SETS * WIDTH apart
    if KEEP_LAST + KEEP_FIRST > 0:
        # Padding has a bias of -inf. A NaN bias becomes -inf, too, but gets a position.
        is_token = new_bias != float("-inf")
        new_bias = tl.where(new_bias == new_bias, new_bias, float("-inf"))
        new_position = position
        if KEEP_LAST > 0:
            oldest, oldest_position = _lowest(
                held_position + first_row, rows - KEEP_LAST, rows, BLOCK_ROWS
            )
            slot = first_state + oldest * SETS * WIDTH
            evicted_key = tl.load(held_key + slot, is_element)
            evicted_value = tl.load(held_value + slot, is_element)
            evicted_bias = tl.load(held_bias + first_row + oldest).to(tl.float32)
            if is_token:
                tl.store(held_bias + first_row + oldest, new_bias)
                tl.store(held_position + first_row + oldest, new_position)
                tl.store(held_key + slot, new_key, is_element)
                tl.store(held_value + slot, new_value, is_element)
            new_key, new_value, new_bias = evicted_key, evicted_value, evicted_bias
            new_position = oldest_position
            is_token = is_token & (oldest_position >= 0)
        if KEEP_FIRST > 0:
            free_row, free_position = _lowest(held_position + first_row, 0, KEEP_FIRST, BLOCK_ROWS)
            if is_token & (free_position < 0):
                tl.store(held_bias + first_row + free_row, new_bias)
                tl.store(held_position + first_row + free_row, new_position)
                slot = first_state + free_row * SETS * WIDTH
                tl.store(held_key + slot, new_key, is_element)
                tl.store(held_value + slot, new_value, is_element)
            is_token = is_token & (free_position >= 0)
        new_bias = tl.where(is_token, new_bias, float("-inf"))
    else:
        new_position = position
    # The worst row has the smallest bias, and of equal ones the latest position. Empty rows are
    # worst.
    worst_bias = tl.full((), float("inf"), tl.float32)
    worst_position = tl.full((), -1, tl.int64)
    worst = tl.full((), 0, tl.int64)
    end_of_best = rows - KEEP_LAST
    for begin in range(KEEP_FIRST, end_of_best, BLOCK_ROWS):
        row = begin + tl.arange(0, BLOCK_ROWS)
        is_row = row < end_of_best
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
    # False for a bias of NaN or -inf.
    if new_bias > worst_bias:
        tl.store(held_bias + first_row + worst, new_bias)
        tl.store(held_position + first_row + worst, new_position)
        slot = first_state + worst * SETS * WIDTH
        tl.store(held_key + slot, new_key, is_element)
        tl.store(held_value + slot, new_value, is_element)
    # Other programs must read the old position, so the last program updates it.
    programs = tl.num_programs(0)
    if tl.atomic_add(counter + 2, 1) == programs - 1:
        tl.store(counter, position + 1)
        tl.store(counter + 2, 0)
