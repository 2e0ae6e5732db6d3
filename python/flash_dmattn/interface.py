# SPDX-License-Identifier: BSD-3-Clause
"""The public functions, drop-in replacements for those of flash-dmattn 1."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from . import ops
from .arguments import (
    MaskParts,
    autocast,
    backend_name,
    check_dtypes,
    check_packed_ranks,
    check_tensors,
    is_block_mask,
    mask_parts,
    refuse_paged_gradients,
    refuse_paged_mass,
    refuse_ranks,
    resolved_deterministic,
    scale_of,
    to_4d,
    without_expansion,
)
from .backends import available_backends, check_backend_name, require_available
from .checks import MAX_ROWS, flag, index, number
from .masks import IntervalMask
from .plan import AttentionPlan, checked_mask, plan_of_blocks
from .record import DENSE, AttentionInputs, KeyCounts, MaskBlocks, Packing
from .reference import attention_probabilities
from .selection import (
    call_shape,
    check_causal,
    composable_mask,
    is_one_row,
    is_per_key,
    keeps_all,
    key_counts,
    refuse_without_window,
    select,
    selectable_bias,
    without_nan,
    zero_bias,
)
from .wrong_keywords import hide_unknown_keywords, refuse_keywords

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "get_available_backends",
]

Output = Tensor | tuple[Tensor, ...]


@hide_unknown_keywords
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | IntervalMask | BlockMask | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    *,
    window_size: int | None = None,
    keep_last: int = 0,
    keep_first: int = 0,
    plan: AttentionPlan | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_key_mass: bool = False,
    backend: str | None = None,
    key_indices: Tensor | None = None,
    index_bias: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> Output:
    """Compute attention over the keys that a mask keeps, at a cost that follows the kept keys.

    A row that keeps no key gives output 0, lse -inf and zero gradients. The contents of a key that
    no query keeps, NaN included, do not affect any result. Expanded and sliced masks and biases
    are used without a copy.

    Args:
        query: ``(B, Q, H, D)``, D from 1 to 256; float16 or bfloat16, on CPUs also float32. Any Q,
            K >= 0.
        key, value: ``(B, K, Hk, D)`` of query's dtype; H is a multiple of Hk. The head dimension
            of value may be another one, Dv. Except for some calls on Hopper, and for the reference,
            kernels then compute with copies that are padded with zeros to the larger of both.
        attn_mask: bool ``({B|1}, {H|Hk|1}, {Q|1}, {K|1})``, True keeps; the same for every query:
            ``(B, {H|Hk|1}, K)`` or ``(B, K)``; or an `IntervalMask`; or a BlockMask of
            FlexAttention, which each call converts to one of these, or on GPUs to a plan in memory
            of its blocks (`make_plan` converts it once).
        attn_bias: added to the scaled scores; shapes as ``attn_mask``, query's dtype or float32.
            -inf means "not kept". A bias that is the same for every query may be float64 and of
            any magnitude, for the backends cpu, cuda and reference: it is not rounded to float32.
            lse is then float64.
        softmax_scale: multiplies the scores; ``D ** -0.5`` by default.
        is_causal: query i sees keys ``j <= i + K - Q`` (aligned bottom right); False by default.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)`` before the bias is
            added. 0 by default.
        deterministic: equal inputs give equal bits. The default follows FLASH_DMATTN_DETERMINISTIC
            and torch.use_deterministic_algorithms.
        return_attn_probs: also return the probabilities, by plain PyTorch: O(Q x K) memory.
        window_size: keep the ``window_size`` keys with the largest bias (`dynamic_mask`) among
            those that ``attn_mask``, a boolean mask or None, keeps. Keys whose bias is NaN are
            never kept, whatever the number of keys. Without a window NaN propagates.
        keep_last, keep_first: with ``window_size`` and causality, also keep this many of the last
            and of the first keys that a query sees, and select among the others. ``window_size=0``
            then needs no bias; without them it keeps no key.
        plan: of `make_plan`, for a mask that serves several calls. It replaces ``attn_mask`` and
            ``is_causal``.
        sink: ``(H,)``, query's dtype or float32: one more score in the sum that a row's softmax
            divides by. It has no key and no value.
        return_lse: also return the log-sum-exp of each row's scores, without the sink.
        return_key_mass: also return, last, the attention that each key received: its probabilities,
            summed over the query rows. Their sum is the number of rows, less the sinks' share.
        backend: None or "auto" follows the device; or a name of `get_available_backends`.
        key_indices: int32 ``(B, {Hk|1}, Q, k)``, the keys that each query attends to. Entries out
            of range, such as -1, or beyond the causal limit are ignored. A key that is listed
            twice counts twice. ``attn_bias`` must then be the same for every query, without a mask,
            window or plan.
        index_bias: ``(B, {H|Hk|1}, Q, k)``, of 16 bits or float32: added to the scores of the keys
            that ``key_indices`` lists. -inf means "not kept".
        block_indices: int32 ``(B, {H|Hk|1}, blocks of queries, k)``, the key blocks that each
            block of consecutive queries attends to. Entries out of range are ignored. A block that
            is listed twice counts once. There must be no mask, window, plan or list of keys.
        block_size: ``(queries of a block, keys of a block)`` of ``block_indices``; the last blocks
            may be shorter. Blocks of one query, with a bias that is the same for every query, are
            converted to ``key_indices``, O(Q x keys listed) integers. Of others GPU packs make a
            plan in memory of the listed blocks, or else they are converted to a boolean mask.

    Returns:
        ``out`` ``(B, Q, H, Dv)`` of query's dtype; ``(out, lse)`` with return_lse; ``(out, lse,
        probabilities)`` with return_attn_probs. lse is float32 ``(B, H, Q)``, natural logarithm;
        probabilities are ``(B, H, Q, K)`` in query's dtype. All are differentiable with respect to
        query, key, value, attn_bias, index_bias and sink. With return_key_mass the mass is the last
        result: float32 ``(B, H, K)``, without a gradient.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, a device or a number does not fit; the text names the argument and the
            allowed values.
        NotImplementedError: the kernel pack was not built for this valid problem.
        RuntimeError: the backend cannot run here; or double backward, forward-mode
            differentiation or torch.vmap, all of which ``backend="reference"`` supports.
    """
    if unknown:
        refuse_keywords(flash_dmattn_func, unknown)
    if block_indices is not None or block_size is not None:
        key_indices, attn_mask, plan = _convert_blocks(
            DENSE,
            query,
            key,
            block_indices,
            block_size,
            attn_bias,
            return_attn_probs,
            is_causal,
            backend,
            attn_mask=attn_mask,
            window_size=window_size,
            keep_last=index("keep_last", keep_last, 0) or None,
            keep_first=index("keep_first", keep_first, 0) or None,
            plan=plan,
            key_indices=key_indices,
            index_bias=index_bias,
        )
    if key_indices is not None or index_bias is not None:
        return _attend_listed(
            DENSE,
            query,
            key,
            value,
            key_indices,
            index_bias,
            attn_bias=attn_bias,
            softmax_scale=softmax_scale,
            is_causal=is_causal,
            softcap=softcap,
            deterministic=deterministic,
            sink=sink,
            return_lse=return_lse,
            return_key_mass=return_key_mass,
            backend=backend,
            attn_mask=attn_mask,
            window_size=window_size,
            keep_last=index("keep_last", keep_last, 0) or None,
            keep_first=index("keep_first", keep_first, 0) or None,
            plan=plan,
            return_attn_probs=return_attn_probs,
        )
    needs_probabilities = return_attn_probs is not None and return_attn_probs is not False
    needs_general_path = needs_probabilities or return_key_mass is not False
    if plan is None and backend is None and not needs_general_path:
        tensors = query, key, value, attn_bias, sink
        found = ops.usual_attention(
            tensors,
            attn_mask,
            softmax_scale,
            is_causal,
            softcap,
            (window_size, keep_last, keep_first),
            deterministic,
            return_lse=return_lse,
        )
        if found is not None:
            out, lse = found
            return out if lse is None else (out, lse)
    mask: Any = attn_mask
    if is_block_mask(mask):
        mask, plan = convert_block_mask(
            mask,
            query,
            key,
            plan,
            attn_bias,
            return_attn_probs,
            is_causal,
            backend,
            selects=window_size is not None,
        )
    check_tensors(query, key=key, value=value, attn_mask=mask, attn_bias=attn_bias, sink=sink)
    # Positional arguments cost half as much as keyword arguments.
    return _attention(
        DENSE,
        query,
        key,
        value,
        mask,
        attn_bias,
        softmax_scale,
        is_causal,
        softcap,
        deterministic,
        return_attn_probs,
        window_size,
        keep_last,
        keep_first,
        plan,
        sink,
        return_lse,
        return_key_mass,
        backend,
    )


@hide_unknown_keywords
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    block_table: Tensor | None = None,
    *,
    attn_mask: Tensor | IntervalMask | None = None,
    attn_bias: Tensor | None = None,
    window_size: int | None = None,
    keep_last: int = 0,
    keep_first: int = 0,
    plan: AttentionPlan | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_key_mass: bool = False,
    backend: str | None = None,
    key_indices: Tensor | None = None,
    index_bias: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_size: tuple[int, int] | None = None,
    **unknown: NoReturn,
) -> Output:
    """Compute `flash_dmattn_func` for each sequence of a packed batch.

    Args:
        query: ``(total_q, H, D)``, the sequences' rows one after another.
        key, value: ``(total_k, Hk, D)``; or pages ``(pages, page, Hk, D)`` with ``block_table``.
            The head dimension of value may be another one, Dv. With pages, the pages that
            ``block_table`` lists, as far as ``max_seqlen_k`` reaches, are then copied.
        cu_seqlens_q, cu_seqlens_k: int32 ``(B + 1,)``: 0, then where each sequence ends.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        softmax_scale, is_causal, softcap, deterministic: as in `flash_dmattn_func`.
        window_size, keep_last, keep_first, plan, sink, return_lse, backend: as in
            `flash_dmattn_func`, for each sequence separately.
        return_key_mass: as in `flash_dmattn_func`; not with ``block_table``.
        return_attn_probs: also return the probabilities.
        block_table: int32 ``(B, pages of a sequence)``, the page numbers of each sequence. Forward
            only.
        attn_mask: bool per key ``({H|Hk|1}, 1, total_k)`` or, with total_q > 1, per query
            ``({H|Hk|1}, total_q, max_seqlen_k)``; or an `IntervalMask` of shape ``({H|Hk|1},
            total_k)``, whose rows are numbered within each sequence.
        attn_bias: shapes as a boolean ``attn_mask``, query's dtype or float32; per key also
            float64, as in `flash_dmattn_func`.
        key_indices, index_bias: as in `flash_dmattn_func`, int32 ``({Hk|1}, total_q, k)`` and
            ``({H|Hk|1}, total_q, k)``; keys are numbered within the query's sequence.
        block_indices, block_size: as in `flash_dmattn_func`, int32 ``({H|Hk|1}, total_q, k)``, of
            one query each; blocks are numbered within the query's sequence.

    Returns:
        As `flash_dmattn_func`, with ``out`` ``(total_q, H, Dv)``, lse ``(H, total_q)``, the mass
        ``(H, total_k)``, and probabilities ``(B, H, max_seqlen_q, max_seqlen_k)``, zero outside
        each sequence.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    if unknown:
        refuse_keywords(flash_dmattn_varlen_func, unknown)
    check_tensors(
        query,
        key=key,
        value=value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        attn_mask=attn_mask,
        attn_bias=attn_bias,
        sink=sink,
    )
    for argument, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is None:
            raise TypeError(f"{argument} must be an int32 tensor of shape (B + 1,), got None")
    if block_table is not None:
        refuse_paged_gradients(query, key, value, attn_bias, sink)
    packing = Packing(
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        index("max_seqlen_q", max_seqlen_q, 0, MAX_ROWS),
        index("max_seqlen_k", max_seqlen_k, 0, MAX_ROWS),
    )
    if block_indices is not None or block_size is not None:
        key_indices, attn_mask, _ = _convert_blocks(
            packing,
            query,
            key,
            block_indices,
            block_size,
            attn_bias,
            return_attn_probs,
            is_causal,
            backend,
            attn_mask=attn_mask,
            window_size=window_size,
            keep_last=index("keep_last", keep_last, 0) or None,
            keep_first=index("keep_first", keep_first, 0) or None,
            plan=plan,
            key_indices=key_indices,
            index_bias=index_bias,
        )
    if key_indices is not None or index_bias is not None:
        return _attend_listed(
            packing,
            query,
            key,
            value,
            key_indices,
            index_bias,
            attn_bias=attn_bias,
            softmax_scale=softmax_scale,
            is_causal=is_causal,
            softcap=softcap,
            deterministic=deterministic,
            sink=sink,
            return_lse=return_lse,
            return_key_mass=return_key_mass,
            backend=backend,
            attn_mask=attn_mask,
            window_size=window_size,
            keep_last=index("keep_last", keep_last, 0) or None,
            keep_first=index("keep_first", keep_first, 0) or None,
            plan=plan,
            return_attn_probs=return_attn_probs,
        )
    return _attention(
        packing,
        query,
        key,
        value,
        attn_mask,
        attn_bias,
        softmax_scale,
        is_causal,
        softcap,
        deterministic,
        return_attn_probs,
        window_size,
        keep_last,
        keep_first,
        plan,
        sink,
        return_lse,
        return_key_mass,
        backend,
    )


