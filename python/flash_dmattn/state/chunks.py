# SPDX-License-Identifier: BSD-3-Clause
"""Conversion of the tokens that callers pass to a state into rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..arguments import autocast_dtype, to_4d
from ..dispatch_state import is_checkable
from ..masks import IntervalMask
from .rows import Rows

__all__ = [
    "as_rows",
    "check_heads",
    "check_left",
    "check_like",
    "check_sequences",
    "described_call",
    "needs_gradient",
]

_GROWS_ONLY = (
    "what a query sees must only grow, as the keys that are dropped are forgotten: sliding "
    "windows, documents and other masks need all keys; use flash_dmattn_func with them, or a state "
    "for each document"
)


def as_rows(
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    padding: Tensor | None,
    positions: Tensor,
    heads: int | None,
    *,
    counts_dropped: bool = False,
    bias_name: str = "bias",
) -> Rows:
    """Return tokens as rows, with a bias of -inf for padding.

    Args:
        key, value, bias, padding: as in `KeptKeys.attend`.
        positions: int64 ``(N,)``.
        heads: H, if known.
        counts_dropped: a token with a bias of -inf is not padding. Its bias becomes NaN, which is
            not kept either.
        bias_name: the caller's name of the bias.

    Raises:
        TypeError, ValueError: as `KeptKeys.attend`.
    """
    for name, tensor in (("key", key), ("value", value), (bias_name, bias)):
        if checks.tensor(name, tensor).dtype not in checks.FLOATS:
            raise TypeError(f"{name} must be of 16 to 64 floating-point bits, got {tensor.dtype}")
        checks.same_device(name, tensor, "key's device", key.device)
    if value.shape != key.shape:
        raise ValueError(
            f"value must have shape {tuple(key.shape)} to go with key, got {tuple(value.shape)}"
        )
    batch, count, kv_heads, _ = key.shape
    query_heads = kv_heads if heads is None else heads
    if bias.dim() == 3 and heads is None:
        query_heads = bias.shape[1]
    sizes = {"batch": batch, "heads": query_heads, "kv_heads": kv_heads, "keys": count}
    bias = to_4d(bias_name, bias, **sizes)
    _check_bias(bias_name, bias, batch, count, kv_heads, heads)
    bias = bias.expand(batch, -1, -1, -1)
    if counts_dropped:
        bias = bias.masked_fill(bias == -torch.inf, torch.nan)
    if padding is not None:
        bias = bias.masked_fill(~_checked_padding(padding, key)[:, None, None], -torch.inf)
    sets = 1 if bias.shape[1] == 1 else kv_heads
    return Rows(key, value, bias, positions.expand(batch, sets, count))


def check_heads(name: str, heads: Tensor) -> None:
    """Raise unless this is a 4-D tensor."""
    if checks.tensor(name, heads).dim() != 4:
        raise ValueError(f"{name} must have shape (B, N, heads, D), got {tuple(heads.shape)}")


def check_like(held: Rows, others: Rows, name: str = "") -> None:
    """Raise ValueError unless rows fit the held ones."""
    for field, dimension in zip(Rows._fields, (1, 1, 3, 2), strict=True):
        one: Tensor = getattr(held, field)
        other: Tensor = getattr(others, field)
        wanted = list(one.shape)
        wanted[dimension] = other.shape[dimension]
        of = f"{field} of {name}" if name else "bias" if field == "position" else field
        if list(other.shape) != wanted:
            hint = "" if name else "; each layer needs a cache or state of its own"
            raise ValueError(
                f"{of} must have the shape {list(one.shape)} that is held, but for the number of "
                f"tokens, got {list(other.shape)}{hint}"
            )
        if (other.dtype, other.device) != (one.dtype, one.device):
            raise ValueError(
                f"{of} must be {one.dtype} on {one.device}, as what is held, got {other.dtype} on "
                f"{other.device}"
            )


def check_sequences(indices: Tensor, held: Tensor | None, holder: str) -> None:
    """Raise unless these are indices of sequences in the batch of a held tensor, if there is one.

    Values on a GPU are not checked here, which would synchronize; index_select checks them.
    """
    checks.tensor("indices", indices, "a torch.Tensor of integers")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must have dtype torch.int64 or torch.int32, got {indices.dtype}")
    if indices.dim() != 1:
        raise ValueError(f"indices must have shape (B,), got {tuple(indices.shape)}")
    if held is not None and not held.is_meta and indices.is_meta:
        raise ValueError("indices must have values, got a meta tensor")
    if held is None or not is_checkable(indices):
        return
    batch = held.shape[0]
    outside = indices[(indices < 0) | (indices >= batch)]
    if outside.numel():
        raise ValueError(
            f"indices must be from 0 to {batch - 1}, as {holder} holds {batch} sequences, got "
            f"{int(outside[0])}"
        )


def check_left(length: int, held: int, revocable: int, holder: str) -> None:
    """Raise ValueError unless a cache can remove all but its first tokens.

    Args:
        length: number of these first tokens.
        held: number of tokens seen.
        revocable: number of last tokens that it can remove; it can always remove all.
        holder: text of the constructor call.
    """
    if not 0 <= length <= held:
        raise ValueError(f"length must be from 0 to {held}, got {length}")
    if 0 < length < held - revocable:
        raise ValueError(
            f"length must be 0 or at least {held - revocable}, as of the {held} tokens that the "
            f"cache has seen {holder} can take back {revocable}, got {length}"
        )


def described_call(
    query: Tensor, sink: Tensor | None, settings: tuple[object, ...]
) -> tuple[object, ...]:
    """Return the properties by which attention accepts or refuses a call, for comparison.

    Types come first, because attention accepts 1.0 and refuses True, which are equal. This also
    avoids comparing a tensor in place of a number.
    """
    tensors = (query,) if sink is None else (query, sink)
    types = tuple(type(setting) for setting in settings)
    of_tensors = ((t.shape, t.dtype, t.device) for t in tensors)
    return (types, *settings, autocast_dtype(query), *of_tensors)


def needs_gradient(*parts: Rows | None) -> bool:
    """Say whether writing these rows in place would lose a gradient."""
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for rows in parts if rows is not None for tensor in rows
    )


def _check_bias(
    name: str, bias: Tensor, batch: int, count: int, kv_heads: int, heads: int | None
) -> None:
    got = tuple(bias.shape)
    if bias.shape[2] != 1:
        raise ValueError(
            f"{name} must have a number for each key, ({{B|1}}, {{H|Hk|1}}, 1, N), got {got}: with "
            "a row for each query, later queries may see keys that earlier ones have dropped"
        )
    groups = bias.shape[1] // kv_heads * kv_heads
    fits = (
        checks.is_one_of(bias.shape[0], 1, batch)
        and checks.is_one_of(bias.shape[1], 1, kv_heads, groups if heads is None else heads)
        and bias.shape[3] == count
    )
    if not fits:
        raise ValueError(
            f"{name} must have shape ({{B|1}}, {{H|Hk|1}}, 1, N) with B={batch}, Hk={kv_heads}, "
            f"N={count}, got {got}"
        )


def _checked_padding(padding: Any, key: Tensor) -> Tensor:
    if isinstance(padding, IntervalMask):
        raise TypeError(f"padding must be bool (B, N) or None, got an IntervalMask; {_GROWS_ONLY}")
    if checks.tensor("padding", padding).dtype != torch.bool:
        raise TypeError(
            f"padding must have dtype torch.bool (True for tokens), got {padding.dtype}"
        )
    if padding.shape != key.shape[:2]:
        raise ValueError(
            f"padding must have shape {tuple(key.shape[:2])}, that of the new tokens, got "
            f"{tuple(padding.shape)}; {_GROWS_ONLY}"
        )
    checks.same_device("padding", padding, "key's device", key.device)
    checked: Tensor = padding
    return checked
