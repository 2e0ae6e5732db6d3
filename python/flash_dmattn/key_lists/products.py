# SPDX-License-Identifier: BSD-3-Clause
"""The products of rows with their listed keys, in plain PyTorch.

There are h lists of g query heads each. The heads of a list share the gathered keys. A tensor per
query head and listed key is ``(h, rows, g, k)``. A table has a row for each key and KV head, and a
last row of zeros, which stands for "no key".
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Gathered:
    """Products of rows with their listed table rows, gathered once for the heads that share a list.

    Autograd can record them.
    """

    def __init__(self, table: Tensor, listed: Tensor, *, ordered: bool) -> None:
        """Take the table and indices of its rows ``(h, rows, k)``.

        With ``ordered``, additions have a fixed order.
        """
        self._table, self._listed, self._ordered = table, listed, ordered

    @functools.cached_property
    def _gathered(self) -> Tensor:
        gathered = self._table.index_select(0, self._listed.reshape(-1))
        return gathered.view(*self._listed.shape, self._table.shape[1])

    def dots(self, rows: Tensor) -> Tensor:
        """Return the products ``(h, rows, g, k)`` of ``(h, rows, g, D)`` with each listed key."""
        return rows @ self._gathered.transpose(-1, -2)

    def sums(self, weights: Tensor) -> Tensor:
        """Return the weighted sums ``(h, rows, g, D)`` of the listed keys."""
        return weights @ self._gathered

    def add_to(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add to each listed key's row of ``total`` the weighted rows that list it: summed over the
        heads that share a list, then over rows.
        """
        parts = (weights.transpose(-1, -2) @ rows).flatten(0, 2)
        numbers = self._listed.reshape(-1)
        if self._ordered:
            _add_in_order(total, numbers, parts)
        elif numbers.is_cpu:
            # The fastest of several equivalent operations on CPUs.
            total.scatter_add_(0, numbers.to(torch.int64).unsqueeze(1).expand_as(parts), parts)
        else:
            total.index_add_(0, numbers, parts)


def _add_in_order(total: Tensor, numbers: Tensor, parts: Tensor) -> None:
    """Add each part to its row of the total, in a fixed order."""
    order, begins = _group_by_number(numbers, total.shape[0])
    total += torch.nn.functional.embedding_bag(order, parts, begins, mode="sum")


def _group_by_number(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the places of each number below count, in order, and where they begin.

    The last number means "no key". On a CPU, where values can be read, its places are omitted.
    """
    in_order, indices = torch.sort(numbers, stable=True)
    all_numbers = torch.arange(count, dtype=numbers.dtype, device=numbers.device)
    begins = torch.searchsorted(in_order, all_numbers)
    return (indices[: int(begins[-1])] if indices.is_cpu else indices), begins
