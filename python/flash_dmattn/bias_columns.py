# SPDX-License-Identifier: BSD-3-Clause
"""A per-key bias as extra columns of query and key.

A kernel adds one bias. If a call also has a per-query bias, the per-key bias goes through the
product of query and key: query gets columns of 1, and key gets columns of bias / scale. Products
are exact and summed in float32. So three 16-bit columns, each the rounding residual of the
previous one, keep the float32 value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Multiple of the padded width: keeps 16-bit rows aligned to 16 bytes.
_UNIT = 8


class Extended(NamedTuple):
    """Query and key ``(..., D + more)``, and value, at least as wide; its extra columns are 0."""

    query: Tensor
    key: Tensor
    value: Tensor


def with_bias_columns(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Extended:
    """Put a bias of the keys into the product of query and key.

    Args:
        query: ``(..., Q, H, D)``.
        key, value: ``(..., K, Hk, D)``.
        bias: broadcasts to ``(..., K, Hk)``.
        scale: the scale of the scores; not 0.
    """
    rows_shape = key.shape[:-1]
    pieces: Tensor = _Pieces.apply(bias, rows_shape, key.dtype, 1.0 / scale)  # type: ignore[no-untyped-call]
    count = pieces.shape[-1]
    head_dim = key.shape[-1]
    extra_columns = -(-(head_dim + count) // _UNIT) * _UNIT - head_dim
    padding = key.new_zeros(()).expand(*rows_shape, extra_columns - count)
    ones = query.new_ones(()).expand(*query.shape[:-1], count)
    zeros = query.new_zeros(()).expand(*query.shape[:-1], extra_columns - count)
    return Extended(
        torch.cat([query, ones, zeros], -1),
        torch.cat([key, pieces, padding], -1),
        torch.nn.functional.pad(value, (0, max(0, head_dim + extra_columns - value.shape[-1]))),
    )


class _Pieces(torch.autograd.Function):
    """``(..., count)``: pieces of a dtype that sum to the bias times a factor."""

    @staticmethod
    def forward(
        ctx: Any, bias: Tensor, shape: torch.Size, dtype: torch.dtype, factor: float
    ) -> Any:
        ctx.shape, ctx.dtype, ctx.factor = bias.shape, bias.dtype, factor
        residual = bias.to(torch.promote_types(bias.dtype, torch.float32)) * factor
        if dtype == residual.dtype:
            pieces = [residual]
        else:
            limit, pieces = torch.finfo(dtype).max, []
            for _ in range(3):
                # A finite bias beyond the dtype's range means "masked", so clamping is harmless.
                # inf and NaN stay.
                piece = torch.where(
                    residual.isfinite(), residual.clamp(-limit, limit), residual
                ).to(dtype)
                pieces.append(piece)
                residual = torch.where(
                    residual.isfinite(), residual - piece.to(residual.dtype), 0.0
                )
        return torch.stack(pieces, -1).expand(*shape, len(pieces))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # The gradient of every piece equals that of the bias, so the first one suffices.
        first = gradient[..., 0].to(torch.promote_types(gradient.dtype, torch.float32))
        total = first.sum_to_size(ctx.shape) * ctx.factor
        return total.to(ctx.dtype), None, None, None
