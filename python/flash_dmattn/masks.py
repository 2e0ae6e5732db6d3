# SPDX-License-Identifier: BSD-3-Clause
"""Masks as two integers per key instead of a boolean per query and key."""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import checks
from .mask_checks import check_integers, checked_length, checked_side, last_bound
from .wrong_keywords import hide_unknown_keywords, refuse_keywords, with_keyword_hints


def intervals_to_bool(start: Tensor, end: Tensor, query_length: int) -> Tensor:
    """Return bool ``(..., query_length, K)``: ``start <= i < end`` for each row i and key."""
    row = torch.arange(query_length, device=start.device, dtype=start.dtype).unsqueeze(-1)
    return (start.unsqueeze(-2) <= row) & (row < end.unsqueeze(-2))


@with_keyword_hints
class IntervalMask:
    """A mask that keeps each key for one contiguous range of queries: O(K) memory.

    The queries ``start_j <= i < end_j`` keep key j; if ``end_j <= start_j`` no query keeps it. This
    expresses key padding, documents, sliding windows, prefix-LM and causal top-w selection exactly.

    Attributes:
        start: int32 ``({B|1}, {H|Hk|1}, K)``; varlen ``({H|Hk|1}, total_k)``, with rows numbered
            within the key's sequence.
        end: as ``start``, and of the same shape, one past the last row.
        query_length: the Q of the mask. Attention over another Q refuses the mask. None is not
            checked.
        max_kept: any n consecutive queries keep at most ``max_kept + n - 1`` keys together, as
            after a causal selection of ``max_kept`` keys; None is unknown. It sizes the plan, and
            so the memory of attention. If it is too small, results are correct but slower.
    """

    start: Tensor
    end: Tensor
    query_length: int | None
    max_kept: int | None
    # Each query keeps consecutive keys, with few exceptions: kernels then compute runs of keys.
    # Results do not depend on this hint, unless some key's rows begin beyond the last query.
    _keeps_runs: bool = False

    def __init__(
        self,
        start: Tensor,
        end: Tensor,
        *,
        query_length: int | None = None,
        max_kept: int | None = None,
    ) -> None:
        """Make a mask of two int32 tensors.

        Raises:
            TypeError: start or end is not a tensor, or not int32; query_length or max_kept is not
                an integer.
            ValueError: the number of dimensions is not 2 or 3, shapes or devices differ,
                query_length is negative, or max_kept is below 1.
        """
        for name, tensor in (("start", start), ("end", end)):
            checks.tensor(name, tensor)
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must have dtype torch.int32, got {tensor.dtype}")
            if tensor.dim() not in (2, 3):
                raise ValueError(
                    f"{name} must have shape ({{B|1}}, {{H|Hk|1}}, K), or ({{H|Hk|1}}, total_k) "
                    f"for varlen, got {tuple(tensor.shape)}"
                )
        if start.shape != end.shape:
            raise ValueError(
                f"start and end must have the same shape, got {tuple(start.shape)} and "
                f"{tuple(end.shape)}"
            )
        if start.device != end.device:
            raise ValueError(
                f"start and end must be on one device, got {start.device} and {end.device}"
            )
        self.start = start
        self.end = end
        self.query_length = (
            None if query_length is None else checked_length("query_length", query_length)
        )
        self.max_kept = None if max_kept is None else checks.index("max_kept", max_kept, 1)

    def __repr__(self) -> str:
        """Show the shape and the device, but no values, which would need a transfer."""
        return (
            f"IntervalMask(shape={tuple(self.start.shape)}, query_length={self.query_length}, "
            f"device={str(self.start.device)!r})"
        )

    def __and__(self, other: IntervalMask) -> IntervalMask:
        """Return the mask that keeps the keys of both; batch and head dimensions of 1 broadcast.

        Raises:
            TypeError: the other is not an IntervalMask.
            ValueError: the shapes do not fit, or the devices or the query lengths differ.
        """
        if not isinstance(other, IntervalMask):
            _refuse_to_combine(other)
        _check_combinable(self, other)
        both = IntervalMask(
            torch.maximum(self.start, other.start),
            torch.minimum(self.end, other.end),
            query_length=other.query_length if self.query_length is None else self.query_length,
            max_kept=_least(self.max_kept, other.max_kept),
        )
        both._keeps_runs = self._keeps_runs and other._keeps_runs
        return both

    def __rand__(self, other: object) -> NoReturn:
        """Refuse any operand that is not an IntervalMask.

        Raises:
            TypeError: always.
        """
        _refuse_to_combine(other)

    def __or__(self, other: object) -> NoReturn:
        """Refuse a union, which may keep a key for two intervals of queries.

        Raises:
            TypeError: always.
        """
        _refuse_without_intervals("|", "a.to_bool(query_length) | b.to_bool(query_length)")

    __ror__ = __or__

    def __invert__(self) -> NoReturn:
        """Refuse a complement, which may keep a key for two intervals of queries.

        Raises:
            TypeError: always.
        """
        _refuse_without_intervals("~", "~mask.to_bool(query_length)")

    @property
    def device(self) -> torch.device:
        """The device of both tensors."""
        return self.start.device

    def to(self, device: torch.device | str) -> IntervalMask:
        """Return this mask on a device.

        Raises:
            TypeError: device is neither a torch.device nor a name.
            ValueError: no device has this name.
            RuntimeError: torch cannot use such a device here.
        """
        if device is None:
            checks.refuse_type("device", "a torch.device or its name", device)
        checks.device("device", device)
        moved = IntervalMask(
            self.start.to(device),
            self.end.to(device),
            query_length=self.query_length,
            max_kept=self.max_kept,
        )
        moved._keeps_runs = self._keeps_runs
        return moved

    def to_bool(self, query_length: int) -> Tensor:
        """Return the same mask as bool ``({B|1}, {H|Hk|1}, query_length, K)``: O(Q x K) memory.

        Raises:
            ValueError: the mask is varlen, so its boolean form depends on the cu_seqlens; or
                query_length differs from the mask's.
        """
        query_length = checked_length("query_length", query_length)
        if self.start.dim() == 2:
            raise ValueError(
                f"to_bool cannot convert a varlen IntervalMask of shape {tuple(self.start.shape)}, "
                "whose rows are counted in each sequence; take the keys of one sequence, "
                "IntervalMask(start[None, :, begin:end], end[None, :, begin:end]), and its number "
                "of queries"
            )
        self.check_query_length(query_length, "query_length")
        return intervals_to_bool(self.start, self.end, query_length)

    def check_query_length(self, query_length: int, argument: str) -> None:
        """Raise ValueError, naming the argument, unless the mask serves this number of queries."""
        if self.query_length is not None and self.query_length != query_length:
            raise ValueError(
                f"{argument}: an IntervalMask made for query_length={self.query_length} cannot "
                f"mask {query_length} queries; make one with query_length={query_length}"
            )

    @classmethod
    @hide_unknown_keywords
    def from_key_padding(
        cls,
        mask: Tensor,
        query_length: int,
        **unknown: NoReturn,
    ) -> IntervalMask:
        """Keep the keys that are True in ``mask``, bool ``(B, K)``, for every query.

        Raises:
            TypeError: mask is not a bool tensor.
            ValueError: mask is not 2-D, or query_length is negative.
        """
        if unknown:
            refuse_keywords(IntervalMask.from_key_padding, unknown)
        if checks.tensor("mask", mask, "a boolean torch.Tensor").dtype != torch.bool:
            raise TypeError(f"mask must be a tensor of dtype torch.bool, got {mask.dtype}")
        if mask.dim() != 2:
            raise ValueError(f"mask must have shape (B, K), got {tuple(mask.shape)}")
        query_length = checked_length("query_length", query_length)
        end = (mask * query_length).to(torch.int32).unsqueeze(1)
        return cls(torch.zeros_like(end), end, query_length=query_length)

    @classmethod
    @hide_unknown_keywords
    def sliding_window(
        cls,
        left: int | None,
        right: int | None,
        query_length: int,
        key_length: int,
        *,
        device: torch.device | str | None = None,
        **unknown: NoReturn,
    ) -> IntervalMask:
        """Keep the keys near the position of each query.

        The query at position ``p = i + K - Q`` keeps the keys ``p - left <= j <= p + right``. None
        means no limit on that side. Positions are aligned bottom right, as in causal attention.
        Without a device the mask is made on torch's default device.

        Raises:
            TypeError: a length or a side is not an integer.
            ValueError: a length or a side is negative, or too large for int32; or no device has
                this name.
        """
        if unknown:
            refuse_keywords(IntervalMask.sliding_window, unknown)
        left, right = checked_side("left", left), checked_side("right", right)
        query_length = checked_length("query_length", query_length)
        key_length = checked_length("key_length", key_length)
        device = checks.device("device", device)
        # The row at the position of key j.
        row = torch.arange(key_length, device=device) - (key_length - query_length)
        start = torch.zeros_like(row) if right is None else row - right
        end = torch.full_like(row, query_length) if left is None else row + left + 1
        return cls(
            *(_clamped(bound, query_length)[None, None] for bound in (start, end)),
            query_length=query_length,
            max_kept=None if left is None or right is None else left + right + 1,
        )

    @classmethod
    @hide_unknown_keywords
    def documents(
        cls,
        document_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        length: int | None = None,
        **unknown: NoReturn,
    ) -> IntervalMask:
        """Keep the keys of the query's own document.

        This is for self-attention over packed documents: Q = K = N.

        Args:
            document_ids: integers ``(B, N)``. A document is a run of equal ids. An id that occurs
                again later is another document.
            cu_seqlens: instead of ids, integers ``(documents + 1,)``: the begin of each document,
                and the end of the last. No query keeps keys outside every document.
            length: N, with ``cu_seqlens``; by default its last value, which is read from the
                device.

        Raises:
            TypeError: an argument is not an integer tensor, or length is not an integer.
            ValueError: not exactly one of both is given, its number of dimensions is wrong, or
                cu_seqlens has no last value that can be read.
        """
        if unknown:
            refuse_keywords(IntervalMask.documents, unknown)
        if (document_ids is None) == (cu_seqlens is None):
            raise ValueError("give exactly one of document_ids and cu_seqlens")
        if document_ids is not None:
            if length is not None:
                raise ValueError(
                    f"length must be None with document_ids, which tell it, got "
                    f"{checks.described(length)}"
                )
            check_integers("document_ids", document_ids, 2, "(B, N)")
            return cls._of_runs(document_ids)
        assert cu_seqlens is not None
        check_integers("cu_seqlens", cu_seqlens, 1, "(documents + 1,)")
        length = last_bound(cu_seqlens) if length is None else checked_length("length", length)
        bounds = cu_seqlens.to(torch.int64)
        following = torch.searchsorted(
            bounds, torch.arange(length, device=bounds.device), right=True
        )
        inside = (following > 0) & (following < bounds.numel())
        start = bounds[(following - 1).clamp(min=0)]
        end = bounds[following.clamp(max=bounds.numel() - 1)]
        return cls(
            *((bound * inside).to(torch.int32)[None, None] for bound in (start, end)),
            query_length=length,
        )

    @classmethod
    def _of_runs(cls, document_ids: Tensor) -> IntervalMask:
        length = document_ids.shape[1]
        position = torch.arange(length, device=document_ids.device).expand_as(document_ids)
        if length == 0:
            empty = position.to(torch.int32).unsqueeze(1)
            return cls(empty, empty, query_length=0)
        change = document_ids[:, 1:] != document_ids[:, :-1]
        edge = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
        first, last = torch.cat([edge, change], 1), torch.cat([change, edge], 1)
        start = torch.where(first, position, 0).cummax(1).values
        end = torch.where(last, position + 1, length).flip(1).cummin(1).values.flip(1)
        return cls(
            *(bound.to(torch.int32).unsqueeze(1) for bound in (start, end)), query_length=length
        )

    @classmethod
    @hide_unknown_keywords
    def prefix_lm(
        cls,
        prefix_lengths: Tensor,
        query_length: int,
        key_length: int,
        **unknown: NoReturn,
    ) -> IntervalMask:
        """Keep the prefix for every query and the rest causally; to be used without ``is_causal``.

        Args:
            prefix_lengths: integers ``(B,)``, number of first keys that every query sees.
            query_length: Q.
            key_length: K. The causal limit is ``j <= i + K - Q``.

        Raises:
            TypeError: prefix_lengths is not an integer tensor.
            ValueError: prefix_lengths is not 1-D, or a length is negative.
        """
        if unknown:
            refuse_keywords(IntervalMask.prefix_lm, unknown)
        check_integers("prefix_lengths", prefix_lengths, 1, "(B,)")
        query_length = checked_length("query_length", query_length)
        key_length = checked_length("key_length", key_length)
        key = torch.arange(key_length, device=prefix_lengths.device)
        row = _clamped(key - (key_length - query_length), query_length)
        start = torch.where(key < prefix_lengths.unsqueeze(1), 0, row).to(torch.int32).unsqueeze(1)
        return cls(start, torch.full_like(start, query_length), query_length=query_length)

    @classmethod
    @hide_unknown_keywords
    def delayed_eviction(
        cls,
        keep: Tensor,
        delay: int,
        **unknown: NoReturn,
    ) -> IntervalMask:
        """Keep some keys for every later query, and the others for ``delay`` queries.

        This is for causal self-attention, Q = K = N, of models that decide per token whether to
        evict it (DMS, arXiv:2506.05345). The queries ``i >= j`` keep key j if ``keep[..., j]``;
        otherwise the queries ``j <= i < j + delay`` keep it.

            >>> keep = torch.tensor([[[True, False, False, True]]])
            >>> kept = IntervalMask.delayed_eviction(keep, 2).to_bool(4)
            >>> i, j = torch.arange(4)[:, None], torch.arange(4)
            >>> torch.equal(kept, (j <= i) & (keep[:, :, None] | (i < j + 2)))
            True

        Args:
            keep: bool ``({B|1}, {H|Hk|1}, N)``.
            delay: number of queries that see an evicted key, its own query included.

        Raises:
            TypeError: keep is not a bool tensor, or delay is not an integer.
            ValueError: keep is not 3-D, or delay is negative.
        """
        if unknown:
            refuse_keywords(IntervalMask.delayed_eviction, unknown)
        if checks.tensor("keep", keep, "a boolean torch.Tensor").dtype != torch.bool:
            raise TypeError(f"keep must be a tensor of dtype torch.bool, got {keep.dtype}")
        if keep.dim() != 3:
            raise ValueError(f"keep must have shape (B, H, N), got {tuple(keep.shape)}")
        delay, length = checked_length("delay", delay), keep.shape[2]
        key = torch.arange(length, device=keep.device)
        end = torch.where(keep, length, (key + delay).clamp(max=length)).to(torch.int32)
        return cls(key.to(torch.int32).expand_as(end).contiguous(), end, query_length=length)

    @classmethod
    @hide_unknown_keywords
    def tree(
        cls,
        parents: Tensor,
        *,
        prefix_length: int = 0,
        **unknown: NoReturn,
    ) -> tuple[IntervalMask, Tensor]:
        """Let each node of a tree see its ancestors and itself, as drafts of a decoder do.

        In depth-first order the descendants of a node directly follow it, so the nodes that see it
        form an interval. Query and key must be in this order, which is also returned.

            >>> parents = torch.tensor([[-1, 0, 0, 1]])
            >>> mask, order = IntervalMask.tree(parents)
            >>> order
            tensor([[0, 1, 3, 2]])
            >>> mask.to_bool(4)[0, 0].int()  # nodes 0, 1, 3 and 2
            tensor([[1, 0, 0, 0],
                    [1, 1, 0, 0],
                    [1, 1, 1, 0],
                    [1, 0, 0, 1]], dtype=torch.int32)

        Args:
            parents: integers ``(B, N)``, the parent of each node, or -1 for a root. Values are
                checked on CPUs only. On other devices invalid values give a meaningless mask.
            prefix_length: number of keys before those of the nodes. All nodes see them.

        Returns:
            The mask of N queries and ``prefix_length + N`` keys, and int64 ``(B, N)``: the node at
            each position. Siblings, and roots, keep their order.

        Raises:
            TypeError: parents is not an integer tensor, or prefix_length is not an integer.
            ValueError: parents is not 2-D, a parent is not a node, or a node is its own ancestor;
                or prefix_length is negative.
        """
        if unknown:
            refuse_keywords(IntervalMask.tree, unknown)
        from .mask_trees import depth_first  # seldom needed

        prefix_length = checked_length("prefix_length", prefix_length)
        order, end = depth_first(parents)
        length = order.shape[1]
        place = torch.arange(length, device=end.device).expand_as(end)
        bounds = (
            torch.nn.functional.pad(bound, (prefix_length, 0), value=value)
            for bound, value in ((place, 0), (end, length))
        )
        mask = cls(*(b.to(torch.int32).unsqueeze(1) for b in bounds), query_length=length)
        return mask, order


