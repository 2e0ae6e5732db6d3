# SPDX-License-Identifier: BSD-3-Clause
"""The rows that a state holds, and their changes, in place or as copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .. import checks, dispatch_state
from ..arguments import writable
from ..checks import MAX_ROWS, index
from ..record import KeyCounts
from ..refusals import current_backward, refuse_recomputation
from .chunks import as_rows, check_heads, check_like, check_sequences, needs_gradient
from .rows import (
    NOWHERE,
    Rows,
    chosen,
    concatenated,
    empty_rows,
    in_order,
    kept_rows,
    mark_dropped,
    narrowed,
)
from .stepping import insert
from .stored import read_state, state_of

if TYPE_CHECKING:
    from typing_extensions import Self

_Result = TypeVar("_Result")


class HeldRows:
    """The base of `KeptKeys`: rows, a counter, and all operations but attention and merging."""

    window_size: int
    keep_last: int = 0  # for states that were pickled without the attribute
    keep_first: int = 0
    rollback: int

    def __init__(
        self,
        window_size: int,
        *,
        keep_last: int = 0,
        keep_first: int = 0,
        rollback: int = 0,
        start: int = 0,
    ) -> None:
        """Make an empty state.

        Args:
            window_size: number of keys that a query keeps, at least 1; or 0 with keep_last or
                keep_first.
            keep_last, keep_first: also keep this many of the last and first tokens, as in
                `flash_dmattn_func`.
            rollback: number of last tokens that `forget` must be able to remove. They are kept in
                addition to older ones, so memory is for ``window_size + keep_last + keep_first +
                rollback``.
            start: position of the first token, which distinguishes tokens of several states in
                `merge`.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: window_size is too small, or another number is negative.
        """
        self.keep_last = index("keep_last", keep_last, 0, MAX_ROWS)
        self.keep_first = index("keep_first", keep_first, 0, MAX_ROWS)
        least = 0 if self.keep_last or self.keep_first else 1
        self.window_size = index("window_size", window_size, least, MAX_ROWS)
        self.rollback = index("rollback", rollback, 0, MAX_ROWS)
        self._start = index("start", start, 0)
        # Older rows, and the last ``rollback`` tokens.
        self._kept: Rows | None = None
        self._recent: Rows | None = None
        # int64 (3,): the position of the next token; the least position that `forget` can return
        # to; and 0, the step kernel's count of programs. It is on the device, so that replays of a
        # graph with a captured step advance it.
        self._counter: Tensor | None = None
        # Whether the rows are known to be in the order of their positions. Steps in place put a
        # token at any row. Python does not notice the steps of a replayed graph.
        self._is_ordered = True
        # The last call of `_taken_in` that attention has accepted.
        self._accepted: tuple[object, ...] | None = None
        self._made_during = current_backward()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy or pickle, without settings of a call."""
        return {**self.__dict__, "_accepted": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled state."""
        self.__dict__.update(state)
        self.__dict__.update(self._owned().__dict__)

    def __repr__(self) -> str:
        """Show the settings, and the contents that need no read from a device."""
        text = f"KeptKeys(window_size={self.window_size}, "
        if self.counts.keeps_first_or_last:
            text += f"keep_last={self.keep_last}, keep_first={self.keep_first}, "
        text += f"rollback={self.rollback}"
        if self._kept is None:
            return f"{text})"
        batch, _, heads, dim = self._kept.key.shape
        device = self._kept.key.device
        assert self._counter is not None
        is_known = dispatch_state.is_checkable(self._counter)
        length = f", length={self.length}" if is_known else ""
        return f"{text}{length}, B={batch}, Hk={heads}, D={dim}, device={str(device)!r})"

    @property
    def counts(self) -> KeyCounts:
        """The numbers of keys that a query keeps, by kind."""
        return KeyCounts(self.window_size, self.keep_last, self.keep_first)

    @property
    def length(self) -> int:
        """Number of tokens seen, including ``start``. On a GPU this synchronizes."""
        return self._start if self._counter is None else int(self._known_counter()[0])

    @property
    def counter(self) -> Tensor | None:
        """int64 ``(3,)`` on the device, whose first is `length`; None before the first token."""
        return self._counter

    @property
    def revocable(self) -> int:
        """Number of last tokens that `forget` can remove. On a GPU this synchronizes."""
        if self._counter is None:
            return 0
        length, floor, _ = self._known_counter().tolist()
        return min(int(length - floor), self.rollback)

    def _known_counter(self) -> Tensor:
        assert self._counter is not None
        checks.check_values("the counter of the state", self._counter)
        return self._counter

    @property
    def capacity(self) -> int:
        """Number of rows for which memory is allocated."""
        return sum(part.size for part in (self._kept, self._recent) if part is not None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The held tensors by name: key, value ``(B, rows, Hk, D)``, bias ``(B, h, 1, rows)``, with
        -inf for a row that the head does not keep, and position, int64 ``(B, {1|Hk}, rows)``.
        Changes of the state may overwrite them.
        """
        held = [part for part in (self._kept, self._recent) if part is not None]
        return {} if not held else concatenated(*held)._asdict()

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return int64 ``(count,)``: the positions of the next tokens, on the device."""
        following = torch.arange(count, device=device)
        return following + (self._start if self._counter is None else self._counter[0])

    def detach(self) -> Self:
        """Return the same state in separate memory, without autograd history."""
        return self._mapped(lambda tensor, _: tensor.detach().clone())

    def clone(self) -> Self:
        """Return the same state in separate memory."""
        return self._mapped(lambda tensor, _: tensor.clone())

    def to(self, device: torch.device | str) -> Self:
        """Return the same state on a device, in separate memory."""
        checks.device("device", device)
        return self._mapped(lambda tensor, _: tensor.to(device, copy=True))

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i by sequence ``indices[i]``: for beam search, or to drop sequences.

        If the number of sequences stays, so does the memory, unless gradients flow to the held
        rows.

        Args:
            indices: int64 or int32 ``(new B,)``.

        Raises:
            TypeError: indices is not a tensor of integers.
            ValueError: the number of dimensions is wrong, or an index is out of range, which is
                checked on CPUs only.
        """
        check_sequences(indices, None if self._kept is None else self._kept.key, "the state")
        if self._kept is None:
            return
        self._refuse_recomputation()
        self._replace_by(
            self._mapped(lambda tensor, batched: chosen(tensor, indices) if batched else tensor)
        )

    def forget(self, count: int) -> None:
        """Remove the last tokens, in place unless gradients flow to the held rows.

        Args:
            count: number of tokens, at most `revocable`.

        Raises:
            TypeError: count is not an integer.
            ValueError: it is negative, or more than can be removed.
        """
        count, revocable = index("count", count), self.revocable
        if not 0 <= count <= revocable:
            raise ValueError(
                f"count must be from 0 to {revocable}, which is what can be taken back with "
                f"rollback={self.rollback}, got {count}"
            )
        if count == 0:
            return
        self._refuse_recomputation()
        assert self._recent is not None
        assert self._counter is not None
        length, floor, _ = self._counter.tolist()
        left = self._copied()
        with torch.inference_mode(False), torch.enable_grad():
            others = narrowed(self._recent, 0, self.rollback - count)
            left._recent = concatenated(empty_rows(self._recent, count), others)
            left._counter = self._counter.clone()
            left._counter[0] = length - count
            left._counter[1] = max(floor, length - self.rollback)
        self._replace_by(left)

    def reset(self) -> None:
        """Remove all tokens. The memory stays, unless gradients need its contents."""
        self._refuse_recomputation()
        if self._carries_gradients():
            self._kept = self._recent = self._counter = None
        for part in (self._kept, self._recent):
            if part is not None:
                part.bias.fill_(-torch.inf)
                part.position.fill_(NOWHERE)
        if self._counter is not None:
            self._counter[:2] = self._start

    def state_dict(self) -> dict[str, Any]:
        """Return a state for `load_state_dict`, in separate memory."""
        names = ("window_size", "keep_last", "keep_first", "rollback")
        settings = {name: getattr(self, name) for name in names}
        return state_of({**settings, "start": self._start}, self._kept, self._recent, self._counter)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`.

        Raises:
            TypeError: a field has the wrong type or dtype.
            ValueError: its window_size, keep_last, keep_first or rollback differs, or a field is
                missing or unknown, or has the wrong shape.
        """
        self._start, self._kept, self._recent, self._counter = read_state(
            state, self.counts, self.rollback
        )
        self._is_ordered = False

    def _rows(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        padding: Tensor | None,
        heads: int | None = None,
        *,
        is_marked: bool = False,
    ) -> Rows:
        """Return the next tokens as rows.

        Args:
            key, value, bias, padding: as in `KeptKeys.attend`.
            heads: H, if known.
            is_marked: a bias of -inf marks padding.
        """
        check_heads("key", key)
        added = key.shape[1]
        if added == 1 and self._counter is not None:
            positions = self._counter[:1]  # read before the counter is advanced
        else:
            positions = self.positions(added, key.device)
        counts_dropped = self.counts.keeps_first_or_last and not is_marked
        chunk = as_rows(key, value, bias, padding, positions, heads, counts_dropped=counts_dropped)
        if self._kept is not None:
            check_like(self._kept, chunk)
        return chunk

    def _columns(self, chunk: Rows) -> Rows:
        """Return all rows that the tokens of a chunk can see, in the order of the positions."""
        if self._kept is None:
            return chunk
        kept = self._kept if self._is_ordered else in_order(self._kept)
        kept = mark_dropped(kept) if self.counts.keeps_first_or_last else kept
        recent = () if self._recent is None else (self._recent,)
        return concatenated(kept, *recent, chunk)

    def _taken_in(
        self,
        chunk: Rows,
        backend: str,
        attend: Callable[[Rows], _Result],
        call: tuple[object, ...] | None = None,
    ) -> _Result:
        """Take in tokens, and return the result of ``attend`` for the rows that they see.

        If ``attend`` raises, nothing is changed. A single token overwrites held rows before it
        attends. So if its call is not known to be accepted, it attends to the held rows first.

        Rows with gradients are never written. Other rows replace them, with gradients to their
        earlier tokens but not to the new ones.

        Args:
            chunk, backend: the tokens, and the backend for the selection.
            attend: computes the result.
            call: properties by which ``attend`` accepts or refuses, except shapes of the held rows;
                None if it refuses nothing.
        """
        self._refuse_recomputation()
        if self._needs_gradient(chunk):
            raise ValueError(
                "keys that are kept in place have no gradient; call under torch.no_grad(), or use "
                "updated()"
            )
        carries_gradients = self._carries_gradients()
        if self._kept is not None and chunk.size == 1 and not (self.rollback or carries_gradients):
            if call is not None and not torch.compiler.is_compiling():
                call = (*call, *((t.shape, t.dtype, t.device) for t in self._kept))
                if call != self._accepted:
                    attend(self._kept)
                    self._accepted = call
            with torch.no_grad():
                seen = self.step(lambda *held: insert(held[0], chunk, self.counts, held[1]))
            return attend(seen)
        if carries_gradients:
            with torch.inference_mode(False), torch.enable_grad():
                seen, following = self._extended(Rows(*(t.detach() for t in chunk)), backend)
        else:
            seen, following = self._extended(chunk, backend)
        result = attend(seen)
        self._replace_by(following)
        return result

    def _extended(self, chunk: Rows, backend: str) -> tuple[Rows, Self]:
        """Return the rows that tokens see, and the state after them, in separate memory."""
        seen = self._columns(chunk)
        return seen, self._followed_by(seen, chunk.size, backend)

    def _refuse_recomputation(self) -> None:
        refuse_recomputation("a KeptKeys", self._made_during, self._counter)

    def _needs_gradient(self, *others: Rows | None) -> bool:
        """Say whether taking in other rows in place would lose a gradient."""
        return needs_gradient(*others, self._kept, self._recent)

    def _carries_gradients(self) -> bool:
        """Say whether gradients flow to the held rows, which must not be written then."""
        return any(t.requires_grad for part in (self._kept, self._recent) for t in part or ())

    def has_slots_for(
        self, shape: tuple[int, int, int], like: Tensor, bias_dtype: torch.dtype = torch.float32
    ) -> bool:
        """Say whether `step` can write a token with a separate bias for each KV head.

        Args:
            shape: B, Hk and D of the token.
            like: a tensor of its dtype and device.
            bias_dtype: of its biases.
        """
        if self._kept is None:
            return False
        key, _, bias, _ = self._kept
        batch, _, kv_heads, dim = key.shape
        return (
            (batch, kv_heads, dim) == shape
            and (key.dtype, key.device) == (like.dtype, like.device)
            and (bias.shape[1], bias.dtype) == (kv_heads, bias_dtype)
            and not self._carries_gradients()
        )

    def step(self, write: Callable[[Rows, Tensor], None]) -> Rows:
        """Let a token be written into the rows in place, and return the rows.

        Args:
            write: called with the rows and the `counter`.
        """
        assert self._kept is not None
        assert self._counter is not None
        self._refuse_recomputation()
        self._is_ordered = False
        write(self._kept, self._counter)
        return self._kept

    def _followed_by(self, columns: Rows, added: int, backend: str) -> Self:
        """Return the state after tokens that have seen ``columns``."""
        result = self._copied()
        older = columns
        if self.rollback:
            columns = concatenated(empty_rows(columns, self.rollback), columns)
            recent = narrowed(columns, columns.size - self.rollback, columns.size)
            result._recent = Rows(*(tensor.clone() for tensor in recent))
            older = narrowed(columns, 0, columns.size - self.rollback)
        result._kept = kept_rows(older, self.counts, backend)
        counter = self._counter
        if counter is None:
            counter = columns.position.new_zeros(3)
            counter[:2] = self._start
        result._counter = counter.clone()
        result._counter[0] += added
        result._is_ordered = True
        return result

    def _replace_by(self, other: Self) -> None:
        """Become another state, which must not be used again.

        It is copied into this state's memory, unless this state has no rows or another number of
        sequences, or gradients flow to the held rows: a graph that uses these would not see the
        change.
        """
        self._start = other._start
        self._is_ordered = self._is_ordered and other._is_ordered
        if other._kept is None:
            return
        is_like = self._kept is not None and self._kept.key.shape == other._kept.key.shape
        if not is_like or self._carries_gradients():
            other = other._owned()
            self._kept, self._recent, self._counter = other._kept, other._recent, other._counter
            return
        # Inference tensors cannot be written outside of inference mode; others can anywhere.
        with torch.inference_mode(False), torch.no_grad():
            for held, new in ((self._kept, other._kept), (self._recent, other._recent)):
                if held is not None and new is not None and held is not new:
                    for tensor, source in zip(held, new, strict=True):
                        tensor.copy_(source)
            if self._counter is not None and other._counter is not None:
                self._counter.copy_(other._counter)

    def _copied(self) -> Self:
        """Return a state that shares the tensors. torch.compile cannot trace copy.copy."""
        keep_counts = {"keep_last": self.keep_last, "keep_first": self.keep_first}
        result = type(self)(
            self.window_size, **keep_counts, rollback=self.rollback, start=self._start
        )
        result._kept, result._recent = self._kept, self._recent
        result._counter, result._is_ordered = self._counter, self._is_ordered
        return result

    def _mapped(self, change: Callable[[Tensor, bool], Tensor]) -> Self:
        """Return the state with ``change`` applied to its tensors; the counter has no batch.

        Inference tensors are copied, because they could only be changed in inference mode.
        """
        result = self._copied()
        with torch.inference_mode(False):
            for name in ("_kept", "_recent"):
                rows = getattr(self, name)
                if rows is not None:
                    changed = (writable(change(tensor, True)) for tensor in rows)
                    setattr(result, name, Rows(*changed))
            if self._counter is not None:
                result._counter = writable(change(self._counter, False))
        return result

    def _owned(self) -> Self:
        """Return the state with tensors that can be changed in any mode."""
        return self._mapped(lambda tensor, _: tensor)
