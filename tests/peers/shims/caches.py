# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention's call with a key cache; new keys are rotated and written first."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import NoCounterpartError
from .attention import Options, dense, packed, places


@dataclasses.dataclass(frozen=True)
class Rotary:
    """A rotary embedding of positions. cos and sin are (positions, rotary_dim / 2)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __call__(self, x: Tensor, first: Tensor | int = 0) -> Tensor:
        """Rotate (batch, tokens, heads, head_dim); the first tokens are at the position `first`."""
        batch, tokens = x.shape[:2]
        first = torch.as_tensor(first, device=x.device).long().reshape(-1).expand(batch)
        positions = first[:, None] + torch.arange(tokens, device=x.device)
        positions = positions.clamp(max=self.cos.shape[0] - 1)
        cos, sin = (table[positions].float()[:, :, None] for table in (self.cos, self.sin))
        rotary_dim = 2 * self.cos.shape[-1]
        turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
        return torch.cat((turned.to(x.dtype), rest), -1)

    def at_one_place(self, x: Tensor, first: Tensor) -> Tensor:
        """Rotate all tokens of a sequence like its first one."""
        batch, tokens, heads, head_dim = x.shape
        return self(x.reshape(batch, 1, tokens * heads, head_dim), first).reshape(x.shape)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Tensor | int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Replace flash_attn.layers.rotary."""
    return Rotary(cos, sin, interleaved)(x, seqlen_offsets)


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens, dense or in pages.

    Args:
        k: (batch, keys, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim).
        v: likewise.
        lengths: (batch,), how many keys there are before the call.
        rows: (batch,), where each sequence is in k and v, unless there are pages.
        block_table: (batch, pages of a sequence), or None.
        in_order: rows are those of k and v as they are.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    rows: Tensor
    block_table: Tensor | None
    in_order: bool = True

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | int | None,
        batch_index: Tensor | None,
        block_table: Tensor | None,
        batch: int,
    ) -> Cache:
        """Fill in omitted arguments."""
        device = k.device
        if batch_index is None:
            rows = torch.arange(batch, device=device)
        else:
            rows = batch_index.long()
            block_table = None if block_table is None else block_table[rows]
        if lengths is None:
            lengths = k.shape[1] * (1 if block_table is None else block_table.shape[1])
        if isinstance(lengths, int):
            lengths = torch.full((batch,), lengths, device=device)
        return cls(k, v, lengths.long(), rows, block_table, batch_index is None)

    def write(self, sequence: Tensor, place: Tensor, k: Tensor, v: Tensor) -> None:
        """Write packed keys and values; place counts from the start of each one's sequence."""
        if self.block_table is None:
            self.k[self.rows[sequence], place] = k
            self.v[self.rows[sequence], place] = v
            return
        size = self.k.shape[1]
        if int(place.max()) >= self.block_table.shape[1] * size:
            raise NoCounterpartError("keys appended beyond the block_table of a paged cache")
        page = self.block_table.long()[sequence, place // size]
        self.k[page, place % size] = k
        self.v[page, place % size] = v


def attend_cache(
    q: Tensor,
    cache: Cache,
    options: Options,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    starts_new: Tensor | None = None,
    rotary: Rotary | None = None,
    rotary_first: Tensor | None = None,
    left_pad: Tensor | None = None,
    starts_q: Tensor | None = None,
    most_q: int | None = None,
    as_pages: bool = False,
) -> tuple[Tensor, Tensor]:
    """Append new keys, if any, to a cache, and return out and lse over all keys.

    Args:
        q: (batch, queries, heads, head_dim), or packed.
        cache: that k and v are written to.
        options: of the call.
        k: new keys, (batch, tokens, kv_heads, head_dim) or packed.
        v: likewise.
        starts_new: (batch + 1,), where each sequence's new keys start, if these are packed.
        rotary: what rotates queries and new keys.
        rotary_first: (batch,), the position of the first; the cache's lengths unless given.
        left_pad: (batch,), how many keys of the cache are skipped.
        starts_q: (batch + 1,), where each sequence's queries start, if these are packed.
        most_q: of one sequence, if these are packed.
        as_pages: read also a cache without pages as one page for each sequence.
    """
    first = cache.lengths if rotary_first is None else rotary_first.long()
    lengths = cache.lengths
    if k is not None:
        assert v is not None
        lengths = lengths + _append(cache, k, v, starts_new, rotary, first)
    if rotary is not None:
        padded = q if starts_q is None else _unpack(q, starts_q)
        turn = rotary if options.causal or options.window != (None, None) else rotary.at_one_place
        turned = turn(padded, first)
        q = turned if starts_q is None else _pack(turned, starts_q)
    table = cache.block_table
    if table is None and starts_q is None and not as_pages:
        keys, values = (x if cache.in_order else x[cache.rows] for x in (cache.k, cache.v))
        return dense(q, keys, values, options, used_k=lengths, left_pad=left_pad)
    if table is None:
        table = cache.rows.to(torch.int32)[:, None]
    batch = table.shape[0]
    starts_k = pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    if starts_q is not None:
        assert most_q is not None
        flat, starts, most = q, starts_q, most_q
    else:
        most = q.shape[1]
        flat = q.flatten(0, 1)
        starts = torch.arange(0, (batch + 1) * most, most, dtype=torch.int32, device=q.device)
    out, lse = packed(
        flat,
        cache.k,
        cache.v,
        starts,
        starts_k,
        most,
        int(lengths.max()),
        options,
        left_pad=left_pad,
        block_table=table.contiguous(),
    )
    return (out if starts_q is not None else out.unflatten(0, (batch, most))), lse


def _append(
    cache: Cache,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    rotary: Rotary | None,
    first: Tensor,
) -> Tensor:
    """Write the new keys, and return their number for each sequence."""
    if starts is None:
        batch, tokens = k.shape[:2]
        starts = torch.arange(batch + 1, device=k.device) * tokens
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    if rotary is not None:
        k = _pack(rotary(_unpack(k, starts), first), starts)
    sequence, i = places(starts)
    cache.write(sequence, cache.lengths[sequence] + i, k, v)
    return starts.long().diff()


def _unpack(x: Tensor, starts: Tensor) -> Tensor:
    sequence, place = places(starts)
    lengths = starts.long().diff()
    padded = x.new_zeros(lengths.numel(), int(lengths.max()), *x.shape[1:])
    padded[sequence, place] = x[: sequence.numel()]
    return padded


def _pack(padded: Tensor, starts: Tensor) -> Tensor:
    return padded[places(starts)]