def _clamped(bound: Tensor, query_length: int) -> Tensor:
    return bound.clamp(0, query_length).to(torch.int32)


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _check_combinable(one: IntervalMask, other: IntervalMask) -> None:
    shapes = tuple(one.start.shape), tuple(other.start.shape)
    fits = len(shapes[0]) == len(shapes[1]) and shapes[0][-1] == shapes[1][-1]
    if not fits or any(
        a != b and a != 1 and b != 1 for a, b in zip(shapes[0][:-1], shapes[1][:-1], strict=True)
    ):
        raise ValueError(
            "& of IntervalMasks needs shapes that differ in batch and head dimensions of 1 only, "
            f"got {shapes[0]} and {shapes[1]}"
        )
    if one.device != other.device:
        raise ValueError(
            f"& of IntervalMasks needs them on one device, got {one.device} and {other.device}"
        )
    lengths = one.query_length, other.query_length
    if None not in lengths and lengths[0] != lengths[1]:
        raise ValueError(
            "& of IntervalMasks needs masks made for one query_length, got "
            f"{lengths[0]} and {lengths[1]}"
        )


def _refuse_to_combine(other: object) -> NoReturn:
    hint = ""
    if isinstance(other, Tensor):
        hint = "; to_bool(query_length) makes a boolean tensor, which goes with it"
    raise TypeError(
        f"& of an IntervalMask needs another IntervalMask, got {checks.described(other)}{hint}"
    )


