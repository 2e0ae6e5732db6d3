# SPDX-License-Identifier: BSD-3-Clause
"""Plans: the kept columns that attention derives from a mask, stored for further calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import ops
from .arguments import (
    autocast,
    backend_name,
    check_dtypes,
    check_tensors,
    is_block_mask,
    mask_parts,
    to_4d,
    without_expansion,
    writable,
)
from .checks import MAX_ROWS, described, flag, index
from .masks import IntervalMask
from .record import DENSE, AttentionInputs, MaskBlocks, Packing
from .wrong_keywords import hide_unknown_keywords, refuse_keywords

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "AttentionPlan",
    "checked_mask",
    "is_changed",
    "make_plan",
    "mark_of",
    "plan_of_blocks",
]

_BOUNDS = Packing._fields[:2]
_OF_INTERVALS = ("start", "end", "query_length", "max_kept", "_keeps_runs")
_DENSE_SIZES = (
    "query.shape[0]",
    "query.shape[1]",
    "query.shape[2]",
    "key.shape[1]",
    "key.shape[2]",
)
_PACKED_SIZES = (
    "query.shape[0]",
    "query.shape[1]",
    "key.shape[-2]",
    "the number of keys that key and block_table hold",
    "max_seqlen_q",
    "max_seqlen_k",
)


class AttentionPlan:
    """A mask in the form that kernels read, made once by `make_plan` for any number of calls.

    It serves calls with the same mask, causality, device and sizes, whatever their values, biases,
    dtypes and head dimensions: for example the layers of a model, or decoding steps with an
    unchanged mask. Forward and backward read it and do not modify it.

    Attributes:
        attn_mask: the mask that the plan is made from, or None. Calls refuse the plan after an
            in-place change of the mask. Torch does not count changes of inference tensors: calls
            compare such a mask with a copy, which synchronizes with a GPU. If the plan is of a
            BlockMask that is no IntervalMask, it may have no booleans: reading makes them.
        is_causal: whether queries see no later keys.
        backend: the backend of the plan.
    """

    is_causal: bool
    backend: str
    block_mask: Any = None  # the BlockMask that attn_mask is converted from, if any

    def __init__(
        self,
        attn_mask: Tensor | IntervalMask | MaskBlocks | None,
        is_causal: bool,
        backend: str,
        columns: Tensor,
        sizes: tuple[int, ...],
        packing: Packing | None,
    ) -> None:
        """Store the results of `make_plan`, the only public way to make plans."""
        self._mask = attn_mask
        self._booleans: Tensor | None = None  # of a mask of blocks, once they have been read
        self.is_causal = is_causal
        self.backend = backend
        self._columns = columns
        self._sizes = sizes
        self._packing = DENSE if packing is None else packing
        self._was_changed: str | None = None
        # Compiled code cannot read a tensor's version counter.
        self._sources = () if torch.compiler.is_compiling() else self._sources_now()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy or pickle, and whether the plan has become invalid."""
        state = {**self.__dict__, "_was_changed": self._changed(), "_sources": ()}
        state["_booleans"] = None  # made again
        # The mask_mod of a BlockMask may be a function that cannot be pickled.
        state.pop("block_mask", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled state, and record its sources anew."""
        self.__dict__.update(state)
        with torch.inference_mode(False):
            self._columns = writable(self._columns)
        self._sources = self._sources_now()

    @property
    def attn_mask(self) -> Tensor | IntervalMask | None:
        """The mask that the plan is made from; see the class."""
        if not isinstance(self._mask, MaskBlocks):
            return self._mask
        if self._booleans is not None:
            return self._booleans
        booleans = ops.booleans(self._mask)
        if ops.may_outlive_call(booleans):
            self._booleans = booleans
            self._sources += (_Source(0, "_booleans", booleans, mark_of(booleans)),)
        return booleans

    @attn_mask.setter
    def attn_mask(self, mask: Tensor | IntervalMask | None) -> None:
        """Replace the mask, after which calls refuse the plan."""
        if mask is None or mask is not self._booleans:
            self._mask = mask

    @property
    def columns(self) -> Tensor:
        """A copy of the backend's form of the mask, uint8 ``(bytes,)``."""
        return self._columns.clone()

    def __repr__(self) -> str:
        """Show the sizes and settings of the plan."""
        names = _DENSE_SIZES if self._packing.is_dense else _PACKED_SIZES
        sizes = ", ".join(f"{n}={s}" for n, s in zip(names, self._sizes, strict=True))
        return (
            f"AttentionPlan({sizes}, is_causal={self.is_causal}, backend={self.backend!r}, "
            f"device={str(self._columns.device)!r}, bytes={self._columns.numel()})"
        )

    def _owners(self) -> tuple[object, object, object]:
        return self, self._mask, self._packing

    def _sources_now(self) -> tuple[_Source, ...]:
        is_interval = isinstance(self._mask, IntervalMask)
        sources = [(0, name) for name in ("is_causal", "backend")]
        sources += [(2, name) for name in _BOUNDS]
        sources += [(1, name) for name in _OF_INTERVALS] if is_interval else [(0, "_mask")]
        values = [getattr(self._owners()[owner], name) for owner, name in sources]
        return tuple(
            _Source(owner, name, value, mark_of(value))
            for (owner, name), value in zip(sources, values, strict=True)
        )

    def _changed(self) -> str | None:
        """Return which source has changed since the plan was made, and how; None if none has."""
        owners = self._owners()
        for owner, name, value, mark in self._sources:
            now = getattr(owners[owner], name, None)
            if now is not value and (isinstance(value, Tensor) or now != value):
                how = "replaced"
            elif isinstance(value, Tensor) and is_changed(value, mark):
                how = "changed in place"
            else:
                continue
            named = "attn_mask" if name in ("_mask", "_booleans") else name
            return f"{'attn_mask.' if owner == 1 else ''}{named} was {how}"
        return self._was_changed


class _Source(NamedTuple):
    """A value that a plan is made from."""

    owner: int  # index into `_owners`
    name: str
    value: Any
    mark: int | Tensor | None  # detects in-place changes of a tensor


def mark_of(value: Any) -> int | Tensor | None:
    """Return a tensor's version counter; for an inference tensor, which has none, a copy."""
    if not isinstance(value, Tensor):
        return None
    return value.clone() if value.is_inference() else value._version


def is_changed(value: Tensor, mark: int | Tensor | None) -> bool:
    """Say whether a tensor has been changed in place since `mark_of` was taken."""
    if not isinstance(mark, Tensor):
        return value._version != mark
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # graph capture does not allow the synchronizing comparison
    return not torch.equal(value, mark)


@hide_unknown_keywords
def make_plan(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | IntervalMask | BlockMask | None = None,
    is_causal: bool | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> AttentionPlan:
    """Convert a mask to a plan, which calls take as ``plan`` in place of ``attn_mask``.

    Without a plan every call makes its own. Only the sizes, the dtype and the device of query and
    key matter here.

    Args:
        query, key: as in the calls; with the cu_seqlens as in `flash_dmattn_varlen_func`.
        attn_mask: as in the calls; for example the result of `dynamic_mask`. The plan's
            ``attn_mask`` of a BlockMask is the converted mask, whose booleans, if any, are made
            when they are read.
        is_causal: query i sees keys ``j <= i + K - Q`` only. False by default.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, all or none.
        block_table: of paged keys.
        backend: as in `flash_dmattn_func`.

    Returns:
        An `AttentionPlan`, for ``plan`` of `flash_dmattn_func` or, with the cu_seqlens, of
        `flash_dmattn_varlen_func`. These refuse a plan that does not fit the call.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape or a device does not fit, or only some of the arguments of packed
            sequences are given.
        RuntimeError: the backend cannot run here.
    """
    if unknown:
        refuse_keywords(make_plan, unknown)
    plain: Any = attn_mask
    name = backend_name(backend)
    if is_block_mask(plain):
        from .block_masks import plain_mask

        check_tensors(query, key=key)
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
        is_dense = all(argument is None for argument in packed)
        as_blocks = is_dense and ops.plans_blocks(query, key, name)
        # Autograd cannot save inference tensors, so make the mask outside of inference mode.
        with torch.inference_mode(False):
            plain = plain_mask(plain, query, key, as_blocks=as_blocks)
    if isinstance(plain, MaskBlocks):
        plan = plan_of_blocks(plain, query, key, is_causal, backend)
        plan.block_mask = attn_mask
        return plan
    check_tensors(
        query,
        key=key,
        attn_mask=plain,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
    )
    causal = flag("is_causal", is_causal)
    query, key, _ = autocast(query.detach(), key.detach(), key.detach())
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    sizes = _sizes(query, key, packing)
    mask = plain
    if packing.is_dense:
        if isinstance(mask, IntervalMask):
            mask.check_query_length(query.shape[1], "attn_mask")
        elif mask is not None:
            batch, _, heads, keys, kv_heads = sizes
            mask = to_4d("attn_mask", mask, batch=batch, heads=heads, kv_heads=kv_heads, keys=keys)
    parts = mask_parts(mask)
    parts = parts._replace(mask=without_expansion(parts.mask, 4 if packing.is_dense else 1))
    # A plan depends on these fields only.
    inputs = AttentionInputs(query, key, key, causal=causal, **parts._asdict(), **packing._asdict())
    # Autograd cannot save inference tensors, so make the columns outside of inference mode.
    with torch.inference_mode(False):
        columns = ops.make_plan(inputs, name)
    plan = AttentionPlan(plain, causal, name, columns, sizes, packing)
    plan.block_mask = None if plain is attn_mask else attn_mask
    return plan


def plan_of_blocks(
    blocks: MaskBlocks, query: Tensor, key: Tensor, is_causal: bool | None, backend: str | None
) -> AttentionPlan:
    """Return `make_plan` of a mask of blocks, for arguments of a dense call that it checks.

    `ops.plans_blocks` says whether that is possible.
    """
    name, causal = backend_name(backend), flag("is_causal", is_causal)
    query, key, _ = autocast(query.detach(), key.detach(), key.detach())
    check_dtypes(query, key, key, name)
    inputs = AttentionInputs(query, key, key, causal=causal)
    with torch.inference_mode(False):
        columns = ops.make_block_plan(inputs, name, blocks)
    return AttentionPlan(blocks, causal, name, columns, _sizes(query, key, DENSE), None)


def checked_mask(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | IntervalMask | None,
    is_causal: bool | None,
    window_size: int | None,
    backend: str | None,
    packing: Packing = DENSE,
) -> Tensor | IntervalMask | MaskBlocks | None:
    """Return the plan's mask; raise unless the plan fits a call.

    Raises:
        TypeError: the plan is not an AttentionPlan.
        ValueError: it was made for another call; the text names the argument, its value and the
            required value.
    """
    if not isinstance(plan, AttentionPlan):
        raise TypeError(
            f"plan must be an AttentionPlan of make_plan or None, got {described(plan)}"
        )
    if packing.is_dense != plan._packing.is_dense:
        made, func = ("dense", "") if plan._packing.is_dense else ("packed", "varlen_")
        raise ValueError(f"plan was made for {made} tensors; pass it to flash_dmattn_{func}func")
    device = plan._columns.device
    if query.device != device:
        raise ValueError(
            f"query is on {query.device}, but plan was made on {device}; make another with "
            "make_plan"
        )
    is_same = (
        attn_mask is None or attn_mask is plan._booleans or _is_same_mask(attn_mask, plan._mask)
    )
    if not is_same:
        raise ValueError(
            "attn_mask must be None or the very mask that plan was made from, "
            f"{_described(plan._mask)}, got {_described(attn_mask)}"
        )
    if window_size is not None:
        raise ValueError(
            f"window_size must be None with a plan, got {described(window_size)}; the plan has the "
            "mask: select one with dynamic_mask and make another with make_plan"
        )
    if is_causal is not None and flag("is_causal", is_causal) != plan.is_causal:
        raise ValueError(f"is_causal is {is_causal}, but plan was made for {plan.is_causal}")
    if backend is not None and backend != plan.backend:
        raise ValueError(f"backend is {described(backend)}, but plan was made for {plan.backend!r}")
    sizes = _sizes(query, key, packing)
    if sizes != plan._sizes:
        names = _DENSE_SIZES if packing.is_dense else _PACKED_SIZES
        for name, size, made_for in zip(names, sizes, plan._sizes, strict=True):
            if size != made_for:
                raise ValueError(
                    f"{name} is {size}, but plan was made for {made_for}; make another with "
                    "make_plan"
                )
    if not packing.is_dense:
        _check_packing(packing, plan._packing)
    if not torch.compiler.is_compiling() and (changed := plan._changed()):
        raise ValueError(f"{changed} after plan was made from it; make another with make_plan")
    return plan._mask


def _check_packing(packing: Packing, made_for: Packing) -> None:
    for name in _BOUNDS:
        # Compare identity: values would have to be read from the device.
        if getattr(packing, name) is not getattr(made_for, name):
            raise ValueError(
                f"{name} must be the very tensor that plan was made with, got another of shape "
                f"{tuple(getattr(packing, name).shape)}"
            )
    if (packing.block_table is None) != (made_for.block_table is None):
        got = "None" if packing.block_table is None else "a tensor"
        raise ValueError(f"block_table is {got}, unlike in the make_plan of plan")


def _packing(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    block_table: Tensor | None,
) -> Packing:
    arguments = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    missing = [name for name, value in arguments.items() if value is None]
    if len(missing) == len(arguments) and block_table is None:
        return DENSE
    if cu_seqlens_q is None or cu_seqlens_k is None or missing:
        raise ValueError(
            f"{missing[0]} must be given too: packed sequences need {', '.join(arguments)}"
        )
    longest_q, longest_k = (
        index(n, arguments[n], 0, MAX_ROWS) for n in ("max_seqlen_q", "max_seqlen_k")
    )
    return Packing(cu_seqlens_q, cu_seqlens_k, block_table, longest_q, longest_k)


def _sizes(query: Tensor, key: Tensor, packing: Packing) -> tuple[int, ...]:
    rank = 4 if packing.is_dense else 3
    if query.dim() != rank or key.dim() != (rank if packing.is_dense else key.dim()):
        form = "(B, rows, heads, D)" if packing.is_dense else "(total, heads, D)"
        raise ValueError(
            f"query and key must have shape {form}, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if not packing.is_dense and key.dim() != (3 if packing.block_table is None else 4):
        form = "(total_k, Hk, D), or (pages, page, Hk, D) with block_table"
        raise ValueError(f"key must have shape {form}, got {tuple(key.shape)}")
    queries, keys = query.shape, key.shape
    if packing.is_dense:
        return (queries[0], queries[1], queries[2], keys[1], keys[2])
    table = packing.block_table
    held = keys[0] if table is None else table.shape[1] * keys[1]
    return (queries[0], queries[1], keys[-2], held, packing.max_seqlen_q, packing.max_seqlen_k)


def _is_same_mask(
    mask: Tensor | IntervalMask, other: Tensor | IntervalMask | MaskBlocks | None
) -> bool:
    if isinstance(mask, IntervalMask) and isinstance(other, IntervalMask):
        return mask.start is other.start and mask.end is other.end
    return mask is other


def _described(mask: Tensor | IntervalMask | MaskBlocks | None) -> str:
    if mask is None:
        return "None"
    if isinstance(mask, MaskBlocks):
        return f"a mask of blocks of shape {mask.shape}"
    if isinstance(mask, IntervalMask):
        return repr(mask)
    return f"a tensor of shape {tuple(mask.shape)}"
