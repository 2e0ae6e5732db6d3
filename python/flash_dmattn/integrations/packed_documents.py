# SPDX-License-Identifier: BSD-3-Clause
"""Documents packed into one row of a batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_dmattn.masks import IntervalMask
from flash_dmattn.plan import is_changed, mark_of
from flash_dmattn.selection import dynamic_mask

__all__ = [
    "Documents",
    "bounds_of_sequences",
    "documents_of_positions",
    "packed_keep",
    "select_within_documents",
    "sliding_within_sequences",
]


class Documents(NamedTuple):
    """The document of each token, in self-attention (Q = K = N)."""

    ids: Tensor  # integers (B|1, N), from 0, incremented where a document begins

    def intervals(self) -> IntervalMask:
        """Return the mask that keeps the keys of each query's own document."""
        return IntervalMask.documents(self.ids)


# The layers of a model pass the same tensors, so results that need a device read are kept.
_last_documents, _last_bounds = threading.local(), threading.local()
_Answer = TypeVar("_Answer")


def _reuse_last(memory: threading.local, find: Callable[..., _Answer], *tensors: Tensor) -> _Answer:
    """Return ``find(*tensors)``; the result of the last call is reused for the same tensors."""
    known = getattr(memory, "known", None)
    if known is not None:
        same = [
            ref() is tensor and not is_changed(tensor, mark)
            for (ref, mark), tensor in zip(known[0], tensors, strict=True)
        ]
        if all(same):
            remembered: _Answer = known[1]
            return remembered
    answer = find(*tensors)
    memory.known = [(weakref.ref(tensor), mark_of(tensor)) for tensor in tensors], answer
    return answer


def documents_of_positions(position_ids: Tensor) -> Documents | None:
    """Return the documents of positions ``(B|1, N)``, or None if each row is one document.

    A document begins where a position does not follow its predecessor, as in transformers. Under
    torch.compile values cannot be read, so single documents are described, too.
    """
    if torch.compiler.is_compiling():
        return Documents(_document_ids(position_ids))
    return _reuse_last(_last_documents, _documents_if_several, position_ids)


def _documents_if_several(position_ids: Tensor) -> Documents | None:
    ids = _document_ids(position_ids)
    return Documents(ids) if ids[:, -1].any() else None


def bounds_of_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, compare: bool
) -> tuple[Tensor, Tensor]:
    """Return the bounds of packed queries and keys as int32, as one tensor if they are equal.

    Calls do not read bounds on the host, but compare the two tensors' identity: with shared bounds
    the backward pass is faster. Trainers move both to a device separately, which makes two tensors.

    Args:
        cu_seqlens_q, cu_seqlens_k: integers ``(B + 1,)``.
        compare: whether to merge tensors of equal values, which synchronizes with a GPU. Ignored
            where values cannot be read: under torch.compile or in a graph capture.
    """
    if cu_seqlens_q is cu_seqlens_k:
        both = cu_seqlens_q.to(torch.int32)
        return both, both
    is_unreadable = (
        torch.compiler.is_compiling()
        or not type(cu_seqlens_q) is type(cu_seqlens_k) is Tensor
        or (cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing())
    )
    if not compare or is_unreadable:
        return cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
    return _reuse_last(_last_bounds, _compared, cu_seqlens_q, cu_seqlens_k)


