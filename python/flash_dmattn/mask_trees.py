# SPDX-License-Identifier: BSD-3-Clause
"""Trees as intervals: in depth-first order the descendants of a node directly follow it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch_state import is_checkable
from .mask_checks import check_integers


class TreeOrder(NamedTuple):
    """A forest in depth-first order: the node at each position, and the end of its descendants."""

    nodes: Tensor  # int64 (B, N)
    end: Tensor  # int64 (B, N)


def depth_first(parents: Tensor) -> TreeOrder:
    """Order the nodes of each forest depth first, siblings and roots by their numbers.

    It takes O(N log N): ancestors are reached by doubling the distance. Values are checked on CPUs
    only. On other devices invalid values give a meaningless order of all nodes.

    Args:
        parents: integers ``(B, N)``, -1 for a root.

    Raises:
        TypeError: parents is not an integer tensor.
        ValueError: parents is not 2-D, a node is its own ancestor, or a parent is not a node.
    """
    check_integers("parents", parents, 2, "(B, N)")
    count = parents.shape[1]
    if not is_checkable(parents):
        parents = parents.clamp(-1, max(count - 1, 0))
    elif parents.numel() and (int(parents.min()) < -1 or int(parents.max()) >= count):
        wrong = parents[(parents < -1) | (parents >= count)][0]
        raise ValueError(
            f"parents must be nodes from 0 to {count - 1}, or -1 for a root, got {int(wrong)}"
        )
    # Node number N is a virtual parent of all roots and of itself.
    above = torch.cat([parents, parents.new_zeros((len(parents), 1))], 1).to(torch.int64)
    above = torch.where(above < 0, count, above)
    above[:, count] = count
    steps = _ancestors(above)
    sizes = torch.ones_like(above)
    for ancestor in steps:
        # Adds the descendants up to twice as far away.
        sizes = sizes.scatter_add(1, ancestor, sizes)
    place = _behind_parents(above, sizes)
    for ancestor in steps:
        place = place + place.gather(1, ancestor)
    place = place[:, :count] - 1  # the first root directly follows the virtual node
    nodes = place.argsort(1)
    return TreeOrder(nodes, (place + sizes[:, :count]).gather(1, nodes))


def _ancestors(above: Tensor) -> list[Tensor]:
    """Return the ancestors 1, 2, 4, ... steps above each node, until all are the virtual node."""
    count = above.shape[1] - 1
    steps, ancestor = [], above
    for _ in range(count.bit_length()):
        steps.append(ancestor)
        ancestor = ancestor.gather(1, ancestor)
    if is_checkable(above) and not bool((ancestor == count).all()):
        wrong = (ancestor != count).nonzero()[0]
        raise ValueError(
            f"parents must lead to a root, but in row {int(wrong[0])} node {int(wrong[1])} is, or "
            "has, an ancestor of itself"
        )
    return steps


def _behind_parents(above: Tensor, sizes: Tensor) -> Tensor:
    """Return each node's distance from its parent in the order; 0 for the virtual node."""
    count = above.shape[1] - 1
    families = above.clone()
    families[:, count] = count + 1
    families, members = families.sort(dim=1, stable=True)
    total = sizes.gather(1, members).cumsum(1)
    earlier = torch.nn.functional.pad(total[:, :-1], (1, 0))
    is_first = torch.nn.functional.pad(families[:, 1:] != families[:, :-1], (1, 0), value=True)
    # Totals only grow, so cummax gives the start of the current family.
    siblings = earlier - torch.where(is_first, earlier, 0).cummax(1).values
    behind = torch.zeros_like(sizes).scatter(1, members, siblings + 1)
    behind[:, count] = 0
    return behind
