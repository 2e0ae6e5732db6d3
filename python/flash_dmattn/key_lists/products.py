# SPDX-License-Identifier: BSD-3-Clause
"""The products of rows with the keys that they list, in plain PyTorch.

Heads are counted as h lists of g query heads each, which share what is listed: a tensor for each
query head and listed key is ``(h, rows, g, k)``. A table has a row for each key and KV head, and a
last one of zeros, which is what "no key" stands for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Gathered:
    """Products of rows with a copy of what they list of a table, one for all heads that share it.

    Autograd can record them.
    """

    def __init__(self, table: Tensor, listed: Tensor, *, ordered: bool) -> None:
        """Take the table and numbers of its rows ``(h, rows, k)``.

        With ``ordered``, additions are in the same order each time.
        """
        self._table, self._listed, self._ordered = table, listed, ordered

    @functools.cached_property
    def _picked(self) -> Tensor:
        picked = self._table.index_select(0, self._listed.reshape(-1))
        return picked.view(*self._listed.shape, self._table.shape[1])

    def dots(self, rows: Tensor) -> Tensor:
        """Return the products ``(h, rows, g, k)`` of ``(h, rows, g, D)`` with each listed key."""
        return rows @ self._picked.transpose(-1, -2)

    def sums(self, weights: Tensor) -> Tensor:
        """Return the sums ``(h, rows, g, D)`` of the listed keys, weighted."""
        return weights @ self._picked

    def add_to(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add to each listed key's row of a total the rows that list it, weighted: summed over the
        heads that share a list, then over rows.
        """
        parts = (weights.transpose(-1, -2) @ rows).flatten(0, 2)
        numbers = self._listed.reshape(-1)
        if self._ordered:
            _add_in_order(total, numbers, parts)
        elif numbers.is_cpu:
            # The one of several equal operations that is fast there.
            total.scatter_add_(0, numbers.to(torch.int64).unsqueeze(1).expand_as(parts), parts)
        else:
            total.index_add_(0, numbers, parts)


def _add_in_order(total: Tensor, numbers: Tensor, parts: Tensor) -> None:
    """Add each part to a row of a total but the last, those of one row one after another."""
    order, begins = _inverse(numbers, total.shape[0])
    total += torch.nn.functional.embedding_bag(order, parts, begins, mode="sum")


def _inverse(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the places of each number below count, in order, and where those of each begin.

    The last number stands for no key. Of a CPU, where it can be asked, its places are left out.
    """
    in_order, places = torch.sort(numbers, stable=True)
    every = torch.arange(count, dtype=numbers.dtype, device=numbers.device)
    begins = torch.searchsorted(in_order, every)
    return (places[: int(begins[-1])] if places.is_cpu else places), begins
