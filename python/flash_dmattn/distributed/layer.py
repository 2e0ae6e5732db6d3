# SPDX-License-Identifier: BSD-3-Clause
"""The layer for a sequence that is sharded over several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..masks import IntervalMask
from ..modules import DynamicMaskAttention
from ..modules.arguments import check_cu_seqlens
from ..modules.projections import check_states
from ..modules.rotary import packed_positions
from ..wrong_keywords import hide_unknown_keywords, refuse_keywords
from .context_parallel import checked_group, context_parallel_dmattn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ContextParallelAttention", "shard_positions"]


class ContextParallelAttention(DynamicMaskAttention):
    """A `DynamicMaskAttention` over a rank's consecutive tokens of each sequence.

    Parameters, arguments and results are those of the base layer, but it has no cache, and
    ``padding`` is its only mask. All ranks must call it, forward and backward. Positions are
    counted along all shards. Sum gradients of parameters over the group, do not average them; see
    `context_parallel_dmattn`.
    """

    def __init__(
        self,
        *args: Any,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        **settings: Any,
    ) -> None:
        """Make a layer with random weights, which must be equal on all ranks.

        Args:
            *args: as in `DynamicMaskAttention`.
            process_group: of the ranks, in the order of their shards; a DeviceMesh of one
                dimension; None is the default group.
            **settings: as in `DynamicMaskAttention`.

        Raises:
            ValueError: as in `DynamicMaskAttention`; or there is no window, or no causality.
        """
        super().__init__(*args, **settings)
        if self.window_size is None or not self.is_causal:
            raise ValueError(
                "ContextParallelAttention needs is_causal=True and a window_size, by which it "
                f"knows what to send, got is_causal={self.is_causal} and "
                f"window_size={self.window_size}"
            )
        self.process_group = process_group

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """Attend from each token of a shard to earlier tokens, on all ranks.

        Args:
            hidden_states: ``(B, N, embed_dim)``, or ``(total, embed_dim)`` with ``cu_seqlens``.
            *args: only an ``attn_mask`` of None.
            **options: ``padding``, ``cu_seqlens``, ``max_seqlen`` and ``position_ids``, as in
                `DynamicMaskAttention`; the cu_seqlens as in `context_parallel_dmattn`.
        """
        if any(argument is not None for argument in (*args, options.get("attn_mask"))):
            raise ValueError(
                "attn_mask must be None in context parallelism, where keys of other ranks are "
                "chosen by their biases alone; give padding, and documents as sequences of "
                "cu_seqlens"
            )
        if options.get("cache") is not None:
            raise ValueError("cache must be None in context parallelism")
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
        bias: Tensor,
        attn_mask: Tensor | IntervalMask | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Compute the attention of a shard; see `context_parallel_dmattn`."""
        if unknown:
            refuse_keywords(ContextParallelAttention.attend, unknown)
        assert self.window_size is not None
        padding = None
        if (self.keep_last or self.keep_first) and cu_seqlens is None:
            padding = (bias.detach() != -torch.inf).any(1).squeeze(1)
        out = context_parallel_dmattn(
            query,
            key,
            value,
            bias,
            self.window_size,
            self.process_group,
            keep_last=self.keep_last,
            keep_first=self.keep_first,
            padding=padding,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            sink=self.sink,
            backend=self.backend,
        )
        assert isinstance(out, Tensor)
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shard_positions(process_group: Any, hidden_states: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return int64 ``(N,)`` or ``(total,)``: the tokens' positions in their whole sequences, after
    those of earlier ranks.
    """
    group = checked_group(process_group)
    device = hidden_states.device
    if cu_seqlens is None:
        local_lengths = torch.full((1,), hidden_states.shape[1], dtype=torch.int64, device=device)
    else:
        local_lengths = check_cu_seqlens(cu_seqlens, hidden_states).diff().long()
    lengths = [torch.empty_like(local_lengths) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, local_lengths, group=group)
    starts = torch.stack(lengths)[: dist.get_rank(group)].sum(0)
    if cu_seqlens is None:
        return starts + torch.arange(hidden_states.shape[1], device=device)
    local_positions = packed_positions(cu_seqlens, len(hidden_states))
    token = torch.arange(len(hidden_states), device=device)
    sequence_of_token = torch.bucketize(token, cu_seqlens[1:], right=True)
    # Attention refuses tokens beyond the last sequence, with the reason.
    return local_positions + starts[sequence_of_token.clamp(max=max(len(starts) - 1, 0))]
