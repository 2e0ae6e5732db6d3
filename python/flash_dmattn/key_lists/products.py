# SPDX-License-Identifier: BSD-3-Clause
"""The products of rows with the keys that they list, in plain PyTorch.

Heads are counted as h lists of g query heads each, which share what is listed: a tensor for each
query head and listed key is ``(h, rows, g, k)``. A table has a row for each key and KV head, and a
last one of zeros, which is what "no key" stands for.
"""

from __future__ import annotations

import functools
import warnings
from typing import Protocol

import torch
from torch import Tensor


class Products(Protocol):
    """The products of some rows with what they list of a table."""

    def dots(self, rows: Tensor) -> Tensor:
        """Return the products ``(h, rows, g, k)`` of ``(h, rows, g, D)`` with each listed key."""

    def sums(self, weights: Tensor) -> Tensor:
        """Return the sums ``(h, rows, g, D)`` of the listed keys, weighted."""

    def add_to(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add to each listed key's row of a total the rows that list it, weighted."""


class Gathered:
    """Copies what is listed, once for all heads that share it; autograd can record it."""

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
        """Multiply matrices."""
        return rows @ self._picked.transpose(-1, -2)

    def sums(self, weights: Tensor) -> Tensor:
        """Multiply matrices."""
        return weights @ self._picked

    def add_to(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Sum over the heads that share a list, then over rows."""
        parts = (weights.transpose(-1, -2) @ rows).flatten(0, 2)
        numbers = self._listed.reshape(-1)
        if self._ordered:
            _add_in_order(total, numbers, parts)
        elif numbers.is_cpu:
            # The one of several equal operations that is fast there.
            total.scatter_add_(0, numbers.to(torch.int64).unsqueeze(1).expand_as(parts), parts)
        else:
            total.index_add_(0, numbers, parts)


class Listed:
    """What is listed, for each query head by itself; made once for all tables."""

    def __init__(self, numbers: Tensor, heads: int) -> None:
        """Take numbers of rows of tables ``(h, rows, k)``, and the number of query heads."""
        lists, count, length = numbers.shape
        self._group = heads // lists
        self._numbers = numbers.reshape(-1)
        shared = numbers.unsqueeze(2).expand(lists, count, self._group, length)
        self.per_head = shared.reshape(heads * count, length)
        self._inverse: tuple[Tensor, Tensor, Tensor] | None = None

    def inverse(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return, in the order of the numbers below count: places in what is listed, the rows of
        their heads, and where the rows of each number begin.
        """
        if self._inverse is None:
            length = self.per_head.shape[1]
            order, begins = _inverse(self._numbers, count)
            heads = (order // length * self._group).to(torch.int32).unsqueeze(1)
            heads = heads + torch.arange(self._group, dtype=torch.int32, device=heads.device)
            begins = (begins * self._group).to(torch.int32)
            self._inverse = order, heads.reshape(-1), begins
        return self._inverse


class Streamed:
    """Reads what is listed where it lies, for each head by itself; on CPUs.

    The order of sums is always the same.
    """

    def __init__(self, table: Tensor, listed: Listed) -> None:
        """Take a table and what is listed of it.

        k is from 1 to the rows of the table, more than which torch takes for a mistake.
        """
        self._table, self._listed = table, listed

    def dots(self, rows: Tensor) -> Tensor:
        """Compute those elements of a product of matrices."""
        product = _sparse(self._listed.per_head, self._table)
        torch.sparse.sampled_addmm(
            product, rows.reshape(-1, rows.shape[-1]), self._table.t(), beta=0.0, out=product
        )
        return product.values().view(*rows.shape[:-1], -1)

    def sums(self, weights: Tensor) -> Tensor:
        """Sum bags of keys."""
        per_head = self._listed.per_head
        total = torch.nn.functional.embedding_bag(
            per_head,
            self._table,
            mode="sum",
            per_sample_weights=weights.reshape(per_head.shape),
        )
        return total.view(*weights.shape[:-1], -1)

    def add_to(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Sum bags of rows: of each key those that list it."""
        order, heads, begins = self._listed.inverse(total.shape[0])
        by_place = weights.transpose(2, 3).reshape(-1, weights.shape[2])
        total += torch.nn.functional.embedding_bag(
            heads,
            rows.reshape(-1, rows.shape[-1]),
            begins,
            mode="sum",
            per_sample_weights=by_place.index_select(0, order).view(-1),
        )


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


def _sparse(listed: Tensor, table: Tensor) -> Tensor:
    rows, length = listed.shape
    _ignore_sparse_warning()
    return torch.sparse_csr_tensor(
        torch.arange(rows + 1, dtype=listed.dtype, device=listed.device) * length,
        listed.reshape(-1),
        table.new_zeros(rows * length),
        (rows, table.shape[0]),
        check_invariants=False,
    )


@functools.cache
def _ignore_sparse_warning() -> None:
    """Leave out that torch's sparse tensors may change, which it says once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1, dtype=torch.float32, device="cpu").to_sparse_csr()
