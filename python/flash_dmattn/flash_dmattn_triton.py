# SPDX-License-Identifier: BSD-3-Clause
"""The Triton function of flash-dmattn 1.2.2, at its path and with its order of arguments."""

from __future__ import annotations

from torch import Tensor

from .interface import flash_dmattn_func


def triton_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """Compute `flash_dmattn_func` by Triton kernels, with 1.2.2's order of arguments.

    `flash_dmattn.triton_dmattn_func` has the order of `flash_dmattn_func`, and all its arguments.

    Raises:
        RuntimeError: Triton cannot run here. Other errors are those of `flash_dmattn_func`.
    """
    out = flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, backend="triton"
    )
    assert isinstance(out, Tensor)
    return out
