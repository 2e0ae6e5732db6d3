# SPDX-License-Identifier: BSD-3-Clause
"""The FlexAttention function of flash-dmattn 1.2.2, at its path and with its defaults."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .interface import flash_dmattn_func


def flex_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = None,
    softmax_scale: float | None = None,
    **kwargs: Any,
) -> Any:
    """Compute `flash_dmattn_func` by FlexAttention, with 1.2.2's order of arguments and defaults.

    As in 1.2.2, ``is_causal=None`` means a causal mask. Unlike 1.2.2, ``attn_mask`` has an effect,
    and other named arguments go to `flash_dmattn_func`. `flash_dmattn.flex_dmattn_func` has the
    order and the defaults of `flash_dmattn_func`.

    Raises:
        RuntimeError: FlexAttention cannot run here. Other errors are those of `flash_dmattn_func`.
    """
    causal = True if is_causal is None else is_causal
    options = {"backend": "flex", **kwargs}
    return flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, softmax_scale, causal, **options
    )
