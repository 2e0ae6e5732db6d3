# SPDX-License-Identifier: BSD-3-Clause
"""The records of calls. Each argument is declared once, here.

The name, type and position of a field determine the operators' schema and argument order, which
fields autograd saves as tensors, which have gradients, and what the core receives. The core lists
the same names in the same order (cpp/core/record.h).
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

# A tensor that attention computes a gradient for.
Differentiable: TypeAlias = Annotated[Tensor, "differentiable"]
# Gradients by field name.
Gradients: TypeAlias = dict[str, Tensor]


class AttentionInputs(NamedTuple):
    """One attention call: its tensors, then its settings.

    Dense: query ``(B, Q, H, D)``, key and value ``(B, K, Hk, D)``, mask and bias 4-D, start and end
    3-D. The sink is ``(H,)``. The packs also take a bias ``(B, {H|Hk|1}, K)``.
    Packed (varlen), if the cu_seqlens are set: query ``(total_q, H, D)``, key and value
    ``(total_k, Hk, D)`` or paged ``(pages, page, Hk, D)``, mask and bias 3-D, start and end 2-D.
    """

    query: Differentiable
    key: Differentiable
    value: Differentiable
    mask: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None
    bias: Differentiable | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    # A plan of the backend for the same mask and sizes; None: forward makes one.
    given_plan: Tensor | None = None
    sink: Differentiable | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    scale: float = 1.0
    causal: bool = False
    softcap: float = 0.0
    deterministic: bool = False
    # IntervalMask.max_kept of start and end; 0: unknown.
    max_kept: int = 0
    # Number of keys to select by the bias, causally and within the mask; -1: no selection. The plan
    # then holds start and end. See KeyCounts.
    window: int = -1
    keep_last: int = 0
    keep_first: int = 0
    # The keys that start and end keep for a query are consecutive, with few exceptions.
    keeps_runs: bool = False

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.cu_seqlens_q is not None

    @property
    def sequences(self) -> int:
        """B. numel() also works for cu_seqlens of a wrong rank."""
        bounds = self.cu_seqlens_q
        return self.query.shape[0] if bounds is None else bounds.numel() - 1


class KeyListInputs(NamedTuple):
    """One attention call that lists the keys of each query.

    Query, key, value, a per-key bias, and the sink are those of `AttentionInputs`. Dense: indices
    ``(B, {Hk|1}, Q, k)``, index_bias ``(B, {H|Hk|1}, Q, k)``; packed, without B.
    """

    query: Differentiable
    key: Differentiable
    value: Differentiable
    indices: Tensor
    bias: Differentiable | None = None
    index_bias: Differentiable | None = None
    sink: Differentiable | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    scale: float = 1.0
    causal: bool = False
    softcap: float = 0.0
    deterministic: bool = False

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.cu_seqlens_q is not None

    @property
    def sequences(self) -> int:
        """B."""
        return self.without_lists().sequences

    def without_lists(self) -> AttentionInputs:
        """Return the same call without lists, over all keys."""
        shared = set(AttentionInputs._fields).intersection(self._fields)
        return AttentionInputs(**{name: getattr(self, name) for name in shared})


class SelectionInputs(NamedTuple):
    """One selection; bias and mask 4-D, packed 3-D."""

    bias: Tensor
    mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    batch: int
    heads: int
    kv_heads: int
    queries: int  # packed: the most of any sequence
    keys: int
    window: int
    causal: bool
    keep_last: int = 0
    keep_first: int = 0

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed."""
        return self.cu_seqlens_q is not None


class KeyCounts(NamedTuple):
    """How many of its visible keys each query keeps, by the field names of the records.

    Keys that a mask drops are not visible. A key whose bias is NaN or -inf counts among the last
    and the first keys, but is never kept.
    """

    window: int = (
        -1
    )  # keys with the largest bias, among those that are neither the last nor the first
    keep_last: int = 0
    keep_first: int = 0

    @property
    def total(self) -> int:
        """The most keys that a query keeps."""
        return self.window + self.keep_last + self.keep_first

    @property
    def keeps_first_or_last(self) -> bool:
        """Whether some keys are kept for their position."""
        return self.keep_last != 0 or self.keep_first != 0


class Packing(NamedTuple):
    """How the sequences of a call are packed, by the field names of `AttentionInputs`."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether the call is not packed."""
        return self.cu_seqlens_q is None

    @property
    def sequences(self) -> int:
        """B of packed sequences."""
        assert self.cu_seqlens_q is not None
        return self.cu_seqlens_q.shape[0] - 1


