# SPDX-License-Identifier: BSD-3-Clause
"""The exchange plan: the rows that each rank sends to each rank, and the transfers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..record import DENSE, KeyCounts
from ..selection import CallShape, select
from ..state.rows import Rows, first_and_last, ranking_backend


class Exchange(NamedTuple):
    """The exchange from the view of one rank.

    Rows are numbered flat, ``(B, p, window rows)``, on the rank that sends them. Sent and received
    rows are ordered by rank.
    """

    group: dist.ProcessGroup
    sent: list[Tensor]  # for each rank int64: the own candidates to send to it
    received_counts: list[int]
    # int64 (B, p, rows): the received row at each place, or one past the last if it is empty
    arrivals: Tensor
    bias: Tensor  # (B, h, 1, rows): of the received rows, without a gradient

    @property
    def sent_counts(self) -> list[int]:
        """The number of rows to send to each rank."""
        return [len(index) for index in self.sent]

    @property
    def received(self) -> int:
        """The number of rows to receive."""
        return sum(self.received_counts)


def plan_exchange(
    candidates: Rows, counts: KeyCounts, group: dist.ProcessGroup, backend: str
) -> Exchange:
    """Plan the exchange: each rank gets the earlier rows that its queries can see.

    The biases of all candidates are gathered, and all ranks compute the same plan. The host waits
    once, for the numbers of rows.

    Args:
        candidates: the rows of this rank's shard that can be seen, in order, of equal size on all
            ranks.
        counts: of the rows that each head keeps.
        group: of the ranks, in the order of their shards.
        backend: for the selection.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, sets = candidates.size, candidates.position.shape[1]
    local_bias = candidates.bias.detach().contiguous()
    gathered = [torch.empty_like(local_bias) for _ in range(ranks)]
    dist.all_gather(gathered, local_bias, group=group)
    bias = torch.cat(gathered, 3)
    device = bias.device
    source = torch.arange(ranks, device=device).repeat_interleave(rows)
    is_earlier = source < torch.arange(ranks, device=device).unsqueeze(1)
    batch, heads, _, columns = bias.shape
    kv_heads = candidates.key.shape[2]
    shape = CallShape(batch, max(heads, kv_heads), kv_heads, ranks, columns)
    ranking = ranking_backend(candidates, backend)
    mask, has_place = is_earlier[None, None], None
    if counts.keeps_first_or_last:
        is_token = candidates.by_set(bias != -torch.inf).any(2)
        is_first, is_last = first_and_last(is_token.unsqueeze(2) & is_earlier, counts)
        has_place = (is_first | is_last).repeat_interleave(heads // sets, 1)
        mask = mask & ~has_place
    keep = select(bias, mask, DENSE, shape, KeyCounts(counts.window), False, ranking).mask
    assert keep is not None
    keep = keep if has_place is None else keep | has_place
    # (B, p, heads that share rows, to, from * rows)
    by_set = keep.reshape(batch, sets, heads // sets, ranks, columns).any(2)
    wanted = by_set.view(batch, sets, ranks, ranks, rows).permute(2, 3, 0, 1, 4)
    sizes = wanted.sum((2, 3, 4)).tolist()
    sent = [_indices_of_true(wanted[to, rank].reshape(-1), sizes[to][rank]) for to in range(ranks)]
    # The rows that this rank gets: their numbers in the order of arrival, and their places.
    is_local = by_set[:, :, rank]
    arrival = wanted[rank].reshape(-1).cumsum(0).view(ranks, batch, sets, rows) - 1
    arrival = arrival.permute(1, 2, 0, 3).reshape(batch, sets, columns)
    running = is_local.cumsum(-1)
    row_number = torch.arange(1, rows + 1, device=device).expand(batch, sets, -1).contiguous()
    column = torch.searchsorted(running, row_number)
    is_there = column < columns
    column = column.clamp(max=columns - 1)
    arrivals = arrival.gather(2, column).masked_fill(~is_there, sum(sizes[rank]))
    by_bias, is_kept = candidates.for_bias(column), candidates.for_bias(is_there)
    local_keep = keep[:, :, rank : rank + 1].gather(3, by_bias)
    kept_bias = bias.gather(3, by_bias).masked_fill(~(is_kept & local_keep), -torch.inf)
    return Exchange(group, sent, sizes[rank], arrivals, kept_bias)


def exchange_rows(candidates: Rows, exchange: Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """Return key, value ``(B, rows, Hk, D)`` and bias of the received rows, with gradients."""
    result: tuple[Tensor, Tensor, Tensor] = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
        candidates.key, candidates.value, candidates.bias, exchange
    )
    return result


class _ExchangeRows(torch.autograd.Function):
    """Sends rows to the ranks that keep them, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, bias: Tensor, exchange: Exchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange = exchange
        ctx.sharing = bias.shape[1] // exchange.arrivals.shape[1]
        sets = exchange.arrivals.shape[1]
        rows = torch.cat([_flatten_sets(key, sets), _flatten_sets(value, sets)], 1)
        arrived = _all_to_all(
            torch.cat([rows[index] for index in exchange.sent]), exchange, is_backward=False
        )
        # The last row of zeros serves empty places.
        arrived = torch.cat([arrived, arrived.new_zeros(1, arrived.shape[1])])
        placed = arrived[exchange.arrivals]  # (B, p, rows, 2 E)
        half = placed.shape[-1] // 2
        return (
            _split_heads(placed[..., :half], key),
            _split_heads(placed[..., half:], value),
            exchange.bias.clone(),
        )

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        dkey, dvalue, dbias = gradients
        exchange: Exchange = ctx.exchange
        batch, sets, rows = exchange.arrivals.shape
        places_of_rows = exchange.arrivals.flatten()
        states = torch.cat([_flatten_sets(dkey, sets), _flatten_sets(dvalue, sets)], 1)
        # (B, h, 1, rows) as (B p rows, heads that share them)
        biases = dbias.view(batch, sets, ctx.sharing, rows).transpose(2, 3).flatten(0, 2)
        returned = []
        for gradient in (states, biases):
            # Each received row is at one place only, so this needs no sum.
            sorted_rows = gradient.new_zeros(exchange.received + 1, gradient.shape[1])
            sorted_rows[places_of_rows] = gradient
            total = gradient.new_zeros(
                batch * sets * rows,
                gradient.shape[1],
                dtype=torch.promote_types(gradient.dtype, torch.float32),
            )
            arrived = _all_to_all(sorted_rows[:-1], exchange, is_backward=True)
            # Summed in the order of the ranks. Each rank sends a row at most once.
            start = 0
            for index in exchange.sent:
                total[index] += arrived[start : start + len(index)]
                start += len(index)
            returned.append(total.to(gradient.dtype))
        half = returned[0].shape[1] // 2
        by_set = returned[1].view(batch, sets, rows, ctx.sharing).transpose(2, 3)
        return (
            _split_heads(returned[0][:, :half].view(batch, sets, rows, half), dkey),
            _split_heads(returned[0][:, half:].view(batch, sets, rows, half), dvalue),
            by_set.reshape(dbias.shape),
            None,
        )


def _all_to_all(rows: Tensor, exchange: Exchange, *, is_backward: bool) -> Tensor:
    counts = exchange.sent_counts, exchange.received_counts
    sent_counts, received_counts = counts[::-1] if is_backward else counts
    arrived = rows.new_empty(sum(received_counts), rows.shape[1])
    dist.all_to_all_single(
        arrived, rows.contiguous(), received_counts, sent_counts, group=exchange.group
    )
    return arrived


def _flatten_sets(rows: Tensor, sets: int) -> Tensor:
    """Convert ``(B, rows, Hk, D)`` to ``(B p rows, Hk / p D)``."""
    batch, count, heads, dim = rows.shape
    by_set = rows.reshape(batch, count, sets, heads // sets * dim)
    return by_set.transpose(1, 2).reshape(batch * sets * count, heads // sets * dim)


def _split_heads(by_set: Tensor, like: Tensor) -> Tensor:
    """Convert ``(B, p, rows, Hk / p D)`` to ``(B, rows, Hk, D)``."""
    batch, _, count, _ = by_set.shape
    return by_set.transpose(1, 2).reshape(batch, count, *like.shape[2:])


def _indices_of_true(flags: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` True values without a synchronization to count them."""
    wanted = torch.arange(1, count + 1, device=flags.device)
    return torch.searchsorted(flags.cumsum(0), wanted)