def convert_block_mask(
    block_mask: Any,
    query: Tensor,
    key: Tensor,
    plan: AttentionPlan | None,
    bias: Tensor | None,
    return_attn_probs: bool | None,
    is_causal: bool | None,
    backend: str | None,
    *,
    selects: bool,
) -> tuple[Any, AttentionPlan | None]:
    """Return the mask and the plan that replace a BlockMask and the plan of a dense call."""
    from .block_masks import plain_mask  # imported here: other calls do not need it

    check_tensors(query, key=key, attn_bias=bias)
    as_blocks = (
        plan is None
        and not selects
        and _may_plan_blocks(query, key, bias, return_attn_probs, backend)
    )
    mask = plain_mask(block_mask, query, key, plan, as_tensor=selects, as_blocks=as_blocks)
    if isinstance(mask, MaskBlocks):
        return None, plan_of_blocks(mask, query, key, is_causal, backend)
    return mask, plan


def _may_plan_blocks(
    query: Any, key: Any, bias: Any, return_attn_probs: bool | None, backend: str | None
) -> bool:
    """Say whether a dense call reads a mask of blocks only by its plan, which the backend makes."""
    return not _reads_pairs(bias, return_attn_probs) and ops.plans_blocks(
        query, key, backend_name(backend)
    )


