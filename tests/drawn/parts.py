# SPDX-License-Identifier: BSD-3-Clause
"""The dense problems that a call is cut into, and what they give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flash_dmattn.reference import Sequence

from .listed_rows import Rows


class Part(NamedTuple):
    """A dense problem of a call in float64, poison replaced by zeros; dimensions (B, H, ...)."""

    sequence: Sequence | Rows
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    kept: Tensor
    spoiled: Tensor  # (B, H): heads that keep a key or a query which is not finite
    dout: Tensor
    dlse: Tensor
    scale: float
    sink: Tensor | None


class Terms(NamedTuple):
    """Something for each element of the results of a part, with the heads of query."""

    out: Tensor
    lse: Tensor
    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dbias: Tensor
    dsink: Tensor  # (H,)
    mass: Tensor  # (B, H, K)
