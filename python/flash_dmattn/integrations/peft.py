# SPDX-License-Identifier: BSD-3-Clause
"""Casting back queries, keys and values that PEFT's adapters have cast to float32."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn.arguments import autocast_dtype

__all__ = ["fdma_peft_integration_check", "target_dtype_of"]


def target_dtype_of(query: Tensor, module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype that a model computes in, if query is float32 but the model is not.

    PEFT casts layer norms to float32, which unintentionally makes the inputs of attention float32.
    Return None if query has another dtype, or the model's dtype is unknown.
    """
    if query.dtype != torch.float32:
        return None
    if (dtype := autocast_dtype(query)) is not None:
        return dtype
    config = getattr(module, "config", None)
    for holder, attribute in (
        (config, "_pre_quantization_dtype"),  # the weights of quantized models are integers
        (config if getattr(config, "_is_quantized", False) else None, "dtype"),
    ):
        if isinstance(dtype_of_config := getattr(holder, attribute, None), torch.dtype):
            return dtype_of_config
    weights = (m.weight for m in module.modules() if isinstance(m, torch.nn.Linear))
    return next((w.dtype for w in weights if w.is_floating_point()), None)


def fdma_peft_integration_check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    target_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cast a float32 query, key and value to the target dtype. The bias is unchanged."""
    if target_dtype is None or q.dtype != torch.float32:
        return q, k, v, bias
    q, k, v = (t.to(target_dtype) for t in (q, k, v))
    return q, k, v, bias
