# SPDX-License-Identifier: BSD-3-Clause
"""Calls of the public functions with `key_indices` and `index_bias`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_dmattn.arguments import (
    autocast,
    backend_name,
    check_dtypes,
    check_packed_ranks,
    check_tensors,
    refuse_paged_gradients,
    refuse_paged_mass,
    refuse_ranks,
    resolved_deterministic,
    scale_of,
    to_4d,
)
from flash_dmattn.checks import flag, number
from flash_dmattn.record import KeyListInputs, Packing

from .ops import attention, key_mass

__all__ = ["listed_attention"]


def listed_attention(
    packing: Packing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_indices: Tensor | None,
    index_bias: Tensor | None,
    *,
    attn_bias: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool | None,
    softcap: float | None,
    deterministic: bool | None,
    sink: Tensor | None,
    return_lse: bool,
    return_key_mass: bool,
    backend: str | None,
    **excluded: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Compute a dense or packed call that lists the keys of each query.

    ``excluded`` are arguments that cannot be combined with lists; each must be None or False.
    """
    if key_indices is None:
        raise ValueError(
            "index_bias is added to the scores of the keys that key_indices lists, which is None"
        )
    conflicting = [
        name for name, value in excluded.items() if value is not None and value is not False
    ]
    if conflicting:
        raise ValueError(
            f"key_indices cannot be combined with {', '.join(conflicting)}: what a query attends "
            "to is what its list names; leave other keys out of the list"
        )
    check_tensors(
        query,
        key=key,
        value=value,
        key_indices=key_indices,
        index_bias=index_bias,
        attn_bias=attn_bias,
        sink=sink,
        **{name: t for name, t in packing._asdict().items() if isinstance(t, Tensor)},
    )
    return_key_mass = flag("return_key_mass", return_key_mass)
    return_lse = flag("return_lse", return_lse)
    if return_key_mass and packing.block_table is not None:
        refuse_paged_mass()
    name = backend_name(backend)
    query, key, value, bias, index_bias, sink = autocast(
        query, key, value, attn_bias, index_bias, sink
    )
    check_dtypes(query, key, value, name)
    if packing.is_dense:
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            refuse_ranks(query=query, key=key, value=value)
        if bias is not None:
            (batch, _, heads, _), (_, keys, kv_heads, _) = query.shape, key.shape
            sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "keys": keys}
            bias = to_4d("attn_bias", bias, **sizes)
    else:
        check_packed_ranks(query, key, paged=packing.block_table is not None)
        if packing.block_table is not None:
            refuse_paged_gradients(query, key, value, attn_bias, index_bias, sink)
    inputs = KeyListInputs(
        query,
        key,
        value,
        key_indices,
        bias,
        index_bias,
        sink,
        **packing._asdict(),
        scale=scale_of(softmax_scale, query),
        causal=flag("is_causal", is_causal),
        softcap=0.0 if softcap is None else number("softcap", softcap),
        deterministic=resolved_deterministic(deterministic),
    )
    out, lse = attention(inputs, name)
    results = (out, lse) if return_lse else (out,)
    if return_key_mass:
        results = (*results, key_mass(inputs, name, lse))
    return results if len(results) > 1 else out
