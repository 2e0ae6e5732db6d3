# SPDX-License-Identifier: BSD-3-Clause
"""Normalization and rotation of query or key heads, and their gradients.

Each program has several rows; a row is one head of one token. The two halves of a row are loaded
separately, because each element is rotated with the element half a row away.
"""

import triton
import triton.language as tl

# These differ from call to call. Triton would recompile for each that is 1 or a multiple of 16.
SIZES = ["eps", "rows", "positions", "token"]


@triton.jit
def _load_halves(tensor, places, HALF: tl.constexpr):
    place, is_first, is_second = places
    first = tl.load(tensor + place, is_first, 0.0).to(tl.float32)
    second = tl.load(tensor + HALF + place, is_second, 0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_halves(tensor, places, first, second, HALF: tl.constexpr):
    place, is_first, is_second = places
    dtype = tensor.dtype.element_ty
    tl.store(tensor + place, first.to(dtype), is_first)
    tl.store(tensor + HALF + place, second.to(dtype), is_second)


@triton.jit
def _row_places(
    rows, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr
):
    """Return the rows, the elements of a half, and their offsets and masks in contiguous rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, BLOCK_HALF)
    is_row = (row < rows)[:, None]
    is_first = is_row & (element < HALF)[None, :]
    is_second = is_row & (element < DIM - HALF)[None, :]
    return row, element, (row[:, None] * DIM + element[None, :], is_first, is_second)


@triton.jit
def _head_places(row, element, places, token, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Return offsets and masks for rows whose tokens are ``token`` elements apart."""
    begin = row // HEADS * token + row % HEADS * DIM
    return begin[:, None] + element[None, :], places[1], places[2]


@triton.jit
def _load_cos_sin(
    cos, sin, row, element, is_first, positions, HEADS: tl.constexpr, HALF: tl.constexpr
):
    place = (row // HEADS % positions)[:, None] * HALF + element[None, :]
    return tl.load(cos + place, is_first, 0.0), tl.load(sin + place, is_first, 0.0)


@triton.jit
def _inverse_rms(first, second, eps, is_row, DIM: tl.constexpr):
    """Return the factor that gives a row a mean square of 1; 0 for rows beyond the last."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    return tl.where(is_row, tl.rsqrt(squares / DIM + eps), 0.0)[:, None]


@triton.jit(do_not_specialize=SIZES)
def prepare_heads(
    heads,
    weight,
    cos,
    sin,
    prepared,
    eps,
    rows,
    positions,
    token,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Write ``prepared``, with the rounding of PyTorch's operations.

    heads and prepared are ``(tokens, HEADS, DIM)``; only prepared must be contiguous. weight is
    ``(DIM,)``, cos and sin are ``(positions, HALF)``.
    """
    row, element, places = _row_places(rows, DIM, HALF, BLOCK_HALF, ROWS)
    head_places = _head_places(row, element, places, token, HEADS, DIM)
    first, second = _load_halves(heads, head_places, HALF)
    if NORMED:
        scale = _inverse_rms(first, second, eps, row < rows, DIM)
        dtype = heads.dtype.element_ty
        first_gain, second_gain = _load_halves(
            weight, (element, element < HALF, element < DIM - HALF), HALF
        )
        first = (first * scale * first_gain[None, :]).to(dtype).to(tl.float32)
        second = (second * scale * second_gain[None, :]).to(dtype).to(tl.float32)
    if ROTATED:
        c, s = _load_cos_sin(cos, sin, row, element, places[1], positions, HEADS, HALF)
        rotated = first * c - second * s
        second = second * c + first * s
        first = rotated
    _store_halves(prepared, places, first, second, HALF)


@triton.jit(do_not_specialize=SIZES)
def differentiate_heads(
    gradient,
    heads,
    weight,
    cos,
    sin,
    heads_gradient,
    weight_gradient,
    eps,
    rows,
    positions,
    token,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Write the gradient of the heads, and these rows' part of the gradient of weight.

    gradient is that of ``prepared`` in `prepare_heads`. It and heads_gradient are contiguous.
    weight_gradient is ``(programs, DIM)``.
    """
    row, element, places = _row_places(rows, DIM, HALF, BLOCK_HALF, ROWS)
    first, second = _load_halves(gradient, places, HALF)
    if ROTATED:
        c, s = _load_cos_sin(cos, sin, row, element, places[1], positions, HEADS, HALF)
        rotated = first * c + second * s
        second = second * c - first * s
        first = rotated
    if NORMED:
        head_places = _head_places(row, element, places, token, HEADS, DIM)
        x1, x2 = _load_halves(heads, head_places, HALF)
        scale = _inverse_rms(x1, x2, eps, row < rows, DIM)
        x1, x2 = x1 * scale, x2 * scale
        weight_places = (element, element < HALF, element < DIM - HALF)
        first_gain, second_gain = _load_halves(weight, weight_places, HALF)
        gradient_places = (
            tl.program_id(0).to(tl.int64) * DIM + element,
            weight_places[1],
            weight_places[2],
        )
        sums = tl.sum(first * x1, 0), tl.sum(second * x2, 0)
        _store_halves(weight_gradient, gradient_places, sums[0], sums[1], HALF)
        first, second = first * first_gain[None, :], second * second_gain[None, :]
        mean_dot = (tl.sum(first * x1, 1) + tl.sum(second * x2, 1))[:, None] / DIM
        first, second = (first - x1 * mean_dot) * scale, (second - x2 * mean_dot) * scale
    _store_halves(heads_gradient, places, first, second, HALF)
