# SPDX-License-Identifier: BSD-3-Clause
"""What a layer keeps of the tokens that it has seen, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..arguments import index

__all__ = ["AttentionCache"]

_NAMES = ("key", "value", "bias")
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_LENGTH_DIMENSION = {"key": 1, "value": 1, "bias": 3}


class AttentionCache:
    """Keys, values and biases of one layer's tokens, in the order in which they came.

    A bias belongs to its key alone, so it is computed once and kept; the selection of the
    ``window_size`` largest is made anew for each step, over all of them. For inference: what is
    appended must not require a gradient.

    With ``max_length`` the memory is allocated once, by the first `append`; without, it doubles
    when it is full.

    Attributes:
        length: tokens that it holds.
        max_length: tokens that it can hold, or None.
    """

    length: int
    max_length: int | None

    def __init__(self, max_length: int | None = None) -> None:
        """Make an empty cache.

        Raises:
            TypeError: max_length is not an integer.
            ValueError: max_length is less than 1.
        """
        if max_length is not None:
            max_length = index("max_length", max_length, most=checks.MOST_ROWS)
            if max_length < 1:
                raise ValueError(
                    f"max_length must be at least 1, or None to grow, got {max_length}"
                )
        self.length = 0
        self.max_length = max_length
        self._buffers: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        """Show how full it is."""
        return (
            f"AttentionCache(length={self.length}, capacity={self.capacity}, "
            f"max_length={self.max_length})"
        )

    @property
    def capacity(self) -> int:
        """Tokens for which memory is allocated."""
        return self._buffers["key"].shape[1] if self._buffers else 0

    def append(self, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the tokens that follow, and return key, value and bias of all.

        Args:
            key, value: ``(B, N, Hk, D)``.
            bias: ``(B, Hk, 1, N)``.

        Returns:
            Views ``(B, length, Hk, D)``, the same of value, and ``(B, Hk, 1, length)``. The next
            `append` leaves them as they are; `truncate` and `append` after it may overwrite them.

        Raises:
            TypeError: an argument is not a tensor of floating-point numbers.
            ValueError: a tensor requires a gradient, does not fit the others, differs in shape,
                dtype or device from what the cache holds, or max_length is exceeded.
        """
        tokens = dict(zip(_NAMES, (key, value, bias), strict=True))
        _check_shapes(tokens)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tokens.values()):
            raise ValueError(
                "cache: cached keys and values are for inference, and have no gradient; call under "
                "torch.no_grad() or torch.inference_mode()"
            )
        self._check(tokens)
        length = self.length + key.shape[1]
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"cache has max_length={self.max_length} and holds {self.length} tokens; "
                f"{key.shape[1]} more do not fit"
            )
        if not self._buffers or length > self.capacity:
            self._grow(tokens, length)
        for name, added in tokens.items():
            self._part(name, self.length, length).copy_(added)
        self.length = length
        every_key, every_value, every_bias = (self._part(name, 0, length) for name in _NAMES)
        return every_key, every_value, every_bias

    def reorder(self, indices: Tensor) -> None:
        """Make sequence i what sequence ``indices[i]`` was: for beam search, or to drop some.

        Args:
            indices: int64 or int32 ``(new B,)``.

        Raises:
            TypeError: indices is not a tensor of integers.
            ValueError: the number of dimensions is wrong, or an index, where they are on the CPU,
                is none of a sequence.
        """
        checks.tensor("indices", indices, "a torch.Tensor of integers")
        if indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"indices must have dtype torch.int64 or torch.int32, got {indices.dtype}"
            )
        if indices.dim() != 1:
            raise ValueError(f"indices must have shape (B,), got {tuple(indices.shape)}")
        if indices.is_meta:
            raise ValueError("indices must have values, got a meta tensor")
        self._check_indices(indices)
        with torch.inference_mode(False):
            self._buffers = {
                name: buffer.index_select(0, indices.to(buffer.device))
                for name, buffer in self._buffers.items()
            }

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens; 0 empties the cache, its memory stays.

        Raises:
            ValueError: length is negative, or more than the cache holds.
        """
        length = index("length", length)
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be from 0 to {self.length}, got {length}")
        self.length = length

    def _check_indices(self, indices: Tensor) -> None:
        # Of a GPU they would have to be waited for; there index_select checks them itself.
        if not self._buffers or indices.device.type != "cpu" or torch.compiler.is_compiling():
            return
        batch = self._buffers["key"].shape[0]
        outside = indices[(indices < 0) | (indices >= batch)]
        if outside.numel():
            raise ValueError(
                f"indices must be from 0 to {batch - 1}, as the cache holds {batch} sequences, "
                f"got {int(outside[0])}"
            )

    def _check(self, tokens: dict[str, Tensor]) -> None:
        for name, added in tokens.items():
            held = self._buffers.get(name)
            if held is None:
                continue
            dimension = _LENGTH_DIMENSION[name]
            wanted, got = list(held.shape), list(added.shape)
            if len(got) == len(wanted):
                wanted[dimension] = got[dimension]
            if got != wanted:
                raise ValueError(f"cache holds {name} of shape {wanted} but for N, got {got}")
            if (added.dtype, added.device) != (held.dtype, held.device):
                raise ValueError(
                    f"{name} must be {held.dtype} on {held.device}, as the cache holds it, got "
                    f"{added.dtype} on {added.device}"
                )

    def _grow(self, tokens: dict[str, Tensor], length: int) -> None:
        capacity = max(length, 2 * self.capacity) if self.max_length is None else self.max_length
        grown = {}
        for name, added in tokens.items():
            shape = list(added.shape)
            shape[_LENGTH_DIMENSION[name]] = capacity
            # Tensors made in inference mode cannot be written to outside of it, others anywhere.
            with torch.inference_mode(False):
                grown[name] = added.new_empty(shape)
            if self._buffers:
                held = self._part(name, 0, self.length)
                grown[name].narrow(_LENGTH_DIMENSION[name], 0, self.length).copy_(held)
        self._buffers = grown

    def _part(self, name: str, start: int, end: int) -> Tensor:
        return self._buffers[name].narrow(_LENGTH_DIMENSION[name], start, end - start)


def _check_shapes(tokens: dict[str, Tensor]) -> None:
    for name, tensor in tokens.items():
        if checks.tensor(name, tensor).dtype not in _DTYPES:
            raise TypeError(f"{name} must be of 16 to 64 floating-point bits, got {tensor.dtype}")
    key = tokens["key"]
    if key.dim() != 4:
        raise ValueError(f"key must have shape (B, N, Hk, D), got {tuple(key.shape)}")
    batch, added, heads, _ = key.shape
    for name in ("value", "bias"):
        tensor = tokens[name]
        wanted, got = tuple(key.shape), tuple(tensor.shape)
        if name == "bias":
            # A layer's own key_bias may have another number of heads.
            wanted = (batch, got[1] if len(got) == 4 else heads, 1, added)
        if got != wanted:
            raise ValueError(f"{name} must have shape {wanted} to go with key, got {got}")
        if tensor.device != key.device:
            raise ValueError(
                f"{name} must be on key's device {key.device}, got a tensor on {tensor.device}"
            )
