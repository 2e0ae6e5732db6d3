# SPDX-License-Identifier: BSD-3-Clause
"""The dense problems into which a call is split, and their results."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flash_dmattn.reference import Sequence

from .listed_rows import Rows


class Part(NamedTuple):
    """A dense problem of a call in float64 with dimensions (B, H, ...); zeros replace poison."""

    sequence: Sequence | Rows
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    kept: Tensor
    spoiled: Tensor  # (B, H): heads that keep a non-finite key or query
    dout: Tensor
    dlse: Tensor
    scale: float
    sink: Tensor | None


class Terms(NamedTuple):
    """One value for each element of the results of a part, with the heads of the query."""

    out: Tensor
    lse: Tensor
    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dbias: Tensor
    dsink: Tensor  # (H,)
    mass: Tensor  # (B, H, K)