def _reads_pairs(bias: Tensor | None, return_attn_probs: bool | None, rank: int = 4) -> bool:
    """Say whether a call reads the elements of its mask, even with a plan or key lists.

    Args:
        bias, return_attn_probs: of the call.
        rank: of a bias with a row for each query, 3 in packed calls.
    """
    has_rows = bias is not None and bias.dim() == rank and bias.shape[-2] != 1
    return has_rows or flag("return_attn_probs", return_attn_probs)


def _convert_blocks(
    packing: Packing,
    query: Tensor,
    key: Tensor,
    block_indices: Tensor | None,
    block_size: tuple[int, int] | None,
    attn_bias: Tensor | None,
    return_attn_probs: bool | None,
    is_causal: bool | None,
    backend: str | None,
    **excluded: Any,
) -> tuple[Tensor | None, Tensor | None, AttentionPlan | None]:
    """Return the listed blocks as ``key_indices``, as ``attn_mask`` or as a plan."""
    from .blocks import lists_or_mask  # imported here: other calls do not need it

    check_tensors(query, key=key, attn_bias=attn_bias)
    key_indices, mask = lists_or_mask(
        packing,
        query,
        key,
        block_indices,
        block_size,
        by_mask=_reads_pairs(attn_bias, return_attn_probs, 4 if packing.is_dense else 3),
        as_blocks=packing.is_dense
        and _may_plan_blocks(query, key, attn_bias, return_attn_probs, backend),
        **excluded,
    )
    if isinstance(mask, MaskBlocks):
        return None, None, plan_of_blocks(mask, query, key, is_causal, backend)
    return key_indices, mask, None


