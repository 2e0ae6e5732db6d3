# SPDX-License-Identifier: BSD-3-Clause
"""The attention function that transformers models call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_dmattn import checks
from flash_dmattn.masks import IntervalMask

from . import implementations
from .implementations import expects_eager_masks
from .key_bias import apply_key_bias, has_bias
from .mask_forms import Mask, sum_of_biases
from .model_attention import _flash_dynamic_mask_attention_forward
from .peft import target_dtype_of
from .selected_keys import selected_keys

__all__ = ["REFUSED", "flash_dynamic_mask_attention_forward"]

# Arguments of models that are not supported, with the remedy. Ignoring them would change the
# model's results.
_USE_EAGER = "call model.set_attn_implementation('eager')"
REFUSED = {
    "output_attentions": f"probabilities are never made; to look at them, {_USE_EAGER}",
    "head_mask": f"heads cannot be masked; {_USE_EAGER}",
    "layer_head_mask": f"heads cannot be masked; {_USE_EAGER}",
    "dropout": (
        "probabilities are not dropped; set the dropout of attention in the model's config to 0, "
        "or train without it, all other dropout kept, after "
        "flash_dmattn.integrations.register(attention_dropout='skip')"
    ),
    "sinks": f"sinks that differ from token to token are not computed; {_USE_EAGER}",
    "cache": "paged caches of continuous batching are not read; call generate()",
    "block_table": "paged caches of continuous batching are not read; call generate()",
}


def flash_dynamic_mask_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    attention_bias: Tensor | None = None,
    scaling: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a module of a transformers model.

    Args:
        module: the caller; `is_causal`, `config` and settings of `apply_flash_dmattn` are read.
        query: ``(B, H, Q, D)``.
        key, value: ``(B, Hk, K, D)``; the head dimension of value may be another one, Dv.
        attention_mask: None, a mask of two to four dimensions, or the result of the registered
            mask function. A mask with a row for each query must include causality.
        attention_bias: ``(B, K)``, ``(B, {H|Hk|1}, K)`` or 4-D, added to the scaled scores.
        scaling: of the scores; ``D ** -0.5`` by default.
        window_size: keep the keys with the largest bias; ``keep_window_size`` means the same.
            ``keep_last`` and ``keep_first`` also keep the last and first keys that a query sees.
        softcap: as in `flash_dmattn_func`.
        **kwargs: ``is_causal``, overriding the module's; the ``cu_seq_lens`` of packed sequences,
            or, for a module without a transformers config, ``position_ids``; ``sliding_window``;
            ``position_bias``, another bias; ``s_aux``, ``(H,)``, the sinks of gpt-oss and others;
            ``indices``, ``(B, Q, k)``, or ``block_indices``, the keys that an indexer selected.
            Arguments of other attention implementations are ignored.

    Returns:
        ``(B, Q, H, Dv)``, and None in place of the probabilities.

    Raises:
        NotImplementedError: an unsupported feature is requested, such as output_attentions,
            head_mask or dropout; or as `flash_dmattn_func`.
        TypeError, ValueError, RuntimeError: as `flash_dmattn_func`.
    """
    if not isinstance(module, torch.nn.Module):
        checks.refuse_type("module", "a torch.nn.Module", module)
    for name, states in (("query", query), ("key", key), ("value", value)):
        if checks.tensor(name, states).dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, N, D), got {tuple(states.shape)}")
    _refuse(module, kwargs)
    keep_counts = {name: kwargs.pop(name, 0) for name in ("keep_last", "keep_first")}
    call = module, key, value, attention_mask, attention_bias
    key, value, attention_mask, attention_bias, window_size, module_keep_counts = apply_key_bias(
        *call, window_size, kwargs
    )
    keep_counts = keep_counts if module_keep_counts is None else module_keep_counts
    if hasattr(getattr(module, "config", None), "_attn_implementation"):
        # transformers made the mask, with regard to caches and to padding that is all True. It also
        # detects documents in the positions, if there is neither.
        kwargs.pop("position_ids", None)
    position_bias = kwargs.pop("position_bias", None)
    if position_bias is not None:
        checks.tensor("position_bias", position_bias)
    attention_bias = sum_of_biases(attention_bias=attention_bias, position_bias=position_bias)
    sink = _sink(kwargs, query.dtype)
    indices = selected_keys(module, kwargs)
    is_causal = kwargs.pop("is_causal", None)
    if is_causal is None:
        is_causal = (
            getattr(module, "is_causal", True)
            and not _includes_causality(attention_mask)
            and not expects_eager_masks(getattr(module, "config", None))
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    scaling = checks.number("scaling", scaling)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = _flash_dynamic_mask_attention_forward(
        query,
        key,
        value,
        attention_mask,
        attention_bias,
        query_length=query.shape[1],
        key_length=key.shape[1],
        is_causal=checks.flag("is_causal", is_causal),
        softmax_scale=scaling,
        window_size=window_size,
        **keep_counts,
        softcap=softcap,
        target_dtype=target_dtype_of(query, module),
        sink=sink,
        indices=indices,
        **kwargs,
    )
    return out, None


def _sink(kwargs: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    """Pop the sinks from the arguments."""
    sink: Tensor | None = kwargs.pop("s_aux", None)
    if sink is None:
        return None
    checks.tensor("s_aux", sink)
    return sink if sink.dtype in (dtype, torch.float32) else sink.to(torch.float32)


def _refuse(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name, remedy in REFUSED.items():
        argument = kwargs.pop(name, None)
        if (
            argument is None
            or argument is False
            or (name == "dropout" and _may_be_skipped(argument))
        ):
            continue
        if has_bias(module) and remedy.endswith(_USE_EAGER):
            what = remedy.partition(";")[0]
            remedy = f"{what}, and no other attention computes with this model's key_bias"
        raise NotImplementedError(
            f"{name} must be None, False or 0 with attn_implementation='flash_dmattn', got "
            f"{checks.described(argument)}: {remedy}"
        )


def _may_be_skipped(dropout: Any) -> bool:
    return isinstance(dropout, (int, float)) and (
        dropout == 0 or implementations.attention_dropout == "skip"
    )


def _includes_causality(mask: Mask) -> bool:
    if isinstance(mask, Tensor):
        return mask.dim() == 4 and mask.shape[2] != 1
    return isinstance(mask, IntervalMask)