def _refuse_without_intervals(operator: str, instead: str) -> NoReturn:
    raise TypeError(
        f"{operator} of an IntervalMask cannot be an IntervalMask: a key may be kept by two "
        f"intervals of queries; {instead} is a boolean mask"
    )


def mark_runs(mask: IntervalMask) -> IntervalMask:
    """Mark a mask as one that keeps runs of keys, for the kernels, and return it."""
    mask._keeps_runs = True
    return mask


# A list, because torch.export.load converts tuples to lists.
_Settings: TypeAlias = list[int | None]


def _flatten(mask: IntervalMask) -> tuple[list[Any], _Settings]:
    return [mask.start, mask.end], [mask.query_length, mask.max_kept, mask._keeps_runs]


def _flatten_with_keys(
    mask: IntervalMask,
) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Settings]:
    children, settings = _flatten(mask)
    keys = (pytree.GetAttrKey(name) for name in ("start", "end"))
    return list(zip(keys, children, strict=True)), settings


def _unflatten(children: Any, settings: _Settings) -> IntervalMask:
    # Bypass the constructor: it checks tensors, but tree maps pass other objects.
    mask = object.__new__(IntervalMask)
    mask.start, mask.end = children
    mask.query_length, mask.max_kept, *hint = settings
    mask._keeps_runs = any(hint)  # programs exported by versions without the hint lack it
    return mask


# Lets torch.export, FSDP and DataParallel-like tree maps see the tensors.
pytree.register_pytree_node(
    IntervalMask,
    _flatten,
    _unflatten,
    serialized_type_name="flash_dmattn.IntervalMask",
    flatten_with_keys_fn=_flatten_with_keys,
)
# torch.export.load reads inputs by torch.load(weights_only=True), which needs this.
torch.serialization.add_safe_globals([IntervalMask])
