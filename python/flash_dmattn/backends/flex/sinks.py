# SPDX-License-Identifier: BSD-3-Clause
"""Sinks for a backend without sinks: out and its gradient are scaled.

Let f be the keys' share of a row's softmax. Then out is f times the out without the sink. So the
out without the sink has the gradient f dout. The gradient of lse, which f depends on, gets the
additional term (1 - f) dout . out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.reference import softmax_shares


class WithoutSink(NamedTuple):
    """The gradients of a call without the sink, and the gradient of the sink."""

    dout: Tensor
    dlse: Tensor
    dsink: Tensor


def with_sink(sink: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return out with the sink, from the out and lse of a call without it.

    Args:
        sink: ``(H,)``.
        out: ``(B, Q, H, D)``, packed ``(total_q, H, D)``.
        lse: ``(B, H, Q)``, packed ``(H, total_q)``.
    """
    key_share = shares_or_zero(sink, lse)[0].transpose(-1, -2).unsqueeze(-1)
    return (out * key_share).to(out.dtype)


def without_sink(sink: Tensor, dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> WithoutSink:
    """Convert the gradients of a call with a sink to those of the call without it."""
    key_share, sink_share = shares_or_zero(sink, lse)
    product = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    dlse_term = sink_share * product.masked_fill(lse == -torch.inf, 0)
    scaled = (dout * key_share.unsqueeze(-1)).to(dout.dtype)
    return WithoutSink(scaled, dlse + dlse_term, -dlse_term.sum((0, 2)))


def shares_or_zero(sink: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of keys and sink in the softmax; 0 in rows that keep no key."""
    is_empty = lse == -torch.inf
    key_share, sink_share = softmax_shares(sink, lse)
    return key_share.masked_fill(is_empty, 0), sink_share.masked_fill(is_empty, 0)
