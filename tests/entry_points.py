# SPDX-License-Identifier: BSD-3-Clause
"""Every public function and method, with valid arguments and the kind of each argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flash_dmattn
import flash_dmattn.integrations
from flash_dmattn import (
    AttentionCache,
    DynamicMaskAttention,
    IntervalMask,
    KeptKeys,
    attention_reference,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
)
from flash_dmattn.utils import mask as utils_mask
from flash_dmattn.utils import padding
from good_arguments import BOUNDS
from support import randn


class Entry(NamedTuple):
    """How to call an entry point, and its arguments."""

    call: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, str]  # of valid arguments, and of optional ones without a value here
    # An argument's name in the check, where it differs.
    also_named: dict[str, str] = {}  # noqa: RUF012, never changed
    # Values that are valid here but nowhere else: (argument, kind of value).
    right: frozenset[tuple[str, str]] = frozenset()


def _of(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


_SETTINGS = {
    **_of("number", "softmax_scale softcap"),
    **_of("flag", "is_causal deterministic return_attn_probs return_lse"),
    "backend": "name",
    "plan": "object",
}
_DENSE = {"query": randn(2, 5, 4, 8), "key": randn(2, 7, 2, 8), "value": randn(2, 7, 2, 8)}
_PACKED = {"query": randn(10, 4, 8), "key": randn(10, 2, 8), "value": randn(10, 2, 8)}
_BOUNDS = {
    "cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS, "max_seqlen_q": 6, "max_seqlen_k": 6,
}  # fmt: skip
_BOUND_KINDS = {
    **_of("tensor", "cu_seqlens_q cu_seqlens_k"), **_of("integer", "max_seqlen_q max_seqlen_k"),
}  # fmt: skip
_TENSORS = _of("tensor", "query key value attn_mask attn_bias sink")
_BIAS = {"attn_bias": randn(2, 2, 1, 7), "attn_mask": torch.ones(2, 1, 1, 7, dtype=torch.bool)}
_PACKED_BIAS = {"attn_bias": randn(2, 1, 10), "attn_mask": torch.ones(1, 1, 10, dtype=torch.bool)}
_LAYER = DynamicMaskAttention(16, 4, 2, window_size=3)
_FORGETTING = flash_dmattn.ForgettingAttention(16, 4, 2)
_KEEP = torch.ones(2, 6, dtype=torch.bool)
_SHORT = {"query_length": "integer", "key_length": "integer"}


def _mask() -> IntervalMask:
    return IntervalMask.sliding_window(2, 0, 5, 7)


def _filled() -> AttentionCache:
    cache = AttentionCache()
    cache.append(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4), torch.zeros(2, 2, 1, 3))
    return cache


def _kept() -> KeptKeys:
    state = KeptKeys(3, rollback=2)
    state.update(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4), torch.zeros(2, 2, 1, 3))
    return state


def _forgetful() -> flash_dmattn.ForgettingCache:
    cache = flash_dmattn.ForgettingCache(rollback=2)
    states = torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4), torch.zeros(2, 2, 3)
    cache.taken_in(*states, lambda *_: None, prune=-4.0)
    return cache


def _auto(**arguments: Any) -> Any:
    return flash_dmattn.flash_dmattn_func_auto(**arguments)(**_DENSE)


def _layer(**arguments: Any) -> Any:
    with torch.no_grad():
        return _LAYER(**arguments)


ENTRIES: dict[str, Entry] = {
    "flash_dmattn_func": Entry(
        flash_dmattn_func,
        {**_DENSE, **_BIAS, "window_size": 3, "sink": randn(4)},
        {**_TENSORS, **_SETTINGS, **_of("integer", "window_size keep_last keep_first")},
    ),
    "flash_dmattn_func of the reference": Entry(
        lambda **arguments: flash_dmattn_func(**{"backend": "reference", **arguments}),
        {**_DENSE, **_BIAS},
        {**_TENSORS, **_SETTINGS, **_of("integer", "window_size keep_last keep_first")},
    ),
    "flash_dmattn_func with gradients": Entry(
        lambda **arguments: flash_dmattn_func(**arguments),
        {**_DENSE, "query": randn(2, 5, 4, 8).requires_grad_(), **_BIAS, "sink": randn(4)},
        {**_TENSORS, **_SETTINGS},
    ),
    "flash_dmattn_func_auto": Entry(
        _auto, {}, {**_SETTINGS, **_of("tensor", "attn_mask attn_bias")}
    ),
    "flash_dmattn_varlen_func": Entry(
        flash_dmattn_varlen_func,
        {**_PACKED, **_BOUNDS, **_PACKED_BIAS, "window_size": 3, "sink": randn(4)},
        {**_TENSORS, **_BOUND_KINDS, **_SETTINGS, "block_table": "tensor",
         **_of("integer", "window_size keep_last keep_first")},
    ),
    "flash_dmattn_varlen_func of the reference": Entry(
        lambda **arguments: flash_dmattn_varlen_func(**{"backend": "reference", **arguments}),
        {**_PACKED, **_BOUNDS, **_PACKED_BIAS, "sink": randn(4)},
        {**_TENSORS, **_BOUND_KINDS, **_SETTINGS},
    ),
    "pages": Entry(
        flash_dmattn_varlen_func,
        {**_BOUNDS, "query": randn(10, 4, 8), "key": randn(4, 4, 2, 8),
         "value": randn(4, 4, 2, 8), "block_table": torch.zeros(2, 2, dtype=torch.int32)},
        {**_of("tensor", "query key value block_table"), **_BOUND_KINDS},
    ),
    "dynamic_mask": Entry(
        dynamic_mask,
        {"attn_bias": _BIAS["attn_bias"], "window_size": 3, "attention_mask": _BIAS["attn_mask"]},
        {**_of("tensor", "attn_bias attention_mask"),
         **_of("integer", "window_size keep_last keep_first num_heads num_kv_heads"),
         "is_causal": "flag", **_SHORT, "backend": "name"},
    ),
    "dynamic_mask of packed sequences": Entry(
        dynamic_mask,
        {**_BOUNDS, "attn_bias": _PACKED_BIAS["attn_bias"], "window_size": 3, "is_causal": True,
         "attention_mask": _PACKED_BIAS["attn_mask"]},
        {**_of("tensor", "attn_bias attention_mask"),
         **_of("integer", "window_size keep_last keep_first"), "is_causal": "flag",
         **_BOUND_KINDS, "backend": "name"},
        {"attention_mask": "attn_mask"},
    ),
    "make_plan": Entry(
        make_plan,
        {"query": _DENSE["query"], "key": _DENSE["key"], "attn_mask": _BIAS["attn_mask"]},
        {**_of("tensor", "query key attn_mask"), "is_causal": "flag", "backend": "name"},
    ),
    "make_plan of packed sequences": Entry(
        make_plan,
        {"query": _PACKED["query"], "key": _PACKED["key"], **_BOUNDS},
        {**_of("tensor", "query key attn_mask"), **_BOUND_KINDS, "is_causal": "flag"},
    ),
    "attention_reference": Entry(
        attention_reference,
        {**_DENSE, "mask": _BIAS["attn_mask"], "bias": _BIAS["attn_bias"]},
        {**_of("tensor", "query key value mask bias"), **_of("number", "scale softcap"),
         "causal": "flag"},
    ),
    "attention_reference of packed sequences": Entry(
        attention_reference,
        {**_PACKED, "cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS},
        {**_of("tensor", "query key value mask bias cu_seqlens_q cu_seqlens_k block_table")},
    ),
    "IntervalMask": Entry(
        IntervalMask,
        {"start": torch.zeros(1, 2, 7, dtype=torch.int32),
         "end": torch.zeros(1, 2, 7, dtype=torch.int32)},
        {**_of("tensor", "start end"), "query_length": "integer"},
    ),
    "IntervalMask.from_key_padding": Entry(
        IntervalMask.from_key_padding,
        {"mask": _KEEP, "query_length": 5},
        {"mask": "tensor", "query_length": "integer"},
        right=frozenset({("mask", "meta"), ("mask", "of other sizes")}),
    ),
    "IntervalMask.sliding_window": Entry(
        IntervalMask.sliding_window,
        {"left": 2, "right": 1, "query_length": 5, "key_length": 7},
        {**_of("integer", "left right"), **_SHORT, "device": "name"},
    ),
    "IntervalMask.documents": Entry(
        IntervalMask.documents,
        {"document_ids": torch.zeros(2, 7, dtype=torch.int32)},
        {"document_ids": "tensor", "length": "integer"},
        right=frozenset({("document_ids", "of other sizes"), ("document_ids", "meta")}),
    ),
    "IntervalMask.documents by bounds": Entry(
        IntervalMask.documents,
        {"cu_seqlens": BOUNDS},
        {"cu_seqlens": "tensor", "length": "integer"},
        right=frozenset({("cu_seqlens", "of other sizes")}),
    ),
    "IntervalMask.prefix_lm": Entry(
        IntervalMask.prefix_lm,
        {"prefix_lengths": torch.tensor([2, 3]), "query_length": 5, "key_length": 7},
        {"prefix_lengths": "tensor", **_SHORT},
        right=frozenset({("prefix_lengths", "of other sizes"), ("prefix_lengths", "meta")}),
    ),
    "IntervalMask.delayed_eviction": Entry(
        IntervalMask.delayed_eviction,
        {"keep": torch.ones(2, 3, 7, dtype=torch.bool), "delay": 2},
        {"keep": "tensor", "delay": "integer"},
        right=frozenset({("keep", "meta"), ("keep", "of other sizes")}),
    ),
    "IntervalMask.tree": Entry(
        IntervalMask.tree,
        {"parents": torch.tensor([[-1, 0, 1], [-1, -1, 0]]), "prefix_length": 2},
        {"parents": "tensor", "prefix_length": "integer"},
        right=frozenset({("parents", "meta")}),
    ),
    "forgetting_bias": Entry(
        flash_dmattn.forgetting_bias,
        {"log_forget": -torch.ones(2, 3, 7), "prune": -4.0, "padding": torch.ones(2, 7).bool()},
        {**_of("tensor", "log_forget padding"), "prune": "number"},
        right=frozenset({("prune", "negative")}),
    ),
    "forgetting_bias of packed sequences": Entry(
        flash_dmattn.forgetting_bias,
        {"log_forget": -torch.ones(3, 10), "prune": -4.0, "cu_seqlens": BOUNDS},
        {**_of("tensor", "log_forget cu_seqlens"), "prune": "number"},
    ),
    "explain": Entry(
        flash_dmattn.explain,
        {**_DENSE, "is_causal": True},
        {**_TENSORS, **_SETTINGS},
    ),
    "pruning_threshold": Entry(
        flash_dmattn.pruning_threshold,
        {"score_bound": 8.0, "length": 100, "error": 0.1},
        {**_of("number", "score_bound error"), "length": "integer"},
    ),
    "ForgettingAttention": Entry(
        flash_dmattn.ForgettingAttention,
        {"embed_dim": 16, "num_heads": 4},
        {**_of("integer", "embed_dim num_heads num_kv_heads head_dim num_gates"),
         **_of("flag", "qk_norm projection_bias"),
         **_of("number", "prune rotary_base softmax_scale norm_eps init_std"),
         **_of("name", "backend device dtype"), "half_lives": "object"},
        right=frozenset({("half_lives", "tuple")}),
    ),
    "ForgettingAttention.forward": Entry(
        lambda **arguments: _FORGETTING(**arguments),
        {"hidden_states": randn(2, 7, 16)},
        {**_of("tensor", "hidden_states position_ids padding"), "cache": "object"},
    ),
    "ForgettingAttention.forward of packed sequences": Entry(
        lambda **arguments: _FORGETTING(**arguments),
        {"hidden_states": randn(10, 16), "cu_seqlens": BOUNDS, "max_seqlen": 6},
        {**_of("tensor", "hidden_states cu_seqlens position_ids"), "max_seqlen": "integer"},
    ),
    "ForgettingCache": Entry(flash_dmattn.ForgettingCache, {}, _of("integer", "capacity rollback")),
    "ForgettingCache.taken_in": Entry(
        lambda **arguments: _forgetful().taken_in(attend=lambda *_: None, **arguments),
        {"key": torch.zeros(2, 1, 2, 4), "value": torch.zeros(2, 1, 2, 4),
         "log_forget": torch.zeros(2, 2, 1), "prune": -4.0},
        {**_of("tensor", "key value log_forget padding"), "prune": "number"},
    ),
    "ForgettingCache.truncate": Entry(
        lambda **arguments: _forgetful().truncate(**arguments), {"length": 2}, {"length": "integer"}
    ),
    "parallel_forgetting_attn": Entry(
        flash_dmattn.integrations.parallel_forgetting_attn,
        {"q": randn(2, 7, 4, 8), "k": randn(2, 7, 2, 8), "v": randn(2, 7, 2, 8),
         "g": -torch.ones(2, 7, 4), "prune": -4.0, "window_size": 3},
        {**_of("tensor", "q k v g"), **_of("number", "scale prune"), "window_size": "integer",
         "head_first": "flag"},
        {"q": "query", "k": "key", "v": "value", "g": "log_forget", "scale": "softmax_scale"},
    ),
    "IntervalMask.to": Entry(
        lambda **arguments: _mask().to(**arguments), {"device": "cpu"}, {"device": "name"}
    ),
    "IntervalMask.to_bool": Entry(
        lambda **arguments: _mask().to_bool(**arguments),
        {"query_length": 5},
        {"query_length": "integer"},
    ),
    "& of IntervalMasks": Entry(
        lambda other: _mask() & other, {"other": _mask()}, {"other": "object"}, {"other": "&"}
    ),
    "DynamicMaskAttention": Entry(
        DynamicMaskAttention,
        {"embed_dim": 16, "num_heads": 4},
        {**_of("integer", "embed_dim num_heads num_kv_heads head_dim window_size"),
         **_of("integer", "keep_last keep_first"),
         **_of("flag", "is_causal qk_norm projection_bias"),
         **_of("number", "rotary_base softcap softmax_scale norm_eps init_std"),
         **_of("name", "bias_form backend device dtype")},
    ),
    "DynamicMaskAttention.forward": Entry(
        _layer,
        {"hidden_states": randn(2, 7, 16)},
        {**_of("tensor", "hidden_states attn_mask position_ids padding"), "cache": "object"},
    ),
    "DynamicMaskAttention.forward of packed sequences": Entry(
        _layer,
        {"hidden_states": randn(10, 16), "cu_seqlens": BOUNDS, "max_seqlen": 6},
        {**_of("tensor", "hidden_states attn_mask cu_seqlens position_ids"),
         "max_seqlen": "integer"},
    ),
    "AttentionCache": Entry(
        AttentionCache,
        {},
        {**_of("integer", "max_length rollback"), "every_key": "flag"},
        right=frozenset({("rollback", "zero")}),
    ),
    "AttentionCache.append": Entry(
        lambda **arguments: _filled().append(**arguments),
        {"key": torch.zeros(2, 1, 2, 4), "value": torch.zeros(2, 1, 2, 4),
         "bias": torch.zeros(2, 2, 1, 1)},
        _of("tensor", "key value bias"),
    ),
    "AttentionCache.append to an empty one": Entry(
        lambda **arguments: AttentionCache().append(**arguments),
        {"key": torch.zeros(2, 1, 2, 4), "value": torch.zeros(2, 1, 2, 4),
         "bias": torch.zeros(2, 2, 1, 1)},
        _of("tensor", "value bias"),
    ),
    "AttentionCache.reorder": Entry(
        lambda **arguments: _filled().reorder(**arguments),
        {"indices": torch.tensor([1, 0])},
        {"indices": "tensor"},
        right=frozenset({("indices", "of other sizes")}),
    ),
    "AttentionCache.truncate": Entry(
        lambda **arguments: _filled().truncate(**arguments), {"length": 2}, {"length": "integer"}
    ),
    "KeptKeys": Entry(
        KeptKeys,
        {"window_size": 3},
        _of("integer", "window_size keep_last keep_first rollback start"),
    ),
    "KeptKeys.attend": Entry(
        lambda **arguments: _kept().attend(**arguments),
        {"query": torch.zeros(2, 1, 4, 4), "key": torch.zeros(2, 1, 2, 4),
         "value": torch.zeros(2, 1, 2, 4), "bias": torch.zeros(2, 2, 1, 1)},
        {**_of("tensor", "query key value bias padding"), **_of("flag", "update return_lse"),
         **_of("number", "softmax_scale softcap"), "backend": "name"},
    ),
    "KeptKeys.update": Entry(
        lambda **arguments: _kept().update(**arguments),
        {"key": torch.zeros(2, 1, 2, 4), "value": torch.zeros(2, 1, 2, 4),
         "bias": torch.zeros(2, 2, 1, 1)},
        _of("tensor", "key value bias padding"),
    ),
    "KeptKeys.reorder": Entry(
        lambda **arguments: _kept().reorder(**arguments),
        {"indices": torch.tensor([1, 0])},
        {"indices": "tensor"},
        right=frozenset({("indices", "of other sizes")}),
    ),
    "KeptKeys.forget": Entry(
        lambda **arguments: _kept().forget(**arguments), {"count": 1}, {"count": "integer"}
    ),
    "utils.mask.dynamic_mask": Entry(
        utils_mask.dynamic_mask,
        {"attention_bias": randn(2, 2, 5, 7), "attention_mask": torch.ones(2, 1, 5, 7).bool(),
         "window_size": 3, "min_dtype": -1e30, "block_size": 2},
        {**_of("tensor", "attention_bias attention_mask"), "window_size": "integer",
         "min_dtype": "number"},
        right=frozenset({("attention_bias", "one more dimension"),
                         ("attention_mask", "of no dimensions")}),
    ),
    "utils.mask.create_mask": Entry(
        utils_mask.create_mask,
        {"attention_bias": randn(2, 2, 6, 6), "attention_mask": _KEEP, "batch_size": 2,
         "query_len": 6, "key_len": 6, "window_size": 3, "min_dtype": -1e30},
        {**_of("tensor", "attention_bias attention_mask"),
         **_of("integer", "batch_size query_len key_len window_size"), "min_dtype": "number"},
        right=frozenset({("attention_bias", "one more dimension"),
                         ("attention_mask", "of no dimensions")}),
    ),
    "index_first_axis": Entry(
        padding.index_first_axis,
        {"tensor": randn(2, 6, 3), "indices": torch.tensor([1, 11])},
        {"indices": "tensor"},
        right=frozenset({("indices", "of other sizes")}),
    ),
    "get_unpad_data": Entry(
        padding.get_unpad_data, {"attention_mask": _KEEP}, {"attention_mask": "tensor"},
        right=frozenset({("attention_mask", "of other sizes")}),
    ),
    "unpad_input": Entry(
        padding.unpad_input,
        {"hidden_states": randn(2, 6, 3), "attention_mask": _KEEP, "unused_mask": _KEEP.int()},
        {**_of("tensor", "attention_mask unused_mask")},
    ),
    "pad_input": Entry(
        padding.pad_input,
        {"hidden_states": randn(2, 3), "indices": torch.tensor([1, 11]), "batch": 2, "seqlen": 6},
        {"indices": "tensor", **_of("integer", "batch seqlen")},
    ),
    "upad_input": Entry(
        padding.upad_input,
        {"query_layer": randn(2, 6, 4, 8), "key_layer": randn(2, 6, 2, 8),
         "value_layer": randn(2, 6, 2, 8), "attention_mask": _KEEP, "query_length": 6},
        {"attention_mask": "tensor", "query_length": "integer"},
    ),
}  # fmt: skip
