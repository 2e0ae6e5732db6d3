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
def _halves(tensor, places, HALF: tl.constexpr):
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
def _places(
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
def _places_of_heads(row, element, places, token, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Return offsets and masks for rows whose tokens are ``token`` elements apart."""
    begin = row // HEADS * token + row % HEADS * DIM
    return begin[:, None] + element[None, :], places[1], places[2]


@triton.jit
def _factors(cos, sin, row, element, is_first, positions, HEADS: tl.constexpr, HALF: tl.constexpr):
    place = (row // HEADS % positions)[:, None] * HALF + element[None, :]
    return tl.load(cos + place, is_first, 0.0), tl.load(sin + place, is_first, 0.0)


@triton.jit
def _scale(first, second, eps, is_row, DIM: tl.constexpr):
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
    TURNED: tl.constexpr,
):
    """Write ``prepared``, with the rounding of PyTorch's operations.

    heads and prepared are ``(tokens, HEADS, DIM)``; only prepared must be contiguous. weight is
    ``(DIM,)``, cos and sin are ``(positions, HALF)``.
    """
    row, element, places = _places(rows, DIM, HALF, BLOCK_HALF, ROWS)
    given = _places_of_heads(row, element, places, token, HEADS, DIM)
    first, second = _halves(heads, given, HALF)
    if NORMED:
        scale = _scale(first, second, eps, row < rows, DIM)
        dtype = heads.dtype.element_ty
        gain, other_gain = _halves(weight, (element, element < HALF, element < DIM - HALF), HALF)
        first = (first * scale * gain[None, :]).to(dtype).to(tl.float32)
        second = (second * scale * other_gain[None, :]).to(dtype).to(tl.float32)
    if TURNED:
        c, s = _factors(cos, sin, row, element, places[1], positions, HEADS, HALF)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
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
    TURNED: tl.constexpr,
):
    """Write the gradient of the heads, and these rows' part of the gradient of weight.

    gradient is that of ``prepared`` in `prepare_heads`. It and heads_gradient are contiguous.
    weight_gradient is ``(programs, DIM)``.
    """
    row, element, places = _places(rows, DIM, HALF, BLOCK_HALF, ROWS)
    first, second = _halves(gradient, places, HALF)
    if TURNED:
        c, s = _factors(cos, sin, row, element, places[1], positions, HEADS, HALF)
        turned = first * c + second * s
        second = second * c - first * s
        first = turned
    if NORMED:
        given = _places_of_heads(row, element, places, token, HEADS, DIM)
        one, other = _halves(heads, given, HALF)
        scale = _scale(one, other, eps, row < rows, DIM)
        one, other = one * scale, other * scale
        line = (element, element < HALF, element < DIM - HALF)
        gain, other_gain = _halves(weight, line, HALF)
        to = (tl.program_id(0).to(tl.int64) * DIM + element, line[1], line[2])
        _store_halves(weight_gradient, to, tl.sum(first * one, 0), tl.sum(second * other, 0), HALF)
        first, second = first * gain[None, :], second * other_gain[None, :]
        along = (tl.sum(first * one, 1) + tl.sum(second * other, 1))[:, None] / DIM
        first, second = (first - one * along) * scale, (second - other * along) * scale
    _store_halves(heads_gradient, places, first, second, HALF)
