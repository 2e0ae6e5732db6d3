# SPDX-License-Identifier: BSD-3-Clause
"""NaN and infinities in elements that must not affect any result.

A key that no query of a head keeps, by mask, selection or a bias of -inf, must not affect any
result or gradient of that head. Other heads may keep the shared key: their results are then
undefined. A key that some rows of a head keep stays clean, since the head's other rows may multiply
it by 0.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flash_dmattn.reference import Sequence, sequences

from .calls import Call
from .exact import kept_pairs, visible_pairs
from .source import Source

VALUES = (torch.nan, torch.nan, torch.inf, -torch.inf)


def poison(source: Source, call: Call) -> tuple[dict[str, int], list[str]]:
    """Poison some of the elements that must not affect any result, in place.

    Returns:
        Of each tensor whose elements are the same along a dimension, that dimension; and what may
        be poisoned.
    """
    alike = {
        name: dimension
        for name in ("query", "key", "value", "dout")
        if source.chance(0.06) and (dimension := _make_alike(source, getattr(call, name)))
    }
    alike = {name: dimension - 1 for name, dimension in alike.items()}
    share = source.weighted({0.0: 3, 0.3: 2, 1.0: 3})
    kinds = source.some(["key", "value", "query", "bias", "gradients"]) if share else []
    of_heads = source.chance(0.25)
    for part in sequences(dataclasses.replace(call, block_table=None).inputs(call.mask)):
        kept = kept_pairs(call, part)
        dropped, empty = ~kept.any(2), ~kept.any(3)
        groups = dropped.unflatten(1, (part.key.shape[2], -1))
        by_all, by_some = groups.all(2).transpose(1, 2), groups.any(2).transpose(1, 2)
        # Tensors of a packed call have no batch dimension.
        shift = 0 if call.cu_seqlens_q is None else 1
        for name in ("key", "value"):
            flags = by_all & source.kept(by_all.shape, share if name in kinds else 0.0)
            if of_heads:
                flags |= by_some & ~by_all & source.kept(by_all.shape, source.choice([0.01, 0.1]))
            _spoil(source, getattr(part, name), flags, alike.get(name), shift)
        if "query" in kinds:
            rows = empty.transpose(1, 2)
            _spoil(source, part.query, rows, alike.get("query"), shift)
        if "gradients" in kinds:
            dout, dlse = call.dout, call.dlse
            if shift:
                dout, dlse = dout[part.rows][None], dlse[None, :, part.rows]
            _spoil(source, dout, empty.transpose(1, 2), alike.get("dout"), shift)
            dlse.masked_fill_(empty, source.choice(VALUES))
        if "bias" in kinds and part.bias is not None:
            flags = _unseen(call, part, part.bias) & source.kept(part.bias.shape[-1:], share)
            part.bias.masked_fill_(flags, source.choice(VALUES))
            if shift and part.bias.shape[2] == part.query.shape[1] != 1 and call.bias is not None:
                # A bias with rows: the keys past the end of a shorter sequence.
                call.bias[:, part.rows, part.key.shape[1] :] = source.choice(VALUES)
    return alike, [*kinds, "heads"] if of_heads else kinds


def _make_alike(source: Source, tensor: Tensor) -> int:
    """Make elements equal along the batch or the heads; return that dimension plus 1, or 0."""
    dimension = source.choice([0, 2]) if tensor.dim() == 4 else 1
    if tensor.shape[dimension] < 2:
        return 0
    tensor.copy_(tensor.narrow(dimension, 0, 1).clone().expand(tensor.shape))
    return dimension + 1


def _spoil(source: Source, tensor: Tensor, flags: Tensor, alike: int | None, shift: int) -> None:
    """Overwrite flagged rows (B, rows, heads) or one element each; equal rows need all flags."""
    if alike is not None:
        dimension = alike + shift
        flags = flags.all(dimension, keepdim=True).expand(flags.shape)
    where = flags.unsqueeze(-1).expand(tensor.shape)
    if source.chance(0.3):
        where = where & (torch.arange(tensor.shape[-1]) == source.integer(0, tensor.shape[-1] - 1))
    tensor.masked_fill_(where, source.choice(VALUES))


def _unseen(call: Call, part: Sequence, bias: Tensor) -> Tensor:
    """Return bool (B|1, heads of bias, 1, K|1): the keys that no query sees, for any bias."""
    seen = visible_pairs(call, part).any(2, keepdim=True)
    if bias.shape[0] == 1:
        seen = seen.any(0, keepdim=True)
    if bias.shape[1] == 1:
        seen = seen.any(1, keepdim=True)
    elif bias.shape[1] < seen.shape[1]:
        seen = seen.unflatten(1, (bias.shape[1], -1)).any(2)
    return ~(seen.any(3, keepdim=True) if bias.shape[3] == 1 else seen)
