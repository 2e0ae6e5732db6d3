# SPDX-License-Identifier: BSD-3-Clause
"""The start of the kernel that does what `.stepping` does in some thirty."""

import triton
from torch import Tensor

from ..backends.triton.kernels.insert import insert
from .rows import Rows

__all__ = ["launch_insert"]

# Of a longer row of biases parts are looked at one after another.
_MOST_ROWS_AT_ONCE = 4096


def launch_insert(held: Rows, new: Rows, counter: Tensor) -> None:
    """Write one token into rows of which each set belongs to one head of the bias.

    Args:
        held: the rows, contiguous.
        new: the token; its position is not read.
        counter: int64 ``(3,)``: the position of the token, which becomes the next one's; what is
            left alone; and 0.
    """
    batch, rows, kv_heads, dim = held.key.shape
    sets = held.position.shape[1]
    insert[(batch * sets,)](
        *held,
        *new[:3],
        counter,
        rows,
        *new.key.stride()[::2],
        *new.value.stride()[::2],
        *new.bias.stride()[:2],
        SETS=sets,
        DIM=dim,
        WIDTH=kv_heads // sets * dim,
        BLOCK_ROWS=min(_MOST_ROWS_AT_ONCE, triton.next_power_of_2(rows)),
        BLOCK_WIDTH=triton.next_power_of_2(kv_heads // sets * dim),
        num_warps=4 if rows <= 1024 else 8,
    )
