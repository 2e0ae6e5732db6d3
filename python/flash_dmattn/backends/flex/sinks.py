# SPDX-License-Identifier: BSD-3-Clause
"""Sinks around a call that knows none: out is scaled, and so is its gradient.

With f the share of a row's softmax that is its keys', out is f times what it is without the sink.
So what is without the sink has the gradient f dout, and lse, on which f depends, has
(1 - f) dout . out added to its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_dmattn.reference import sink_share


class WithoutSink(NamedTuple):
    """The gradients of a call without the sink, and that of the sink."""

    dout: Tensor
    dlse: Tensor
    dsink: Tensor


def with_sink(sink: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return out, of a call without the sink, with it.

    Args:
        sink: ``(H,)``.
        out: ``(B, Q, H, D)``, packed ``(total_q, H, D)``.
        lse: ``(B, H, Q)``, packed ``(H, total_q)``.
    """
    share = shares(sink, lse)[0].transpose(-1, -2).unsqueeze(-1)
    return (out * share).to(out.dtype)


def without_sink(sink: Tensor, dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> WithoutSink:
    """Return the gradients of a call without the sink, for those of one with it."""
    share, rest = shares(sink, lse)
    product = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    lost = rest * product.masked_fill(lse == -torch.inf, 0)
    scaled = (dout * share.unsqueeze(-1)).to(dout.dtype)
    return WithoutSink(scaled, dlse + lost, -lost.sum((0, 2)))


def shares(sink: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of keys and sink in the softmax; 0 in rows that keep nothing."""
    empty = lse == -torch.inf
    share, rest = sink_share(sink, lse)
    return share.masked_fill(empty, 0), rest.masked_fill(empty, 0)
