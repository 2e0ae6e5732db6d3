# SPDX-License-Identifier: BSD-3-Clause
"""This package with each kind of mask."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from ... import IntervalMask, dynamic_mask, flash_dmattn_func
from ..cases import Case, Inputs, Pass
from .base import Contestant, Role, select


class FlashDmattn(Contestant):
    """What ``dynamic_mask`` selects from the bias, in the form in which it comes."""

    role: ClassVar[Role] = "ours"
    backend: ClassVar[str | None] = None
    mask: IntervalMask | torch.Tensor | None = None

    def prepare(self, which: Pass) -> None:
        self.mask = select(self.case, self.bias)

    def attend(self) -> torch.Tensor:
        out = flash_dmattn_func(
            self.query,
            self.key,
            self.value,
            self.mask,
            self.bias,
            is_causal=self.case.causal,
            backend=self.backend,
        )
        assert isinstance(out, torch.Tensor)
        return out


class Triton(FlashDmattn):
    """The same on this package's Triton kernels."""

    backend = "triton"


class KeyMask(FlashDmattn):
    """The keys with the largest bias of all, the same for every query."""

    def prepare(self, which: Pass) -> None:
        """Select once for all queries."""
        assert self.bias is not None
        assert self.case.window is not None
        self.mask = dynamic_mask(self.bias, self.case.window, is_causal=False)


class Boolean(FlashDmattn):
    """The mask as a boolean for each query and key."""

    def prepare(self, which: Pass) -> None:
        """Select, and write the Q x K mask where the selection is not one."""
        super().prepare(which)
        if isinstance(self.mask, IntervalMask):
            self.mask = self.mask.to_bool(self.case.rows)


class NoMask(FlashDmattn):
    """Without mask and bias."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, replace(inputs, bias=None))

    def prepare(self, which: Pass) -> None:
        """There is nothing to make."""