def _compared(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    bounds_q, bounds_k = cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
    is_same = bounds_q.device == bounds_k.device and torch.equal(bounds_q, bounds_k)
    return bounds_q, bounds_q if is_same else bounds_k


def _document_ids(position_ids: Tensor) -> Tensor:
    begins = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return torch.nn.functional.pad(begins.to(torch.int32).cumsum(1, dtype=torch.int32), (1, 0))


def select_within_documents(
    bias: Tensor, window_size: int, documents: Documents, *, is_causal: bool
) -> IntervalMask:
    """Keep the ``window_size`` keys of its own document with the largest bias that a query sees.

    Args:
        bias: ``({B|1}, {H|Hk|1}, 1, N)``.
        window_size: number of keys to keep.
        documents: of the tokens.
        is_causal: whether a query sees no later keys.

    Returns:
        A mask ``({B|1}, {H|Hk|1}, N)``, which includes causality.
    """
    scores = bias.detach()[:, :, 0].to(torch.float32)
    is_usable = scores > -torch.inf  # False for NaN
    rank = _ranks(torch.where(is_usable, scores, -torch.inf), documents.ids)
    document_mask = documents.intervals()
    if not is_causal:
        # A document's ranks fill the same range as its keys, so its end bounds both.
        end = torch.where(
            (document_mask.end - rank <= window_size) & is_usable, document_mask.end, 0
        ).to(torch.int32)
        return IntervalMask(
            document_mask.start.expand_as(end), end, query_length=document_mask.query_length
        )
    # Of all keys up to the query, those of its document rank first. If the document is too short to
    # fill the window, the window also takes keys of earlier documents; `& own` drops these. Ranks
    # are below 2^24, so float32 distinguishes them.
    ranked = torch.where(is_usable, rank.to(torch.float32), -torch.inf)
    selected = dynamic_mask(ranked.unsqueeze(2), window_size, is_causal=True)
    assert isinstance(selected, IntervalMask)
    return selected & document_mask


def _ranks(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the rank of each key by document, then score, then descending index.

    int64 ``(b, h, N)``: a window keeps the keys of the highest ranks first.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes both zeros equal
    # Integers in the order of the floats.
    comparable = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    comparable = comparable + (ids.to(torch.int64) << 32).unsqueeze(1)
    keys = comparable.shape[-1]
    order = keys - 1 - torch.sort(comparable.flip(-1), stable=True).indices
    position = torch.arange(keys, device=ids.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, position)


def packed_keep(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    batch: int,
    queries: int,
    keys: int,
    *,
    is_causal: bool,
    sliding_window: int | None = None,
) -> Tensor:
    """Return bool ``(batch, 1, queries, keys)``: whether a packed query sees a key.

    For problems whose mask or bias already has a row for each query. The rows of the batch are
    concatenated. Tokens beyond the last sequence see no key. A sliding window keeps the nearest
    keys, this many on each visible side.

    Raises:
        ValueError: a sequence spans several rows, which no mask of this shape can express.
    """
    device = cu_seqlens_q.device
    if batch > 1:
        ends = torch.arange(1, batch, device=device)
        pairs = torch.stack([cu_seqlens_q, cu_seqlens_k], 1)
        row_ends = torch.stack([ends * queries, ends * keys], 1)
        if not (pairs[:, None] == row_ends[None]).all(2).any(0).all():
            raise ValueError(
                "attention_mask and attention_bias must not have a row for each query, and "
                "window_size and sliding_window cannot be combined, where a sequence of "
                f"cu_seq_lens is in several of the {batch} rows of the batch; lay the sequences "
                "into one row"
            )
    row, column = (
        torch.arange(batch * queries, device=device),
        torch.arange(batch * keys, device=device),
    )
    of_query = torch.bucketize(row, cu_seqlens_q[1:], right=True)
    of_key = torch.bucketize(column, cu_seqlens_k[1:], right=True)
    # Numbered from the end of each sequence: causality is aligned bottom right.
    last = cu_seqlens_q.shape[0] - 1
    row = row - cu_seqlens_q[(of_query + 1).clamp(max=last)]
    column = column - cu_seqlens_k[(of_key + 1).clamp(max=last)]
    seen = of_query.view(batch, queries, 1) == of_key.view(batch, 1, keys)
    seen = seen & (of_query < last).view(batch, queries, 1)  # False beyond all sequences
    distance = row.view(batch, queries, 1) - column.view(batch, 1, keys)
    if is_causal:
        seen = seen & (distance >= 0)
    if sliding_window is not None:
        seen = seen & (distance < sliding_window) & (distance > -sliding_window)
    return seen[:, None]


def sliding_within_sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    size: int,
    kept: Tensor | None,
    keys: int,
    *,
    is_causal: bool,
) -> IntervalMask:
    """Return the sliding window of each packed sequence.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 ``(B + 1,)``.
        size: number of nearest keys on each visible side.
        kept: bool ``(h, 1, keys)``, or None for all.
        keys: number of all keys.
        is_causal: whether a query sees no later keys.
    """
    column = torch.arange(keys, device=cu_seqlens_k.device)
    sequence = torch.bucketize(column, cu_seqlens_k[1:], right=True)
    sequence = sequence.clamp(max=max(0, cu_seqlens_k.shape[0] - 2))
    # The query at the place of the key: causality is aligned bottom right.
    queries = cu_seqlens_q.diff().long()[sequence]
    row = column - cu_seqlens_k[1:][sequence] + queries
    start = (row if is_causal else row - size + 1).clamp(min=0)
    end = (row + size).clamp(min=0).minimum(queries)
    start, end = (bound.to(torch.int32).unsqueeze(0) for bound in (start, end))
    if kept is not None:
        end = torch.where(kept[:, 0], end, 0)
    max_kept = size if is_causal else 2 * size - 1
    return IntervalMask(start.expand_as(end), end, max_kept=max_kept)