def _attend_listed(*arguments: Any, **settings: Any) -> Output:
    """Compute a call that lists the keys of each query."""
    from .key_lists import listed_attention  # imported here: other calls do not need it

    return listed_attention(*arguments, **settings)


def get_available_backends() -> list[str]:
    """Return the names of the backends that can run here, in order of preference."""
    return available_backends()


def flash_dmattn_func_auto(backend: str | None = None, **kwargs: Any) -> Callable[..., Output]:
    """Return `flash_dmattn_func` with other defaults: this backend, and the arguments given here.

    Args:
        backend: None follows the device of the tensors; or a name of `get_available_backends`.
        **kwargs: new defaults of arguments of `flash_dmattn_func` that have one.

    Raises:
        ValueError: no backend has this name.
        RuntimeError: the backend cannot run here.
        TypeError: `flash_dmattn_func` does not have the argument, or it has no default.
    """
    if backend_name(backend) != "auto":
        assert backend is not None
        check_backend_name(backend)
        require_available(backend)
    parameters = inspect.signature(flash_dmattn_func).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    unknown = [name for name in kwargs if name not in defaults]
    if unknown:
        raise TypeError(
            f"flash_dmattn_func_auto() cannot bind {', '.join(unknown)}; arguments with a default "
            f"are {', '.join(defaults)}"
        )
    defaults.update(kwargs, backend=backend)
    # The same code object with other defaults keeps the signature and adds no cost per call.
    bound = types.FunctionType(
        flash_dmattn_func.__code__, flash_dmattn_func.__globals__, flash_dmattn_func.__name__
    )
    positional = flash_dmattn_func.__code__.co_varnames[: flash_dmattn_func.__code__.co_argcount]
    bound.__defaults__ = tuple(defaults[name] for name in positional if name in defaults)
    bound.__kwdefaults__ = {name: defaults[name] for name in defaults if name not in positional}
    bound.__doc__ = flash_dmattn_func.__doc__
    bound.__annotations__ = dict(flash_dmattn_func.__annotations__)
    bound.__module__ = flash_dmattn_func.__module__
    return hide_unknown_keywords(bound)


