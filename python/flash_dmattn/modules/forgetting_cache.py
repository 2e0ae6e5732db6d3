# SPDX-License-Identifier: BSD-3-Clause
"""The cache of a forgetting layer, for decoding and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import checks
from ..arguments import writable
from ..dispatch_state import has_values
from ..forgetting import check_gates, check_log_forget, checked_prune
from ..forgetting_formula import bounded_gates, decay_mask
from ..masks import IntervalMask
from ..refusals import current_backward, refuse_recomputation
from ..state.chunks import check_left, check_sequences
from ..state.rows import chosen
from ..state.stored import check_names, check_setting
from ..wrong_keywords import with_keyword_hints

__all__ = ["ForgettingCache", "check_gated_tokens"]

_FIELDS = ("key", "value", "total")
_LENGTH_DIMENSION = {"key": 1, "value": 1, "total": 2}
_SETTINGS = ("capacity", "rollback", "prune", "length")
_MIN_ROWS = 64
_Result = TypeVar("_Result")


class _Held(NamedTuple):
    """Rows of the last consecutive tokens, and room for more.

    Buffers are key and value ``(B, room, Hk, D)``, and total, float64 ``(B, G, room)``: the gate
    sum at each token, and inf at padding.
    """

    buffers: dict[str, Tensor]
    # float64 (B, G, 1 + n): the gate sums before each of the last n tokens, which can be removed,
    # and at the last token
    sums: Tensor
    rows: int  # filled rows
    length: int  # tokens seen

    @property
    def room(self) -> int:
        return self.buffers["key"].shape[1]

    @property
    def carries_gradients(self) -> bool:
        """Say whether any held tensor requires a gradient."""
        return any(tensor.requires_grad for tensor in (*self.buffers.values(), self.sums))

    def part(self, name: str, start: int, end: int) -> Tensor:
        return self.buffers[name].narrow(_LENGTH_DIMENSION[name], start, end - start)

    def filled(self) -> dict[str, Tensor]:
        return {name: self.part(name, 0, self.rows) for name in _FIELDS}

    def changed(self, change: Callable[[Tensor], Tensor]) -> _Held:
        """Return a copy with ``change`` applied to each tensor."""
        buffers = {name: change(buffer) for name, buffer in self.buffers.items()}
        return self._replace(buffers=buffers, sums=change(self.sums))

    @property
    def revocable(self) -> int:
        """The number of last tokens that can be removed."""
        return self.sums.shape[-1] - 1

    def without(self, count: int) -> _Held:
        """Return this without its last ``count`` tokens."""
        sums = self.sums.narrow(-1, 0, self.sums.shape[-1] - count)
        left = self._replace(sums=sums, rows=self.rows - count, length=self.length - count)
        # Buffers without room may belong to a graph, and are never written.
        return left._replace(buffers=left.filled()) if self.rows == self.room else left


@with_keyword_hints
class ForgettingCache:
    """The cache of one `ForgettingAttention`: the tokens that have not decayed for all its heads.

    A token is held until the gates of every head have decayed it below the layer's ``prune``. So
    results equal those of one call over all tokens, whatever their number. All heads and sequences
    hold as many rows as the longest memory among them. The decay is read from the device, which
    synchronizes, only when the memory is full. Decayed tokens are then dropped, and the memory
    becomes twice the size of the rest. In training, which writes nothing in place, every call reads
    the decay.

    With a ``capacity`` a token attends to at most the last ``capacity`` tokens, including itself,
    whether decayed or not. Older tokens are dropped. Memory is then constant, twice the capacity,
    and nothing is read from the device. Results are the same as long as no key lives longer.

    Attributes:
        capacity: number of tokens that a token can see, or None.
        rollback: number of last tokens that `truncate` can remove.
    """

    capacity: int | None
    rollback: int

    def __init__(self, capacity: int | None = None, *, rollback: int = 0) -> None:
        """Make an empty cache.

        Args:
            capacity: number of tokens that a token can see, including itself; None for all that
                have not decayed.
            rollback: number of last tokens that `truncate` must be able to remove, such as drafts.
                Tokens that these have let decay are held until then.

        Raises:
            TypeError: a number is not an integer.
            ValueError: capacity is less than 1, or rollback is negative.
        """
        if capacity is not None:
            capacity = checks.index("capacity", capacity, 1, checks.MAX_ROWS)
        self.capacity = capacity
        self.rollback = checks.index("rollback", rollback, 0, checks.MAX_ROWS)
        self._held: _Held | None = None
        self._prune: float | None = None
        self._made_during = current_backward()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled state."""
        self.__dict__.update(state)
        self._made_during = current_backward()
        if self._held is not None:
            with torch.inference_mode(False):
                self._held = self._held.changed(writable)

    def __repr__(self) -> str:
        """Show the numbers of tokens seen and held."""
        return f"ForgettingCache(length={self.length}, rows={self.rows}, capacity={self.capacity})"

    @property
    def length(self) -> int:
        """Number of tokens seen."""
        return 0 if self._held is None else self._held.length

    @property
    def rows(self) -> int:
        """Number of tokens held."""
        return 0 if self._held is None else self._held.rows

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return int64 ``(count,)``: the positions of the next tokens."""
        return torch.arange(self.length, self.length + count, device=device)

    def taken_in(
        self,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor, IntervalMask | None], _Result],
        *,
        prune: float | None,
        padding: Tensor | None = None,
    ) -> _Result:
        """Add the next tokens, unless ``attend`` raises, and return its result.

        Args:
            key, value: ``(B, N, Hk, D)``.
            log_forget: ``(B, {H|Hk}, N)``, as in `forgetting_bias`.
            attend: called with the keys, the values, the bias and the mask for the attention of the
                tokens, causal and aligned bottom right. The next call may overwrite them.
            prune: as in `forgetting_bias`, equal in all calls.
            padding: bool ``(B, N)``, True is a token.

        Raises:
            TypeError: a tensor has the wrong type or dtype.
            ValueError: a tensor does not fit the others or the held ones, or prune differs.
            RuntimeError: the call is part of a backward pass, as in activation checkpointing, and
                the cache was made before it.
        """
        self._refuse_recomputation()
        prune = checked_prune(prune)
        self._check(key, value, log_forget, prune, padding)
        new = key, value, log_forget
        if self._held is not None and self._held.carries_gradients and not torch.is_grad_enabled():
            # Gradients still flow to the held tokens, but not to the new ones.
            with torch.inference_mode(False), torch.enable_grad():
                detached = (writable(tensor.detach()) for tensor in new)
                following, seen = self._followed_by(*detached, prune=prune, padding=padding)
        else:
            following, seen = self._followed_by(*new, prune=prune, padding=padding)
        result = attend(*seen)
        self._held, self._prune = following, prune
        return result

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i by sequence ``indices[i]``: for beam search, or to drop sequences.

        Args:
            indices: int64 or int32 ``(new B,)``.

        Raises:
            TypeError: indices is not a tensor of integers.
            ValueError: the number of dimensions is wrong, or an index is out of range, which is
                checked on CPUs only.
        """
        held = self._held
        check_sequences(indices, None if held is None else held.sums, "the cache")
        self._refuse_recomputation()
        if held is None:
            return
        with torch.inference_mode(False):
            self._held = held.changed(lambda tensor: writable(chosen(tensor, indices)))

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens; 0 empties the cache.

        Raises:
            TypeError: length is not an integer.
            ValueError: length is negative, exceeds the cache's, or would remove more than
                ``rollback`` tokens.
        """
        held = self._held
        revocable = 0 if held is None else held.revocable
        length = checks.index("length", length)
        check_left(length, self.length, revocable, f"ForgettingCache(rollback={self.rollback})")
        self._refuse_recomputation()
        if length == 0:
            self.reset()
        elif held is not None:
            self._held = held.without(held.length - length)

    def reset(self) -> None:
        """Drop all tokens."""
        self._refuse_recomputation()
        self._held, self._prune = None, None

    def detach(self) -> None:
        """Detach the held tensors from their gradients, between training steps on a stream."""
        if self._held is not None:
            self._held = self._held.changed(Tensor.detach)

    def state_dict(self) -> dict[str, Any]:
        """Return a state for `load_state_dict`, in separate memory.

        It holds only numbers and tensors, which ``torch.load(..., weights_only=True)`` can read.
        """
        state: dict[str, Any] = {
            "capacity": self.capacity,
            "rollback": self.rollback,
            "prune": self._prune,
            "length": self.length,
        }
        if self._held is not None:
            for name, tensor in {**self._held.filled(), "sums": self._held.sums}.items():
                state[name] = tensor.detach().clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`.

        Raises:
            TypeError: a field has the wrong type or dtype.
            ValueError: its capacity or rollback differs; a field is missing or unknown, or has the
                wrong shape.
        """
        tensors = (*_FIELDS, "sums")
        check_names(state, _SETTINGS, tensors)
        for name in _SETTINGS[:2]:
            check_setting(state, name, getattr(self, name), "ForgettingCache")
        length = checks.index("length of state", state["length"], 0, checks.MAX_ROWS)
        prune = checked_prune(state["prune"])
        held = None
        if any(name in state for name in tensors):
            check_names(state, (*_SETTINGS, *tensors))
            key, value, total, sums = (checks.tensor(name, state[name]) for name in tensors)
            check_gated_tokens(key, value, total)
            if total.dtype != torch.float64 or sums.dtype != torch.float64:
                raise TypeError(
                    f"total and sums of state must have dtype torch.float64, got {total.dtype} and "
                    f"{sums.dtype}"
                )
            rows = key.shape[1]
            most = 1 + min(self.rollback, rows)
            of_tokens = tuple(sums.shape)
            if of_tokens[:-1] != tuple(total.shape[:2]) or not 1 <= of_tokens[-1] <= most:
                raise ValueError(
                    f"sums of state must have shape {(*total.shape[:2], most)}, or a smaller last "
                    f"size, got {of_tokens}"
                )
            if length < rows:
                raise ValueError(
                    f"length of state must be at least {rows}, as key has, got {length}"
                )
            buffers = {"key": key, "value": value, "total": total}
            with torch.inference_mode(False):
                held = _Held(buffers, sums, rows, length).changed(lambda t: t.detach().clone())
        self._held, self._prune = held, prune

    def _refuse_recomputation(self) -> None:
        refuse_recomputation("a ForgettingCache", self._made_during, None)

    def _followed_by(
        self,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        *,
        prune: float | None,
        padding: Tensor | None,
    ) -> tuple[_Held, tuple[Tensor, Tensor, Tensor, IntervalMask | None]]:
        """Return the state after these tokens, without changing this one, and their inputs."""
        tokens = None if padding is None else padding.unsqueeze(1)
        gates = bounded_gates(log_forget, prune, tokens)
        earlier = gates.new_zeros((*gates.shape[:2], 1)) if self._held is None else self._held.sums
        before = earlier[..., -1:]
        total = torch.cat([before, gates], -1).cumsum(-1)
        kept = total[..., 1:]
        if tokens is not None:
            kept = kept.masked_fill(~tokens, torch.inf)
        sums = torch.cat([earlier[..., :-1], total], -1)[..., -1 - self.rollback :]
        following, seen = self._extended({"key": key, "value": value, "total": kept}, sums, prune)
        # A constant per row does not change softmax. It keeps the bias small for long sequences, so
        # for one token float32 is sufficient.
        bias = (before - seen["total"]).unsqueeze(2)
        if log_forget.shape[-1] == 1:
            bias = bias.float()
        mask = None
        if prune is not None or self.capacity is not None:
            row_and_key_sums = total[..., 1:].detach(), seen["total"].detach()
            mask = decay_mask(*row_and_key_sums, prune, self.capacity)
        return following, (seen["key"], seen["value"], bias, mask)

    def _extended(
        self, new: dict[str, Tensor], sums: Tensor, prune: float | None
    ) -> tuple[_Held, dict[str, Tensor]]:
        """Return the state after new tokens, without changing this one, and what these can see."""
        held, count = self._held, new["key"].shape[1]
        rows, length = self.rows, self.length + count
        with torch.inference_mode(False):
            sums = writable(sums)
        records = torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in new.values())
            or (held is not None and held.carries_gradients)
        )
        if held is not None and not records and rows + count <= held.room:
            for name, added in new.items():
                held.part(name, rows, rows + count).copy_(added)
            following = held._replace(sums=sums, rows=rows + count, length=length)
            return following, following.filled()
        seen = new
        if held is not None:
            seen = {
                name: torch.cat([part, new[name]], _LENGTH_DIMENSION[name])
                for name, part in held.filled().items()
            }
        first = self._first_needed(seen["total"].detach(), sums.detach(), prune)
        kept = rows + count - first
        parts = {name: t.narrow(_LENGTH_DIMENSION[name], first, kept) for name, t in seen.items()}
        if not records:
            room = max(2 * kept, _MIN_ROWS)
            if self.capacity is not None:
                room = 2 * self.capacity + self.rollback
            parts = {
                name: _copy_with_room(part, name, max(room, kept)) for name, part in parts.items()
            }
        return _Held(parts, sums, kept, length), seen

    def _first_needed(self, total: Tensor, sums: Tensor, prune: float | None) -> int:
        """Return the number of first rows that no later token can see, even after a rollback."""
        fixed = total.shape[-1] - (sums.shape[-1] - 1)
        if self.capacity is not None:
            return max(0, fixed - self.capacity + 1)
        total = total[..., :fixed]
        if prune is None or not total.numel() or not has_values(total):
            return 0
        is_alive = (sums[..., :1] - total >= prune).flatten(0, 1).any(0)
        # The first row that has not decayed; all rows, if there is none.
        return int(torch.nn.functional.pad(is_alive, (0, 1), value=True).byte().argmax())

    def _check(
        self,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        prune: float | None,
        padding: Tensor | None,
    ) -> None:
        check_gated_tokens(key, value, log_forget)
        check_log_forget(log_forget, None, padding)
        if prune is not None:
            check_gates(log_forget)
        held = self._held
        if held is None:
            return
        if prune != self._prune:
            raise ValueError(
                f"prune must be {self._prune}, as in the earlier calls with this cache, got {prune}"
            )
        for name, tensor in (("key", key), ("value", value), ("log_forget", log_forget)):
            buffer = held.buffers["total" if name == "log_forget" else name]
            dimension = 2 if name == "log_forget" else 1
            wanted = list(buffer.shape)
            wanted[dimension] = tensor.shape[dimension]
            if list(tensor.shape) != wanted:
                raise ValueError(
                    f"the cache holds {name} of shape {wanted} but for N, got {list(tensor.shape)}"
                )
            if name != "log_forget" and tensor.dtype != buffer.dtype:
                raise ValueError(
                    f"{name} must be {buffer.dtype}, as in the cache, got {tensor.dtype}"
                )
            if tensor.device != buffer.device:
                raise ValueError(
                    f"{name} must be on {buffer.device}, as in the cache, got a tensor on "
                    f"{tensor.device}"
                )


