# SPDX-License-Identifier: BSD-3-Clause
"""A mask with a row for each query that keeps whole tiles, empty tiles, or all but one pair."""

from __future__ import annotations

import pytest
import torch

from support import Target, check, rand_bool, randn, simple_problem

SIZE = 128  # rows of a row tile, and keys of some key blocks
# One pair in each quarter of a tile, and pairs next to the tiles' borders.
HOLES = [(0, 0), (33, 70), (127, 127), (128, 200), (255, 255), (300, 40)]


def tiles(queries: int, keys: int, *, heads: int = 1) -> torch.Tensor:
    """Return a mask that keeps about half of the tiles."""
    kept = rand_bool(1, heads, -(-queries // SIZE), -(-keys // SIZE), seed=queries)
    kept[..., 0, 0] = True
    return kept.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)[:, :, :queries, :keys]


@pytest.mark.parametrize(
    ("queries", "keys", "is_causal"),
    [(256, 384, False), (320, 300, False), (1300, 300, False), (257, 385, True), (384, 384, True)],
)
@pytest.mark.parametrize("mask_heads", [1, 2, 4])
def test_tiles(queries: int, keys: int, is_causal: bool, mask_heads: int, target: Target) -> None:
    problem = simple_problem(
        target.dtypes[-1], batch=1, queries=queries, keys=keys, causal=is_causal
    )
    problem.mask = tiles(queries, keys, heads=mask_heads)
    problem.bias = randn(1, 2, 1, keys, seed=4)
    check(problem, target)


def test_more_tiles_than_a_word_of_a_map_has(pack_target: Target) -> None:
    problem = simple_problem(pack_target.dtypes[-1], batch=1, queries=4300, keys=66)
    problem.mask = tiles(4300, 66)
    check(problem, pack_target)


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("hole", HOLES, ids=str)
def test_one_pair_that_is_dropped(
    hole: tuple[int, int], head_dim: int, pack_target: Target
) -> None:
    """The pair would have nearly all of its row's weight."""
    row, key = hole
    problem = simple_problem(
        pack_target.dtypes[-1], batch=1, queries=384, keys=256, group=1, head_dim=head_dim
    )
    problem.key[:, key] = 4 * problem.query[:, row]
    problem.mask = torch.ones(1, 1, 384, 256, dtype=torch.bool)
    problem.mask[..., row, key] = False
    check(problem, pack_target)