def _attention(
    packing: Packing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | IntervalMask | None,
    attn_bias: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool | None,
    softcap: float | None,
    deterministic: bool | None,
    return_attn_probs: bool | None,
    window_size: int | None,
    keep_last: int,
    keep_first: int,
    plan: AttentionPlan | None,
    sink: Tensor | None,
    return_lse: bool,
    return_key_mass: bool,
    backend: str | None,
) -> Output:
    """Compute a dense or a packed call whose tensors are on one device."""
    name = backend_name(backend)
    query, key, value, bias, sink = autocast(query, key, value, attn_bias, sink)
    check_dtypes(query, key, value, name)
    cu_seqlens_q, cu_seqlens_k, block_table, max_seqlen_q, max_seqlen_k = packing
    is_dense = cu_seqlens_q is None
    if is_dense:
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            refuse_ranks(query=query, key=key, value=value)
    else:
        check_packed_ranks(query, key, paged=block_table is not None)
    mask: Tensor | IntervalMask | MaskBlocks | None = attn_mask
    if plan is not None:
        plan_arguments = (attn_mask, is_causal, window_size, backend)
        mask = checked_mask(plan, query, key, *plan_arguments, packing)
        is_causal, name = plan.is_causal, plan.backend
    if is_dense:
        bias = _to_4d("attn_bias", bias, query, key)
        if isinstance(mask, MaskBlocks):
            if _reads_pairs(bias, return_attn_probs):
                plan, mask = None, ops.booleans(mask)
        elif isinstance(mask, IntervalMask):
            mask.check_query_length(query.shape[1], "attn_mask")
        else:
            mask = _to_4d("attn_mask", mask, query, key)
    causal, inner_counts = flag("is_causal", is_causal), KeyCounts()
    return_probabilities = flag("return_attn_probs", return_attn_probs)
    return_key_mass = flag("return_key_mass", return_key_mass)
    if return_key_mass and block_table is not None:
        refuse_paged_mass()
    if window_size is None:
        hint = "; window_size=0 keeps the nearest keys alone" if plan is None else ""
        refuse_without_window(keep_last, keep_first, hint=hint)
        parts = mask_parts(mask)
    else:
        counts = key_counts(window_size, keep_last, keep_first)
        check_causal(counts, causal, query.shape[1] if is_dense else max_seqlen_q)
        bias = selectable_bias(bias, counts, query.shape[0] if is_dense else None)
        assert not isinstance(mask, MaskBlocks)  # only plans have them, and no window
        parts = MaskParts(composable_mask(mask))
        if keeps_all(counts, key.shape[1] if is_dense else max_seqlen_k):
            bias = None if bias is None else without_nan(bias)
        else:
            is_causal_selection = causal and not (is_dense and is_one_row(query.shape[1]))
            # Steps that run apart from the output, probabilities and mass, need a mask.
            is_only_output = not (return_probabilities or return_key_mass)
            if is_causal_selection and is_only_output and is_per_key(bias, parts.mask, is_dense):
                inner_counts = counts
            else:
                shape = call_shape(query, key, packing)
                ranking = zero_bias(key, packing) if bias is None else bias
                parts = select(
                    ranking, parts.mask, packing, shape, counts, is_causal_selection, name
                )
    # Of packed tensors only the head dimension may be narrowed: the size of the next one
    # distinguishes per-key from per-query masks.
    expandable = 4 if is_dense else 1
    inputs = AttentionInputs(
        query,
        key,
        value,
        # Of a mask of blocks the backend reads only the shape.
        parts.mask if isinstance(mask, MaskBlocks) else without_expansion(parts.mask, expandable),
        parts.start,
        parts.end,
        without_expansion(bias, expandable),
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        None if plan is None else plan._columns,
        sink,
        max_seqlen_q,
        max_seqlen_k,
        scale_of(softmax_scale, query),
        causal,
        0.0 if softcap is None else number("softcap", softcap),
        resolved_deterministic(deterministic),
        parts.max_kept,
        *inner_counts,
        parts.keeps_runs,
    )
    return_lse = flag("return_lse", return_lse) or return_probabilities
    need_lse = return_lse or return_key_mass
    if return_key_mass:
        inputs = ops.with_shared_plan(inputs, name)
    out, lse = ops.attention(inputs, name, _select_mask, need_lse=need_lse)
    if lse is None or not need_lse:
        return out
    results = [out]
    if return_lse:
        results.append(lse)
    if return_probabilities:
        results.append(attention_probabilities(inputs))
    if return_key_mass:
        results.append(ops.key_mass(inputs, name, lse))
    return tuple(results)


def _select_mask(inputs: AttentionInputs, backend: str) -> AttentionInputs:
    """Return a call with a mask in place of its window, for backends that select separately."""
    packing = Packing(*(getattr(inputs, name) for name in Packing._fields))
    shape = call_shape(inputs.query, inputs.key, packing)
    assert inputs.bias is not None
    counts = KeyCounts(*(getattr(inputs, name) for name in KeyCounts._fields))
    parts = select(inputs.bias, inputs.mask, packing, shape, counts, True, backend)
    return inputs._replace(**KeyCounts()._asdict(), **parts._asdict())


def _to_4d(name: str, tensor: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if tensor is None or tensor.dim() == 4:
        return tensor
    (batch, _, heads, _), (_, keys, kv_heads, _) = query.shape, key.shape
    return to_4d(name, tensor, batch=batch, heads=heads, kv_heads=kv_heads, keys=keys)
