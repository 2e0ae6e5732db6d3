# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of keys that a model selects for each query to lists for attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn import checks
from flash_dmattn.masks import IntervalMask

from .mask_forms import Mask, has_rows
from .packed_documents import Documents

__all__ = ["KeyLists", "key_lists", "selected_keys"]


class KeyLists(NamedTuple):
    """Arguments of `flash_dmattn_func`."""

    key_indices: Tensor
    index_bias: Tensor | None
    attn_bias: Tensor | None


def selected_keys(module: torch.nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """Pop the keys that a model selects from the arguments: ``(B, {Hk|1}, Q, k)``, or None.

    Args:
        module: the caller; the ``block_size`` of its ``indexer`` is read.
        kwargs: ``indices``, ``(B, Q, k)`` or of the form above, or ``block_indices``, ``(B, {Hk|1},
            Q, blocks)``. Entries out of range are ignored.
    """
    indices: Tensor | None = kwargs.pop("indices", None)
    blocks: Tensor | None = kwargs.pop("block_indices", None)
    if blocks is not None:
        if indices is not None:
            raise ValueError("indices and block_indices select the same keys; pass one of them")
        _check("block_indices", blocks, (4,), "(B, {Hk|1}, Q, blocks)")
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise ValueError(
                "block_indices lists blocks whose size module.indexer.block_size tells, which "
                f"{type(module).__name__} does not have; pass indices of keys"
            )
        size = checks.index("module.indexer.block_size", size, 1)
        offsets = torch.arange(size, device=blocks.device)  # negative blocks give negative keys
        return (blocks.unsqueeze(-1) * size + offsets).flatten(-2)
    if indices is not None:
        _check("indices", indices, (3, 4), "(B, Q, k) or (B, {Hk|1}, Q, k)")
        indices = indices.unsqueeze(1) if indices.dim() == 3 else indices
    return indices


def _check(name: str, indices: Any, ranks: tuple[int, ...], form: str) -> None:
    checks.tensor(name, indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must have dtype torch.int32 or torch.int64, got {indices.dtype}")
    if indices.dim() not in ranks:
        raise ValueError(f"{name} must have shape {form}, got {tuple(indices.shape)}")


def key_lists(
    indices: Tensor, mask: Mask, bias: Tensor | None, query: Tensor, key: Tensor
) -> KeyLists:
    """Drop masked keys from the lists, and look up the biases of the others.

    Args:
        indices: of `selected_keys`.
        mask, bias: of `mask_and_bias`.
        query: ``(B, Q, H, D)``.
        key: ``(B, K, Hk, D)``.
    """
    (batch, queries), (keys, kv_heads) = query.shape[:2], key.shape[1:3]
    lists, is_listed = indices.shape[1], (indices.shape[0], indices.shape[2]) == (batch, queries)
    if not (is_listed and checks.is_one_of(lists, 1, kv_heads)):
        raise ValueError(
            f"the keys that the model selects must be listed for ({batch}, {queries}) batches and "
            f"queries, and 1 or Hk={kv_heads} heads, got indices of shape {tuple(indices.shape)}"
        )
    if keys == 0:
        indices = indices[..., :0]
    invalid = (indices < 0) | (indices >= keys)
    valid_indices = indices.masked_fill(invalid, 0).long()

    def look_up(tensor: Tensor) -> Tensor:
        """Return ``(B, {lists|h}, Q, k)`` from a tensor that broadcasts to Q and K."""
        heads = max(lists, tensor.shape[1])
        if tensor.shape[1] != 1 and tensor.shape[1] != heads:
            tensor = tensor.repeat_interleave(heads // tensor.shape[1], 1)
        head_indices = (
            valid_indices if lists == heads else valid_indices.repeat_interleave(heads // lists, 1)
        )
        return tensor.expand(batch, heads, queries, keys).gather(-1, head_indices)

    if isinstance(mask, Documents):
        mask = mask.intervals()
    if isinstance(mask, IntervalMask):
        mask = mask.to_bool(queries)
    index_bias = None
    if has_rows(bias):
        assert bias is not None
        index_bias, bias = look_up(bias), None
    if mask is not None:
        kept = look_up(mask)
        if kept.shape[1] == lists:
            invalid = invalid | ~kept
        else:  # heads that share a list keep different keys
            if index_bias is None:
                index_bias = query.new_zeros(()).expand(kept.shape)
            elif index_bias.shape[1] < kept.shape[1]:
                index_bias = index_bias.repeat_interleave(kept.shape[1] // index_bias.shape[1], 1)
            elif index_bias.shape[1] > kept.shape[1]:
                kept = kept.repeat_interleave(index_bias.shape[1] // kept.shape[1], 1)
            index_bias = index_bias.masked_fill(~kept, -torch.inf)
    return KeyLists(indices.masked_fill(invalid, -1).to(torch.int32), index_bias, bias)
