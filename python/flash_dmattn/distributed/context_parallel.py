# SPDX-License-Identifier: BSD-3-Clause
"""Attention over a sequence that is sharded over several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..arguments import backend_name
from ..checks import MAX_ROWS, index
from ..interface import Output, flash_dmattn_func, flash_dmattn_varlen_func
from ..mask_checks import check_token_mask
from ..record import KeyCounts
from ..selection import key_counts
from ..state.chunks import as_rows, check_heads
from ..state.rows import Rows, concatenated, empty_rows, kept_rows, mark_dropped
from ..wrong_keywords import hide_unknown_keywords, refuse_keywords
from .exchange import exchange_rows, plan_exchange
from .packed import check_packed_shard, packed_candidates, prepend_received

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["checked_group", "context_parallel_dmattn"]


@hide_unknown_keywords
@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_dmattn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    window_size: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    keep_last: int = 0,
    keep_first: int = 0,
    padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Output:
    """Compute causal attention over sequences that are divided among ranks.

    Each rank has any number of consecutive tokens; those of rank 0 come first. From the ranks
    before it, a rank's queries can see only ``window_size`` keys for each head of the bias, plus
    the kept last and first keys. Only these are sent: at most ``B * (window_size + keep_last +
    keep_first)`` rows of key and value for each KV head, whatever the length. The gradients of
    these rows are sent back and summed in the order of the ranks. So ``deterministic`` calls stay
    deterministic.

    Communication: an all-gather of the biases of as many keys of each shard; an all-to-all of the
    rows, before which the host waits once for their counts; and in the backward pass two
    all-to-alls of their gradients. All ranks must call it, also backward, with the same B, H, Hk,
    D, dtype and numbers of kept keys, and either all or none with inputs that require gradients.

    The gradients of key, value and bias are those of the sum of all ranks' losses. So if the total
    loss is the sum of the ranks' losses, the gradient of a replicated parameter is the sum of the
    ranks' gradients, not their mean: ``all_reduce`` them with its default SUM. DDP and FSDP average
    over their ranks, so their result is that gradient divided by the number of these ranks.

    Args:
        query: ``(B, N, H, D)``, this rank's tokens; or with ``cu_seqlens`` those of each sequence,
            packed, ``(total, H, D)``.
        key, value: ``(B, N, Hk, D)``, or ``(total, Hk, D)``.
        attn_bias: a number for each key, ``({B|1}, {H|Hk|1}, 1, N)``, or a per-key form of
            `flash_dmattn_func`; packed ``({H|Hk|1}, 1, total)``.
        window_size: number of keys that a query keeps of all visible ones, at least 1; or 0 with
            keep_last or keep_first.
        keep_last, keep_first: as in `flash_dmattn_func`, of the whole sequence.
        group: of the ranks; a `DeviceMesh` of one dimension; None is the default group.
        padding: bool ``(B, N)``, True for tokens; others are never seen.
        cu_seqlens: int32 ``(B + 1,)``: 0, then where this rank's part of each sequence ends. A
            sequence may have any number of tokens on each rank, also none. All ranks must list all
            sequences, in the same order.
        max_seqlen: at least the length of this rank's longest part; by default read from the
            device, which synchronizes.
        softmax_scale, softcap, deterministic: as in `flash_dmattn_func`.
        sink, return_lse, backend: as in `flash_dmattn_func`.

    Returns:
        The results of `flash_dmattn_func`, for this rank's queries.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape does not fit, or a mask other than padding is given.
        RuntimeError: torch.distributed is not initialized.
    """
    if unknown:
        refuse_keywords(context_parallel_dmattn, unknown)
    counts = key_counts(window_size, keep_last, keep_first)
    index("window_size", window_size, 0 if counts.keeps_first_or_last else 1, MAX_ROWS)
    ranks, name = checked_group(group), backend_name(backend)
    settings: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "is_causal": True,
        "softcap": softcap,
        "deterministic": deterministic,
        "window_size": counts.window,
        "keep_last": counts.keep_last,
        "keep_first": counts.keep_first,
        "sink": sink,
        "return_lse": return_lse,
        "backend": backend,
    }
    if cu_seqlens is not None:
        if padding is not None:
            check_token_mask(padding, cu_seqlens)
        packing = check_packed_shard(query, key, value, attn_bias, cu_seqlens, max_seqlen)
        # NaN: the token counts among the last and the first, but its bias is not selected.
        if counts.keeps_first_or_last:
            attn_bias = attn_bias.masked_fill(attn_bias == -torch.inf, torch.nan)
        seen = key, value, attn_bias, packing
        if dist.get_world_size(ranks) > 1:
            candidates = packed_candidates(key, value, attn_bias, packing, counts, name)
            seen = prepend_received(_receive(candidates, counts, ranks, name), *seen)
        key, value, bias, packing = seen
        assert packing.cu_seqlens_k is not None
        bounds = cu_seqlens, packing.cu_seqlens_k, *packing[3:]
        settings["attn_mask"] = _token_mask(bias, counts)
        return flash_dmattn_varlen_func(query, key, value, *bounds, attn_bias=bias, **settings)
    check_heads("query", query)
    check_heads("key", key)
    local = torch.arange(key.shape[1], device=key.device)
    heads = query.shape[2]
    shard = as_rows(
        key,
        value,
        attn_bias,
        padding,
        local,
        heads,
        counts_dropped=counts.keeps_first_or_last,
        bias_name="attn_bias",
    )
    if dist.get_world_size(ranks) > 1:
        # A rank without tokens has candidates, too: gradients of received rows flow through them.
        sent_shard = shard if shard.size else concatenated(shard, empty_rows(shard, 1))
        candidates = kept_rows(sent_shard, counts, name)
        candidates = mark_dropped(candidates) if counts.keeps_first_or_last else candidates
        shard = concatenated(_receive(candidates, counts, ranks, name), shard)
    settings["attn_mask"] = _token_mask(shard.bias, counts)
    return flash_dmattn_func(query, shard.key, shard.value, attn_bias=shard.bias, **settings)


def _token_mask(bias: Tensor, counts: KeyCounts) -> Tensor | None:
    """Return the columns that are tokens, if places must be counted."""
    return bias.detach() != -torch.inf if counts.keeps_first_or_last else None


def _receive(candidates: Rows, counts: KeyCounts, ranks: dist.ProcessGroup, backend: str) -> Rows:
    """Return the rows that earlier ranks send to this rank."""
    exchange = plan_exchange(candidates, counts, ranks, backend)
    return Rows(*exchange_rows(candidates, exchange), exchange.arrivals)


def checked_group(group: Any) -> dist.ProcessGroup:
    """Check the argument, and return its process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group, and "
            "start the program with torchrun"
        )
    if group is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a DeviceMesh of one dimension, got {group.ndim}; mesh['name'] is "
                "one of its dimensions"
            )
        of_mesh: dist.ProcessGroup = group.get_group()
        return of_mesh
    if not isinstance(group, dist.ProcessGroup):
        checks.refuse_type("group", "a ProcessGroup, a DeviceMesh or None", group)
    return group