DENSE = Packing()


class Schema(NamedTuple):
    """Facts derived from the declaration of a record."""

    text: str  # schema of the operators' arguments
    tensor_count: int  # the first fields are tensors, the rest settings
    differentiable: tuple[str, ...]
    positions: tuple[int, ...]  # positions of the differentiable fields


_SETTINGS = {int: "SymInt", float: "float", bool: "bool"}


def _schema(record: type[Any]) -> Schema:
    texts, differentiable, positions, tensors = [], [], [], 0
    hints = typing.get_type_hints(record, include_extras=True)
    for position, name in enumerate(record._fields):
        hint, mark = hints[name], ""
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint, mark = typing.get_args(hint)[0], "?"
        if typing.get_origin(hint) is Annotated:
            differentiable.append(name)
            positions.append(position)
            hint = typing.get_args(hint)[0]
        if hint is Tensor:
            assert tensors == position, f"{name} is a tensor after a setting"
            tensors += 1
        kind = "Tensor" if hint is Tensor else _SETTINGS[hint]
        texts.append(f"{kind}{mark} {name}")
    return Schema(", ".join(texts), tensors, tuple(differentiable), tuple(positions))


ATTENTION = _schema(AttentionInputs)
KEY_LISTS = _schema(KeyListInputs)
SELECTION = _schema(SelectionInputs)


Record = TypeVar("Record", AttentionInputs, KeyListInputs)


def without_values(inputs: Record) -> Record:
    """Return a call for code that reads no values, with key in place of value."""
    return inputs._replace(value=inputs.key)


def without_gradients(inputs: Record) -> Record:
    """Return a record whose tensors require no gradients."""
    fields: dict[str, Any] = inputs._asdict()
    for name, value in fields.items():
        if isinstance(value, Tensor):
            fields[name] = value.detach()
    return inputs._replace(**fields)


def differentiable_tensors(inputs: AttentionInputs) -> dict[str, Tensor | None]:
    """Return the tensors of a call that may have gradients, by name."""
    return {name: getattr(inputs, name) for name in ATTENTION.differentiable}


def no_gradient(inputs: AttentionInputs | KeyListInputs, name: str) -> Tensor:
    """Return an empty tensor in place of an unwanted gradient."""
    like: Tensor | None = getattr(inputs, name)
    query = inputs.query
    return query.new_empty(0, dtype=query.dtype if like is None else like.dtype)


class MaskBlocks:
    """A mask with a row for each query, as blocks of consecutive queries and keys.

    Kernel packs plan it without a Q x K tensor. The last blocks may be cut off by Q and K.

    Attributes:
        numbers: int32 ``(B|1, H|Hk|1, blocks of queries, blocks of keys)``: -1 keeps no pair of the
            block, 0 all, n > 0 those of ``contents[n - 1]``.
        contents: bool ``(n, queries of a block, keys of a block)``, contiguous.
        shape: of the mask, ``(B|1, H|Hk|1, Q, K)``.
        kept, partial: upper bounds of how many numbers are at least 0, and above 0.
        field: the mask of `AttentionInputs` in calls with the plan: int32, of which only the shape
            is read.
    """

    def __init__(
        self, numbers: Tensor, contents: Tensor, queries: int, keys: int, kept: int, partial: int
    ) -> None:
        """Store the blocks."""
        self.numbers, self.contents = numbers, contents
        self.kept, self.partial = kept, partial
        self.shape = (*numbers.shape[:2], queries, keys)
        self.field = numbers[:1, :1, :1, :1].expand(self.shape)

    def to_bool(self) -> Tensor:
        """Return the mask, bool ``(B|1, H|Hk|1, Q, K)``, without waiting for a GPU."""
        *_, queries, keys = self.shape
        # Autograd cannot save inference tensors.
        with torch.inference_mode(False):
            kept = (self.numbers == 0)[..., None, None]
            if self.contents.shape[0]:
                places = (self.numbers - 1).clamp(min=0)
                partial = (self.numbers > 0)[..., None, None]
                kept = torch.where(partial, self.contents[places], kept)
            else:
                kept = kept.repeat(1, 1, 1, 1, *self.contents.shape[1:])
            kept = kept.transpose(3, 4).flatten(4, 5).flatten(2, 3)
            return kept[:, :, :queries, :keys]
