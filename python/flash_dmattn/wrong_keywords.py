# SPDX-License-Identifier: BSD-3-Clause
"""What arguments of other packages' functions are called here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["refuse_keywords", "without_unknown"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OTHER_NAMES = {
    "is_causal": ("causal",),
    "softmax_scale": ("scale", "sm_scale", "scaling"),
    "attn_mask": ("mask", "attention_mask", "key_padding_mask", "block_mask"),
    "attn_bias": ("bias", "attention_bias"),
    "return_lse": ("return_softmax_lse", "return_logsumexp", "return_aux"),
    "sink": ("s_aux", "sinks", "learnable_sink"),
    "softcap": ("logits_soft_cap", "soft_cap"),
    "block_table": ("page_table", "block_tables"),
    "key_indices": ("indices", "topk_indices", "topk_idxs"),
}
_INSTEAD = {
    **dict.fromkeys(("dropout_p", "p"), "there is no dropout of probabilities"),
    **dict.fromkeys(
        ("seqused_k", "cache_seqlens", "leftpad_k"),
        "attn_mask of shape (B, K) is True where there is a key",
    ),
    **dict.fromkeys(
        ("num_splits", "pack_gqa", "kernel_options"), "how a call is divided is not chosen by it"
    ),
    "alibi_slopes": "attn_bias takes a bias for each key: slope * position, (1, H, 1, K)",
    "score_mod": "attn_bias is added to the scores",
    "enable_gqa": "heads of key and value are shared without being asked for",
    "sliding_window": "IntervalMask.sliding_window makes an attn_mask",
    "g": "forgetting_bias makes an attn_bias and an attn_mask of log forget gates",
    "log_forget": "forgetting_bias makes an attn_bias and an attn_mask of it",
    "head_first": "tensors are (B, rows, heads, D)",
    "cu_seqlens": "flash_dmattn_varlen_func takes cu_seqlens_q and cu_seqlens_k",
}


def refuse_keywords(function: str, unknown: dict[str, Any]) -> NoReturn:
    """Raise the TypeError of keywords that a function does not have, with what is meant by one."""
    name = next(iter(unknown))
    own = next((own for own, others in _OTHER_NAMES.items() if name in others), None)
    hint = f"it is called {own} here" if own else _INSTEAD.get(name)
    text = f"{function}() got an unexpected keyword argument {name!r}"
    raise TypeError(f"{text}: {hint}" if hint else text)


def without_unknown(function: _Function) -> _Function:
    """Leave the last parameter, of keywords that are refused, out of a function's signature."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function
