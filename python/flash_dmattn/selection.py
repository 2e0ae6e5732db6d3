# SPDX-License-Identifier: BSD-3-Clause
"""Selection of the keys with the largest bias."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from . import checks, selection_ops
from .arguments import MaskParts, backend_name, check_together, mask_parts, to_4d, without_expansion
from .checks import MAX_ROWS, flag, index
from .masks import IntervalMask
from .record import DENSE, KeyCounts, Packing, SelectionInputs
from .wrong_keywords import hide_unknown_keywords, refuse_keywords

__all__ = [
    "CallShape",
    "call_shape",
    "check_causal",
    "composable_mask",
    "dynamic_mask",
    "is_one_row",
    "is_per_key",
    "keeps_all",
    "key_counts",
    "refuse_without_window",
    "resolve_max_seqlen",
    "select",
    "selectable_bias",
    "total_keys",
    "without_nan",
    "zero_bias",
]

# torch < 2.7 has no is_exporting: there all compiled code counts as exported.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


@hide_unknown_keywords
def dynamic_mask(
    attn_bias: Tensor,
    window_size: int,
    is_causal: bool = False,
    attention_mask: Tensor | None = None,
    *,
    keep_last: int = 0,
    keep_first: int = 0,
    query_length: int | None = None,
    key_length: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | IntervalMask:
    """Keep, for each query, the keys with the largest bias among those that it can see.

    Ties go to the lower key index, so exactly ``window_size`` keys are kept wherever that many can
    be seen. NaN and -inf biases are never kept. No gradient flows through the choice.

    For a learned selection, also keep the keys near each query: the last ``keep_last`` keys, and
    the ``window_size`` best of the others.

    The function of this name in 1.2.2, which ignores causality, is
    `flash_dmattn.utils.mask.dynamic_mask`.

    Args:
        attn_bias: ``({B|1}, {H|Hk|1}, {Q|1}, {K|1})``, or the same for every query: ``(B, {H|Hk|1},
            K)`` or ``(B, K)``; with the cu_seqlens ``({H|Hk|1}, 1, total_k)`` or ``({H|Hk|1},
            total_q, max_seqlen_k)``. float32, float16 or bfloat16; float64 with
            ``backend="reference"``.
        window_size: number of keys to keep, at least 0.
        is_causal: query i sees keys ``j <= i + K - Q`` only.
        keep_last: also keep the last ``keep_last`` keys that a query sees, whatever their bias. It
            needs ``is_causal``, unless there is one query. Keys that ``attention_mask`` drops do
            not count. Keys with a bias of NaN or -inf count, but are not kept.
        keep_first: also keep the first ``keep_first`` keys, by the same rules.
        attention_mask: bool, True where a key can be seen; shapes as ``attn_bias``, broadcast
            against it.
        query_length: Q, needed for a causal selection from a per-key bias; by default K.
        key_length: K, needed if the last dimension of bias and mask is 1. Such a bias is the same
            for all K keys.
        num_heads, num_kv_heads: H and Hk; needed only if both head counts appear but cannot be
            distinguished.
        cu_seqlens_q, cu_seqlens_k: int32 ``(B + 1,)``, for packed sequences, with max_seqlen_q and
            max_seqlen_k.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequence; by default read from the
            device.
        backend: as in `flash_dmattn_func`.

    Returns:
        For a causal selection from a bias and mask that are the same for every query, an
        `IntervalMask`. Otherwise a bool tensor: ``({B|1}, {H|Hk|1}, 1, K)``, the same top keys for
        all queries, or with a row for each query if the bias or the mask has one.

    Raises:
        TypeError: a tensor has the wrong type or dtype.
        ValueError: a shape does not fit, a number of keys is negative, K is unknown, keep_last or
            keep_first is given without causality for several queries; or query_length or key_length
            with the cu_seqlens, or max_seqlen_q or max_seqlen_k without.
    """
    if unknown:
        refuse_keywords(dynamic_mask, unknown)
    others = {
        "attention_mask": attention_mask,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
    }
    check_together("attn_bias", checks.tensor("attn_bias", attn_bias), others)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise TypeError(
            "attention_mask must have dtype torch.bool (True: can be seen), got "
            f"{attention_mask.dtype}"
        )
    packing = DENSE
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        _refuse_lengths("with the cu_seqlens", query_length=query_length, key_length=key_length)
        packing = _packing(Packing(cu_seqlens_q, cu_seqlens_k), max_seqlen_q, max_seqlen_k)
        bias, mask = attn_bias, attention_mask
        _check_packed_form(bias, mask, "attention_mask")
        batch, queries, keys = packing.sequences, *packing[3:]
    else:
        _refuse_lengths(
            "without the cu_seqlens", max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
        )
        bias, mask, batch, queries, keys = _dense_tensors(
            attn_bias, attention_mask, query_length, key_length
        )
    heads = _head_counts(bias, mask, num_heads, num_kv_heads)
    shape = CallShape(batch, *heads, queries, keys)
    if mask is not None:
        _check_mask(mask, bias, shape)
    causal, name = flag("is_causal", is_causal), backend_name(backend)
    counts = key_counts(window_size, keep_last, keep_first)
    check_causal(counts, causal, queries)
    keep, start, end, max_kept, _ = select(bias, mask, packing, shape, counts, causal, name)
    if start is None or end is None:
        assert keep is not None
        return keep
    query_length = shape.queries if packing.is_dense else None
    return IntervalMask(start, end, query_length=query_length, max_kept=max_kept)


class CallShape(NamedTuple):
    """The sizes of the call that a selection serves."""

    batch: int
    heads: int
    kv_heads: int
    queries: int  # packed: the most of any sequence
    keys: int


def call_shape(query: Tensor, key: Tensor, packing: Packing) -> CallShape:
    """Return the sizes of an attention call."""
    if packing.is_dense:
        batch, queries, heads, _ = query.shape
        return CallShape(batch, heads, key.shape[2], queries, key.shape[1])
    _check_bounds(packing)
    max_seqlens = packing[3:]
    return CallShape(packing.sequences, query.shape[-2], key.shape[-2], *max_seqlens)


def select(
    bias: Tensor,
    mask: Tensor | None,
    packing: Packing,
    shape: CallShape,
    counts: KeyCounts,
    causal: bool,
    backend: str,
) -> MaskParts:
    """Compute `dynamic_mask` from a 4-D bias and mask, 3-D for a packed batch.

    Returns:
        A mask, or start and end, as fields of a record.

    Raises:
        TypeError, ValueError: as `dynamic_mask`.
    """
    if bias.dtype == torch.float64 and backend != "reference":
        raise TypeError(
            "attn_bias has dtype torch.float64, which kernels do not select from; convert to "
            "torch.float32, or pass "
            'backend="reference"'
        )
    bias = bias.detach()
    if not packing.is_dense:
        _check_packed_form(bias, mask, "attn_mask")
        # Only the head dimension may be narrowed, as in attention.
        bias, mask = without_expansion(bias, 1), without_expansion(mask, 1)
    else:
        if bias.shape[3] == 1:
            bias = bias.expand(-1, -1, -1, shape.keys)  # equal biases: the first keys are kept
        bias, mask = without_expansion(bias, 3), without_expansion(mask, 4)
    selection = SelectionInputs(bias, mask, *packing[:2], *shape, causal=causal, **counts._asdict())
    if causal and bias.shape[-2] == 1 and (mask is None or mask.shape[-2] == 1):
        # A max_kept of 0 means unknown, so use 1 as the bound of 0 keys.
        most = max(1, counts.total)
        return MaskParts(None, *selection_ops.select_intervals(selection, backend), most)
    return MaskParts(selection_ops.select_keep(selection, backend))


def is_per_key(bias: Tensor | None, mask: Tensor | None, is_dense: bool) -> bool:
    """Say whether attention can select within the call: the bias is the same for every query."""
    rank = 4 if is_dense else 3
    if bias is None or bias.dim() != rank or bias.shape[-2] != 1 or bias.dtype == torch.float64:
        return False
    return mask is None or (mask.dim() == rank and mask.shape[-2] == 1)


def is_one_row(queries: int) -> bool:
    """Say whether there is a single query, which sees all keys. False for symbolic sizes."""
    return not torch.compiler.is_compiling() and type(queries) is int and queries == 1


def key_counts(window_size: int, keep_last: int, keep_first: int) -> KeyCounts:
    """Return the numbers of keys to keep; TypeError or ValueError for invalid numbers."""
    return KeyCounts(
        index("window_size", window_size, 0),
        index("keep_last", keep_last, 0),
        index("keep_first", keep_first, 0),
    )


def refuse_without_window(
    keep_last: int, keep_first: int, reason: str = "without window_size", hint: str = ""
) -> None:
    """Raise ValueError, with the reason, if keep_last or keep_first is not 0."""
    for name, count in (("keep_last", keep_last), ("keep_first", keep_first)):
        if index(name, count, 0) != 0:
            raise ValueError(f"{name} must be 0 {reason}, got {checks.described(count)}{hint}")


def check_causal(counts: KeyCounts, causal: bool, queries: int) -> None:
    """Raise ValueError if keys are kept by place but several queries all see the same keys."""
    if counts.keeps_first_or_last and not causal and queries > 1:
        refuse_without_window(
            counts.keep_last,
            counts.keep_first,
            f"with is_causal=False and {queries} queries, all of which see the same keys",
        )


def keeps_all(counts: KeyCounts, keys: int) -> bool:
    """Say whether a selection surely drops only keys whose bias is NaN or -inf.

    A program that is exported or traced may run with other sizes. The answer is then False, and the
    selection runs, which is always correct.
    """
    if torch.compiler.is_compiling():
        return not _is_exporting() and counts.total >= keys
    return type(keys) is int and counts.total >= keys


def without_nan(bias: Tensor) -> Tensor:
    """Return a bias for attention without selection that drops what a selection never keeps.

    -inf already means "not kept" in attention; NaN becomes -inf.
    """
    bias = without_expansion(bias, 4 if bias.dim() == 4 else 1)
    return bias.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def selectable_bias(
    bias: Tensor | None, counts: KeyCounts, batch: int | None = None
) -> Tensor | None:
    """Return the bias that attention selects by; ValueError if it is absent or does not fit.

    Return None if it is absent and keys are kept only for their places.
    """
    if bias is None:
        if counts.window == 0 and counts.keeps_first_or_last:
            return None
        raise ValueError(
            f"window_size is {counts.window}, which selects the keys with the largest bias, but "
            "attn_bias is None; pass a bias, or an IntervalMask.sliding_window as attn_mask to "
            "keep the nearest keys. Without a bias window_size must be None, or 0 with keep_last "
            "or keep_first"
        )
    # Without this check the selection would have a wrong batch size, and the error would name it.
    if batch is not None and bias.shape[0] != 1 and bias.shape[0] != batch:
        raise ValueError(
            f"attn_bias must have batch size {batch} or 1, as query, got {tuple(bias.shape)}"
        )
    return bias


def zero_bias(key: Tensor, packing: Packing) -> Tensor:
    """Return a bias of zeros, which a call without a bias selects by."""
    if packing.is_dense:
        return key.new_zeros(1, 1, 1, 1)
    return key.new_zeros(1, 1, 1).expand(1, 1, total_keys(key, packing))


def total_keys(key: Tensor, packing: Packing) -> int:
    """Return the total number of keys of packed sequences, or an upper bound of it."""
    if packing.block_table is None:
        return key.shape[0]
    if key.device.type == "cpu" and packing.cu_seqlens_k is not None:
        return checks.value_of(packing.cu_seqlens_k[-1])
    # On a GPU only the device knows the number of keys; this is an upper bound.
    return packing.sequences * packing.max_seqlen_k


def composable_mask(mask: Tensor | IntervalMask | None) -> Tensor | None:
    """Return the boolean mask that attention selects within; ValueError for an `IntervalMask`."""
    if isinstance(mask, IntervalMask):
        raise ValueError(
            "window_size cannot be combined with an IntervalMask as attn_mask; pass a boolean "
            "mask, which attn_mask.to_bool(query_length) is for dense problems; or select with "
            "dynamic_mask and combine the masks with &, which drops what the window kept of other "
            "keys"
        )
    return mask_parts(mask).mask


def _refuse_lengths(reason: str, **lengths: int | None) -> None:
    """Raise ValueError, with the reason, if a length is given that would have no effect."""
    for name, length in lengths.items():
        if length is not None:
            raise ValueError(f"{name} must be None {reason}, got {checks.described(length)}")


def _dense_tensors(
    bias: Tensor, mask: Tensor | None, query_length: int | None, key_length: int | None
) -> tuple[Tensor, Tensor | None, int, int, int]:
    """Return the 4-D bias and mask, and B, Q and K."""
    tensors = [bias] if mask is None else [bias, mask]
    for name, tensor in (("attn_bias", bias), ("attention_mask", mask)):
        if tensor is not None and tensor.dim() not in (2, 3, 4):
            raise ValueError(
                f"{name} must have shape ({{B|1}}, {{H|Hk|1}}, {{Q|1}}, {{K|1}}), "
                f"(B, {{H|Hk|1}}, K) or (B, K), got {tuple(tensor.shape)}"
            )
    keys = _key_length(tensors, key_length)
    batch = next((t.shape[0] for t in tensors if t.dim() and t.shape[0] != 1), 1)

    def in_4d(name: str, tensor: Tensor) -> Tensor:
        # Accept any head count here; _head_counts checks all tensors together.
        heads = tensor.shape[1] if tensor.dim() == 3 else 1
        # Bias and mask broadcast against each other.
        tensor_batch = 1 if tensor.dim() and tensor.shape[0] == 1 else batch
        return to_4d(name, tensor, batch=tensor_batch, heads=heads, kv_heads=heads, keys=keys)

    bias = in_4d("attn_bias", bias)
    mask = None if mask is None else in_4d("attention_mask", mask)
    if query_length is None:
        rows = [t.shape[2] for t in (bias, mask) if t is not None and t.shape[2] != 1]
        query_length = rows[0] if rows else keys
    return bias, mask, batch, index("query_length", query_length, 0, MAX_ROWS), keys


def _head_counts(
    bias: Tensor, mask: Tensor | None, num_heads: int | None, num_kv_heads: int | None
) -> tuple[int, int]:
    """Return H and Hk, as given or as inferred from bias and mask."""
    counts = [t.shape[-3] for t in (bias, mask) if t is not None]
    counts = [count for count in counts if count != 1] or [1]
    heads = max(counts) if num_heads is None else index("num_heads", num_heads, 1)
    kv_heads = min(counts) if num_kv_heads is None else index("num_kv_heads", num_kv_heads, 1)
    if kv_heads and heads % kv_heads:
        name = "num_heads" if num_kv_heads is None else "num_kv_heads"
        raise ValueError(
            f"{name}: the number of query heads must be a multiple of the number of key heads, "
            f"got {heads} and {kv_heads}"
        )
    return heads, kv_heads


def _key_length(tensors: list[Tensor], key_length: int | None) -> int:
    """Return K, from the argument or from the first tensor with a key dimension above 1."""
    if key_length is not None:
        return index("key_length", key_length, 0, MAX_ROWS)
    for tensor in tensors:
        if tensor.dim() and tensor.shape[-1] != 1:
            return tensor.shape[-1]
    raise ValueError(
        "key_length must be given where the last dimension of attn_bias and attention_mask is 1, "
        f"which serves any number of keys; got {' and '.join(str(tuple(t.shape)) for t in tensors)}"
    )


def _packing(packing: Packing, max_seqlen_q: int | None, max_seqlen_k: int | None) -> Packing:
    """Return the packing, with the lengths of the longest sequences."""
    cu_seqlens_q, cu_seqlens_k = packing[:2]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} must be given too: packed sequences need both")
    _check_bounds(packing)
    return packing._replace(
        max_seqlen_q=resolve_max_seqlen("max_seqlen_q", max_seqlen_q, cu_seqlens_q),
        max_seqlen_k=resolve_max_seqlen("max_seqlen_k", max_seqlen_k, cu_seqlens_k),
    )


def _check_bounds(packing: Packing) -> None:
    for name, bounds in zip(Packing._fields, packing[:2], strict=False):
        checks.cu_seqlens(name, bounds)


def _check_packed_form(bias: Tensor, mask: Tensor | None, mask_name: str) -> None:
    for name, tensor in (("attn_bias", bias), (mask_name, mask)):
        if tensor is not None and tensor.dim() != 3:
            raise ValueError(
                f"{name} must have shape ({{H|Hk|1}}, 1, total_k) or, with total_q > 1, "
                f"({{H|Hk|1}}, total_q, max_seqlen_k) for packed sequences, got "
                f"{tuple(tensor.shape)}"
            )


def resolve_max_seqlen(name: str, length: int | None, cu_seqlens: Tensor) -> int:
    """Return the length of the longest sequence; by default it is read from the device."""
    if length is not None:
        return index(name, length, 0, MAX_ROWS)
    return checks.read_max_seqlen(
        name.replace("max_seqlen", "cu_seqlens"), cu_seqlens, f"; pass {name}"
    )


def _check_mask(mask: Tensor, bias: Tensor, shape: CallShape) -> None:
    """Raise ValueError, with `dynamic_mask`'s argument name, for a mask that does not fit."""
    head_sizes = (1, shape.heads, shape.kv_heads)
    if mask.dim() == 4:
        sizes = ((1, shape.batch), head_sizes, (1, shape.queries), (1, shape.keys))
        fits = all(
            checks.is_one_of(size, *allowed)
            for size, allowed in zip(mask.shape, sizes, strict=True)
        )
        form = "({B|1}, {H|Hk|1}, {Q|1}, {K|1})"
    else:
        # Only shapes are compared here; the lengths are values of the cu_seqlens.
        has_same_rows = mask.shape[1] == bias.shape[1]
        fits = checks.is_one_of(mask.shape[0], *head_sizes) and (
            not has_same_rows or mask.shape[2] == bias.shape[2]
        )
        form = "({H|Hk|1}, 1, total_k) or, with total_q > 1, ({H|Hk|1}, total_q, max_seqlen_k)"
    if not fits:
        raise ValueError(
            f"attention_mask must have shape {form}, to go with attn_bias of {tuple(bias.shape)}, "
            f"got {tuple(mask.shape)}"
        )
