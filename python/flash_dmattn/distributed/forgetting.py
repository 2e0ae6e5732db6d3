# SPDX-License-Identifier: BSD-3-Clause
"""Forgetting attention over a sequence that is sharded over several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..forgetting import check_gates, check_log_forget, checked_prune
from ..forgetting_formula import bias_for_backend, bounded_gates, decay_mask
from ..interface import flash_dmattn_func
from ..modules import ForgettingAttention
from ..modules.forgetting_cache import check_gated_tokens
from ..modules.projections import check_states
from ..state.chunks import check_heads
from ..wrong_keywords import hide_unknown_keywords, refuse_keywords
from .context_parallel import checked_group
from .layer import shard_positions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ContextParallelForgetting", "context_parallel_forgetting"]


@hide_unknown_keywords
@torch.compiler.disable  # type: ignore[untyped-decorator]
def context_parallel_forgetting(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_forget: Tensor,
    prune: float,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Compute causal attention with forget gates over sequences that are divided among ranks.

    Each rank has any number of consecutive tokens; those of rank 0 come first. A rank receives only
    those keys of earlier ranks that have not decayed below ``prune`` for all heads and sequences
    where its own tokens begin. If memory is shorter than a shard, that is a part of one shard. The
    gradients of these rows are sent back and summed in the order of the ranks.

    Communication: all-gathers of each shard's gate sums, in float64, and of the numbers of rows,
    which the host waits for; all-to-alls of keys and values, and of their remaining log decay; and
    the reverse in the backward pass. All ranks must call it, also backward, with the same B, H, Hk,
    D, dtype and prune, and either all or none with inputs that require gradients.

    Gradients are those of the sum of all ranks' losses. `context_parallel_dmattn` explains the
    consequence for parameters.

    Args:
        query: ``(B, N, H, D)``, this rank's tokens; or with ``cu_seqlens`` those of each sequence,
            packed, ``(total, H, D)``.
        key, value: ``(B, N, Hk, D)`` or ``(total, Hk, D)``.
        log_forget: ``(B, {H|Hk}, N)`` or ``({H|Hk}, total)``, logarithms of forget gates, as in
            `forgetting_bias`. -inf forgets all earlier keys, such as another document.
        prune: drop a key for a query if the gates between them sum to less than this.
        group: of the ranks; a `DeviceMesh` of one dimension; None is the default group.
        padding: bool ``(B, N)``, True for tokens; others are never seen, and decay nothing.
        cu_seqlens: int32 ``(B + 1,)``: 0, then where this rank's part of each sequence ends. A
            sequence may have no tokens on a rank. B must be equal on all ranks.
        softmax_scale, softcap, deterministic, backend: as in `flash_dmattn_func`.

    Returns:
        A tensor of query's shape: the result of `flash_dmattn_func` with the bias and mask of
        `forgetting_bias` for the whole sequences.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape does not fit, or prune is None or above 0.
        RuntimeError: torch.distributed is not initialized.
    """
    if unknown:
        refuse_keywords(context_parallel_forgetting, unknown)
    threshold = checked_prune(prune)
    if threshold is None:
        raise ValueError(
            "prune must be a log decay, such as -16.0, in context parallelism, got None: without "
            "it each rank needs all keys of those before it"
        )
    if cu_seqlens is not None:
        batch = _PaddedBatch(query, key, value, log_forget, cu_seqlens, padding)
        padded: Tensor = context_parallel_forgetting(
            *(batch.filled(tensor) for tensor in (query, key, value)),
            batch.filled(log_forget.transpose(0, 1)).transpose(1, 2),
            threshold,
            group,
            padding=batch.filled(torch.ones_like(batch.of_token, dtype=torch.bool)),
            softmax_scale=softmax_scale,
            softcap=softcap,
            deterministic=deterministic,
            backend=backend,
        )
        return padded.flatten(0, 1).index_select(0, batch.of_token)
    check_heads("query", query)
    check_gated_tokens(key, value, log_forget)
    check_log_forget(log_forget, None, padding)
    check_gates(log_forget)
    ranks = checked_group(group)
    tokens = None if padding is None else padding.unsqueeze(1)
    gates = bounded_gates(log_forget, threshold, tokens)
    rows = gates.cumsum(-1)
    seen = rows if tokens is None else rows.masked_fill(~tokens, torch.inf)
    if dist.get_world_size(ranks) > 1:
        key, value, seen = _prepend_earlier(key, value, seen, gates.sum(-1), threshold, ranks)
    bias = -seen.unsqueeze(2)
    out = flash_dmattn_func(
        query,
        key,
        value,
        decay_mask(rows.detach(), seen.detach(), threshold),
        bias_for_backend(backend, bias),
        softmax_scale,
        True,
        softcap,
        deterministic,
        backend=backend,
    )
    assert isinstance(out, Tensor)
    return out


