# SPDX-License-Identifier: BSD-3-Clause
"""Boolean Q x K masks, with the names and signatures of flash-dmattn 1.2.2."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks

__all__ = ["create_mask", "dynamic_mask"]

_MASK_DTYPES = frozenset({torch.bool, *checks.INTEGERS, *checks.FLOATS})


def top_k_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> Tensor:
    """Keep the ``window_size`` largest biases of each row; the ``dynamic_mask`` of 1.2.2.

    It knows no causality, except through ``attention_mask``. `flash_dmattn.dynamic_mask` does, and
    needs O(K) memory if the bias is the same for every query.

    Args:
        attention_bias: ``(B, h, rows, K)``, any floating dtype.
        attention_mask: bool, broadcasts to ``attention_bias``; False keys are not kept.
        window_size: number of keys to keep; all, if more than K.
        min_dtype: the smallest value of the dtype, which represents a masked key.
        block_size: keep or drop whole blocks of this many keys, by the majority of their keys.

    Returns:
        bool of the shape of ``attention_bias``.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: attention_mask does not broadcast to attention_bias, or a number is invalid.
    """
    scores = checks.tensor("attention_bias", attention_bias).detach()
    if scores.dtype not in checks.FLOATS or scores.dim() == 0:
        raise TypeError(
            "attention_bias must have at least 16 floating-point bits and shape (B, h, rows, K), "
            f"got {checks.described(attention_bias)}"
        )
    window_size = checks.index("window_size", window_size, 0)
    min_dtype = _checked_minimum(min_dtype, scores.dtype)
    block_size = None if block_size is None else checks.index("block_size", block_size)
    if attention_mask is not None:
        _check_mask(attention_mask, scores)
        scores = scores.masked_fill(~attention_mask, min_dtype)
    top = torch.topk(scores, min(window_size, scores.shape[-1]), dim=-1, sorted=False)
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep = keep.scatter_(-1, top.indices, top.values != min_dtype)
    return keep if block_size is None or block_size <= 1 else _by_majority(keep, block_size)


dynamic_mask = top_k_mask


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
) -> Tensor:
    """Make a mask from a bias and a padding mask.

    Args:
        attention_bias: ``(B, h, rows, K)``.
        attention_mask: ``(B, key_len)``; ``(B, query_len)``, for the last keys, with all earlier
            ones kept; or bool, 4-D.
        batch_size, query_len, key_len: B, Q and K.
        window_size, min_dtype, block_size: as in `top_k_mask`.

    Returns:
        bool of the shape of ``attention_bias``.

    Raises:
        TypeError, ValueError: as `top_k_mask`; or a 2-D attention_mask has another shape.
    """
    sizes = {"batch_size": batch_size, "query_len": query_len, "key_len": key_len}
    batch_size, query_len, key_len = (checks.index(name, size, 0) for name, size in sizes.items())
    if attention_mask is not None:
        checks.tensor("attention_mask", attention_mask, "a torch.Tensor or None")
        if attention_mask.dtype not in _MASK_DTYPES:
            raise TypeError(
                "attention_mask must hold booleans, or of 2 dimensions plain numbers, got "
                f"{attention_mask.dtype}"
            )
    if attention_mask is not None and attention_mask.dim() == 2:
        padding = attention_mask.to(torch.bool)
        if padding.shape == (batch_size, query_len) and query_len < key_len:
            padding = torch.nn.functional.pad(padding, (key_len - query_len, 0), value=True)
        if padding.shape != (batch_size, key_len):
            raise ValueError(
                f"attention_mask must have shape ({batch_size}, {key_len}) or ({batch_size}, "
                f"{query_len}), or be 4-D, got {tuple(attention_mask.shape)}"
            )
        attention_mask = padding[:, None, None, :]
    return top_k_mask(attention_bias, attention_mask, window_size, min_dtype, block_size)


def _checked_minimum(min_dtype: float, dtype: torch.dtype) -> float:
    lowest = checks.number("min_dtype", min_dtype, "")
    if not (lowest == -torch.inf or abs(lowest) <= torch.finfo(dtype).max):
        raise ValueError(f"min_dtype must be a number that {dtype} can hold, got {lowest}")
    return lowest


def _check_mask(mask: Tensor, scores: Tensor) -> None:
    checks.tensor("attention_mask", mask, "a torch.Tensor or None")
    if mask.dtype != torch.bool:
        raise TypeError(f"attention_mask must have dtype torch.bool, got {mask.dtype}")
    checks.same_device("attention_mask", mask, "attention_bias' device", scores.device)
    sizes = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    if mask.dim() > scores.dim() or not all(checks.is_one_of(*both, 1) for both in sizes):
        raise ValueError(
            f"attention_mask must broadcast to attention_bias' shape {tuple(scores.shape)}, got "
            f"{tuple(mask.shape)}"
        )


def _by_majority(keep: Tensor, block_size: int) -> Tensor:
    keys = keep.shape[-1]
    blocks = -(-keys // block_size)
    padded = torch.nn.functional.pad(keep, (0, blocks * block_size - keys))
    votes = padded.reshape(*keep.shape[:-1], blocks, block_size).sum(-1)
    sizes = torch.full((blocks,), block_size, dtype=torch.int64, device=keep.device)
    if blocks:
        sizes[-1] = keys - (blocks - 1) * block_size
    majority: Tensor = votes * 2 > sizes
    return majority.repeat_interleave(block_size, -1)[..., :keys]
