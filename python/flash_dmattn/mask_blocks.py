# SPDX-License-Identifier: BSD-3-Clause
"""Masks of blocks, which kernel packs plan without a Q x K tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["MaskBlocks"]


class MaskBlocks:
    """A mask with a row for each query, as blocks of consecutive queries and keys.

    The last blocks may be cut off by Q and K.

    Attributes:
        numbers: int32 ``(B|1, H|Hk|1, blocks of queries, blocks of keys)``: -1 keeps no pair of the
            block, 0 all, n > 0 those of ``contents[n - 1]``.
        contents: bool ``(n, queries of a block, keys of a block)``, contiguous.
        queries, keys: Q and K.
        kept, partial: upper bounds of how many numbers are at least 0, and above 0.
    """

    def __init__(
        self, numbers: Tensor, contents: Tensor, queries: int, keys: int, kept: int, partial: int
    ) -> None:
        """Store the blocks."""
        self.numbers, self.contents = numbers, contents
        self.queries, self.keys = queries, keys
        self.kept, self.partial = kept, partial
        self._as_bool: Tensor | None = None
        self._version = 0
        # An element stands for all: calls with a plan only read the shape.
        one = torch.empty((), dtype=torch.int32, device=numbers.device)
        self.placeholder = one.expand(*numbers.shape[:2], queries, keys)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy or pickle, without what can be made again."""
        return {**self.__dict__, "_as_bool": None}

    def is_bool(self, mask: object) -> bool:
        """Say whether a mask is the result of `to_bool`."""
        return mask is not None and mask is self._as_bool

    def is_changed(self) -> bool:
        """Say whether the result of `to_bool` has been changed in place."""
        return self._as_bool is not None and self._as_bool._version != self._version

    def to_bool(self) -> Tensor:
        """Return the mask, bool ``(B|1, H|Hk|1, Q, K)``, made by the first call."""
        if self._as_bool is None:
            # Autograd cannot save inference tensors.
            with torch.inference_mode(False):
                kept = (self.numbers == 0)[..., None, None].repeat(
                    1, 1, 1, 1, *self.contents.shape[1:]
                )
                if self.contents.shape[0]:
                    is_partial = self.numbers > 0
                    kept[is_partial] = self.contents[self.numbers[is_partial].long() - 1]
                kept = kept.transpose(3, 4).flatten(4, 5).flatten(2, 3)
                self._as_bool = kept[:, :, : self.queries, : self.keys]
                self._version = self._as_bool._version
        return self._as_bool