class ContextParallelForgetting(ForgettingAttention):
    """A `ForgettingAttention` over a rank's consecutive tokens of each sequence.

    Parameters, arguments and results are those of the base layer, but it has no cache and needs a
    ``prune``. All ranks must call it, forward and backward. Positions are counted along all shards.
    Sum gradients of parameters over the group, do not average them; see `context_parallel_dmattn`.
    """

    def __init__(
        self,
        *args: Any,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        """Make a layer with random weights, which must be equal on all ranks.

        Args:
            *args, **settings: as in `ForgettingAttention`.
            process_group: of the ranks; None is the default group, looked up in each call.

        Raises:
            TypeError, ValueError: as `ForgettingAttention`.
        """
        super().__init__(*args, **settings)
        self.process_group = process_group

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Attend from each token of a shard to earlier tokens, on all ranks.

        Args:
            hidden_states: ``(B, N, embed_dim)``, or ``(total, embed_dim)`` with ``cu_seqlens``.
            **options: ``padding``, ``cu_seqlens`` and ``position_ids``, as in
                `ForgettingAttention`; the cu_seqlens as in `context_parallel_forgetting`.
        """
        for name in ("cache", "max_seqlen"):
            if options.get(name) is not None:
                hint = "; cu_seqlens tells it" if name == "max_seqlen" else ""
                raise ValueError(f"{name} must be None in context parallelism{hint}")
        check_states(self, hidden_states, options.get("cu_seqlens"))
        if self.rotary_base is not None and options.get("position_ids") is None:
            options["position_ids"] = shard_positions(
                self.process_group, hidden_states, options.get("cu_seqlens")
            )
        return super().forward(hidden_states, **options)

    @hide_unknown_keywords
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        padding: Tensor | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Compute the attention of a shard; see `context_parallel_forgetting`."""
        if unknown:
            refuse_keywords(ContextParallelForgetting.attend, unknown)
        out: Tensor = context_parallel_forgetting(
            query,
            key,
            value,
            log_forget,
            self.prune,
            self.process_group,
            padding=padding,
            cu_seqlens=cu_seqlens,
            softmax_scale=self.softmax_scale,
            backend=self.backend,
        )
        return out


class _PaddedBatch:
    """Places for a rank's parts of packed sequences in a batch, each at the end of its row.

    Each rank sends the last rows of all parts, so this limits the rows to what one part needs.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        cu_seqlens: Tensor,
        padding: Tensor | None,
    ) -> None:
        """Check arguments of `context_parallel_forgetting`, and compute the places."""
        check_log_forget(log_forget, cu_seqlens, padding)
        total = log_forget.shape[1]
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if checks.tensor(name, tensor).dim() != 3 or tensor.shape[0] != total:
                raise ValueError(
                    f"{name} must have shape (total, heads, D) with cu_seqlens, and total={total} "
                    f"as log_forget has, got {tuple(tensor.shape)}"
                )
            if tensor.device != log_forget.device:
                raise ValueError(
                    f"{name} must be on log_forget's device {log_forget.device}, got a tensor on "
                    f"{tensor.device}"
                )
        most, end = checks.read_max_seqlen("cu_seqlens", cu_seqlens), int(cu_seqlens[-1])
        if end != total:
            raise ValueError(f"cu_seqlens must end with {total}, query's first size, got {end}")
        bounds = cu_seqlens.long()
        token = torch.arange(total, device=bounds.device)
        sequence = torch.searchsorted(bounds[1:], token, right=True)
        self.shape = len(bounds) - 1, most
        self.of_token = (sequence + 1) * most - bounds[sequence + 1] + token

    def filled(self, rows: Tensor) -> Tensor:
        """Return ``(B, N, ...)`` with the rows ``(total, ...)`` at their places, else zeros."""
        batch, most = self.shape
        padded = rows.new_zeros(batch * most, *rows.shape[1:]).index_copy(0, self.of_token, rows)
        return padded.view(batch, most, *rows.shape[1:])


class _RowCounts(NamedTuple):
    """The number of last rows that each rank sends to each other rank."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]


def _prepend_earlier(
    key: Tensor, value: Tensor, seen: Tensor, sums: Tensor, prune: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return key, value and gate sums, from the first needed key on.

    Args:
        key, value: ``(B, N, Hk, D)``.
        seen: ``(B, G, N)``, the sum of the shard's gates up to each key; inf at padding.
        sums: ``(B, G)``, that sum at the last token.
        prune: the threshold.
        group: of the ranks.
    """
    rank = dist.get_rank(group)
    rank_sums: Tensor = _GatherSums.apply(sums, group)  # type: ignore[no-untyped-call]
    # The log decay from each key to the end of the shard.
    log_decay = sums.unsqueeze(-1) - seen
    rows = _plan_rows(log_decay.detach(), rank_sums.detach(), prune, group)
    states = torch.cat([key, value], -1)
    arrived = _send_rows(states.transpose(0, 1), rows).transpose(0, 1)
    arrived_decay = _send_rows(log_decay.permute(2, 0, 1), rows).permute(1, 2, 0)
    # Add the decay by the shards between.
    counts = torch.tensor(rows.received, dtype=torch.int64, device="cpu")
    source = torch.repeat_interleave(counts).to(key.device)
    other_rank = torch.arange(len(rows.received), device=key.device)
    is_between = (other_rank > source.unsqueeze(1)) & (other_rank < rank)
    decay_between = torch.einsum("nr,rbg->bgn", is_between.to(torch.float64), rank_sums)
    earlier_key, earlier_value = arrived.chunk(2, -1)
    return (
        torch.cat([earlier_key, key], 1),
        torch.cat([earlier_value, value], 1),
        torch.cat([-(arrived_decay + decay_between), seen], -1),
    )


def _plan_rows(
    log_decay: Tensor, sums: Tensor, prune: float, group: dist.ProcessGroup
) -> _RowCounts:
    """Plan the rows to send: those that have not decayed where the tokens of a rank begin."""
    ranks, rank, length = dist.get_world_size(group), dist.get_rank(group), log_decay.shape[-1]
    counts = [torch.zeros((), dtype=torch.int64, device=log_decay.device)] * ranks
    for to in range(rank + 1, ranks):
        is_alive = log_decay + sums[rank + 1 : to].sum(0).unsqueeze(-1) >= prune
        # Append True, so that argmax finds the end if no key is alive.
        first = torch.nn.functional.pad(is_alive.flatten(0, 1).any(0), (0, 1), value=True)
        counts[to] = length - first.byte().argmax()
    local_counts = torch.stack([*counts, torch.full_like(counts[0], length)])
    gathered = [torch.empty_like(local_counts) for _ in range(ranks)]
    dist.all_gather(gathered, local_counts, group=group)
    wanted = torch.stack(gathered)
    # A rank without tokens needs no rows.
    table = wanted[:, :ranks].masked_fill(wanted[:, ranks] == 0, 0).tolist()
    return _RowCounts(group, table[rank], [of_rank[rank] for of_rank in table])


def _send_rows(rows: Tensor, plan: _RowCounts) -> Tensor:
    """Return the received rows ``(rows, ...)``, in the order of the ranks, with gradients."""
    arrived: Tensor = _SendRows.apply(rows.flatten(1), plan)  # type: ignore[no-untyped-call]
    return arrived.view(len(arrived), *rows.shape[1:])


class _SendRows(torch.autograd.Function):
    """Sends last rows to the ranks that need them, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: _RowCounts) -> Tensor:
        ctx.plan, ctx.length = plan, len(rows)
        sent_rows = torch.cat([rows[len(rows) - count :] for count in plan.sent])
        return _all_to_all(sent_rows, plan.sent, plan.received, plan.group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan: _RowCounts = ctx.plan
        returned = _all_to_all(gradient.contiguous(), plan.received, plan.sent, plan.group)
        summed = torch.promote_types(returned.dtype, torch.float32)
        total = returned.new_zeros(ctx.length, returned.shape[1], dtype=summed)
        for part in torch.split(returned, plan.sent):  # in the order of the ranks
            total[ctx.length - len(part) :] += part
        return total.to(returned.dtype), None


class _GatherSums(torch.autograd.Function):
    """Gathers a tensor of each rank on all ranks; sums gradients in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, local_sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(local_sums, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rank_gradients = _all_gather(gradient, ctx.group)
        return rank_gradients[:, dist.get_rank(ctx.group)].sum(0), None


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    local = local.contiguous()
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, local, group=group)
    return torch.stack(gathered)


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
