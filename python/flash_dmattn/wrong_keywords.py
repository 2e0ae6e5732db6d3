# SPDX-License-Identifier: BSD-3-Clause
"""Names that functions of other packages use for the arguments of this package."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["hide_unknown_keywords", "refuse_keywords", "with_keyword_hints"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

# Names of the same argument. An error suggests the first name that the function has.
_SYNONYMS = (
    ("is_causal", "causal"),
    ("softmax_scale", "scale", "sm_scale", "scaling"),
    ("attn_mask", "attention_mask", "mask", "padding", "key_padding_mask", "block_mask"),
    ("attn_bias", "bias", "attention_bias"),
    ("projection_bias", "bias", "qkv_bias", "attention_bias"),
    ("return_lse", "return_softmax_lse", "return_logsumexp", "return_aux"),
    ("sink", "s_aux", "sinks", "learnable_sink"),
    ("softcap", "logits_soft_cap", "soft_cap"),
    ("block_table", "page_table", "block_tables"),
    ("key_indices", "indices", "topk_indices", "topk_idxs"),
    ("window_size", "topk", "top_k", "keep_window_size"),
    ("cu_seqlens_q", "cu_seqlens", "cu_seqlens_k"),
    ("max_seqlen_q", "max_seqlen", "max_seqlen_k"),
    ("query_length", "seqlen_q", "q_len"),
    ("prefix_length", "prefix_len"),
    ("document_ids", "doc_ids", "segment_ids"),
    ("max_length", "max_cache_len", "max_seqlen", "max_seq_len"),
    ("cache", "past_key_values", "past_key_value", "kv_cache", "inference_params"),
    ("position_ids", "positions", "input_pos"),
    ("hidden_states", "x", "query"),
    ("embed_dim", "hidden_size", "dim", "d_model"),
    ("num_heads", "num_attention_heads", "n_heads", "nhead"),
    ("num_kv_heads", "num_key_value_heads", "num_heads_kv", "n_kv_heads"),
    ("rotary_base", "rope_theta", "rope_base"),
    ("qk_norm", "use_qk_norm"),
    ("norm_eps", "eps", "rms_norm_eps"),
    ("log_forget", "g", "log_fgate"),
    ("group", "process_group", "cp_group"),
)
# Hints for keywords. A hint applies if the function has the argument that is named, if any.
_HINTS: dict[str, tuple[str | None, str]] = {
    **dict.fromkeys(
        ("dropout_p", "p", "dropout", "attention_dropout"),
        (None, "there is no dropout of probabilities"),
    ),
    "causal": ("half_lives", "it always is"),
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


def refuse_keywords(
    function: Callable[..., Any], unknown: dict[str, Any], callee: str | None = None
) -> NoReturn:
    """Raise TypeError for keywords that a function does not have, with a hint for the first."""
    name = next(iter(unknown))
    parameters = inspect.signature(function).parameters
    synonyms = (other for names in _SYNONYMS if name in names for other in names)
    needed, hint = _HINTS.get(name, (None, ""))
    if needed is not None and needed not in parameters:
        hint = ""
    other = next((other for other in synonyms if other in parameters), None)
    if other is not None:
        hint = f"it is called {other} here"
    text = f"{callee or function.__qualname__}() got an unexpected keyword argument {name!r}"
    raise TypeError(f"{text}: {hint}" if hint else text)


def hide_unknown_keywords(function: _Function) -> _Function:
    """Remove the last parameter, of refused keywords, from a function's signature."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
    return function


def with_keyword_hints(cls: _Class) -> _Class:
    """Let a class's constructor give hints for keywords that it does not have."""
    make: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = frozenset(inspect.signature(make).parameters)

    @functools.wraps(make)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                refuse_keywords(make, {name: None}, type(self).__name__)
        make(self, *arguments, **named)

    cls.__init__ = construct  # type: ignore[misc]
    return cls