def check_gated_tokens(key: Tensor, value: Tensor, log_forget: Tensor) -> None:
    """Raise unless these are keys, values and gates of the same tokens."""
    for name, tensor in (("key", key), ("value", value), ("log_forget", log_forget)):
        if checks.tensor(name, tensor).dtype not in checks.FLOATS:
            raise TypeError(f"{name} must be of 16 to 64 floating-point bits, got {tensor.dtype}")
    if key.dim() != 4:
        raise ValueError(f"key must have shape (B, N, Hk, D), got {tuple(key.shape)}")
    if value.shape != key.shape:
        raise ValueError(
            f"value must have key's shape {tuple(key.shape)}, got {tuple(value.shape)}"
        )
    batch, count, heads, _ = key.shape
    got = tuple(log_forget.shape)
    if len(got) != 3 or got[0] != batch or got[2] != count or got[1] % heads:
        raise ValueError(
            f"log_forget must have shape (B, {{H|Hk}}, N) = ({batch}, {{H|{heads}}}, {count}), got "
            f"{got}"
        )


def _copy_with_room(part: Tensor, name: str, room: int) -> Tensor:
    shape, dimension = list(part.shape), _LENGTH_DIMENSION[name]
    shape[dimension] = room
    # Inference tensors cannot be written outside of inference mode; others can anywhere.
    with torch.inference_mode(False):
        made = torch.empty(shape, dtype=part.dtype, device=part.device)
    made.narrow(dimension, 0, part.shape[dimension]).copy_(part)
    return made


# Lets torch.load(weights_only=True) load a pickled cache.
torch.serialization.add_safe_globals([ForgettingCache, _Held])
