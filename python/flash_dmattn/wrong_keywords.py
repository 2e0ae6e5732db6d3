# SPDX-License-Identifier: BSD-3-Clause
"""The names that arguments of other packages' functions have here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["refuse_keywords", "without_unknown"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Names of the same argument; a function of this package has one of them at most.
_NAMES_OF_ONE = (
    ("is_causal", "causal"),
    ("softmax_scale", "scale", "sm_scale", "scaling"),
    ("attn_mask", "attention_mask", "mask", "padding", "key_padding_mask", "block_mask"),
    ("attn_bias", "bias", "attention_bias"),
    ("return_lse", "return_softmax_lse", "return_logsumexp", "return_aux"),
    ("sink", "s_aux", "sinks", "learnable_sink"),
    ("softcap", "logits_soft_cap", "soft_cap"),
    ("block_table", "page_table", "block_tables"),
    ("key_indices", "indices", "topk_indices", "topk_idxs"),
    ("window_size", "topk", "top_k", "keep_window_size"),
    ("cu_seqlens_q", "cu_seqlens"),
    ("log_forget", "g", "log_fgate"),
    ("group", "process_group", "cp_group"),
)
# And what else to do, where the function has the argument that is named, if one is.
_INSTEAD: dict[str, tuple[str | None, str]] = {
    **dict.fromkeys(("dropout_p", "p"), (None, "there is no dropout of probabilities")),
    **dict.fromkeys(
        ("seqused_k", "cache_seqlens", "leftpad_k"),
        ("attn_mask", "attn_mask of shape (B, K) is True where there is a key"),
    ),
    **dict.fromkeys(
        ("num_splits", "pack_gqa", "kernel_options"),
        (None, "how a call is divided is not chosen by it"),
    ),
    "alibi_slopes": (
        "attn_bias",
        "attn_bias takes a bias for each key: slope * position, (1, H, 1, K)",
    ),
    "score_mod": ("attn_bias", "attn_bias is added to the scores"),
    "enable_gqa": (None, "heads of key and value are shared without being asked for"),
    "sliding_window": ("attn_mask", "IntervalMask.sliding_window makes an attn_mask"),
    "g": ("attn_mask", "forgetting_bias makes an attn_bias and an attn_mask of log forget gates"),
    "log_forget": ("attn_mask", "forgetting_bias makes an attn_bias and an attn_mask of it"),
    "head_first": (None, "tensors are (B, rows, heads, D)"),
    "cu_seqlens": ("attn_mask", "flash_dmattn_varlen_func takes cu_seqlens_q and cu_seqlens_k"),
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table"),
        ("attn_mask", "flash_dmattn_varlen_func takes it"),
    ),
    **dict.fromkeys(
        ("need_weights", "output_attentions"),
        ("return_attn_probs", "return_attn_probs=True returns the probabilities"),
    ),
}


def refuse_keywords(function: Callable[..., Any], unknown: dict[str, Any]) -> NoReturn:
    """Raise the TypeError of keywords that a function does not have, with what is meant by one."""
    name = next(iter(unknown))
    own = inspect.signature(function).parameters
    same = next((names for names in _NAMES_OF_ONE if name in names), ())
    needed, hint = _INSTEAD.get(name, (None, ""))
    if needed is not None and needed not in own:
        hint = ""
    for other in same:
        if other in own:
            hint = f"it is called {other} here"
    text = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    raise TypeError(f"{text}: {hint}" if hint else text)


def without_unknown(function: _Function) -> _Function:
    """Leave the last parameter, of keywords that are refused, out of a function's signature."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function
