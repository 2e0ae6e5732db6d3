# SPDX-License-Identifier: BSD-3-Clause
"""The FlexAttention function of flash-dmattn 1.2.2, where it was and with its defaults."""

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

    As there, None stands for a causal mask. Unlike there, ``attn_mask`` counts, and what else is
    given by name goes to `flash_dmattn_func`. `flash_dmattn.flex_dmattn_func` has the order and the
    defaults of that function.

    Raises:
        RuntimeError: FlexAttention cannot run here; and as `flash_dmattn_func`.
    """
    causal = True if is_causal is None else is_causal
    options = {"backend": "flex", **kwargs}
    return flash_dmattn_func(
        query, key, value, attn_mask, attn_bias, softmax_scale, causal, **options
    )
