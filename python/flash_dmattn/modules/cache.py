# SPDX-License-Identifier: BSD-3-Clause
"""The cache of a layer for decoding: keys, values and biases of the tokens that it has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..arguments import writable
from ..checks import flag, index
from ..dispatch_state import has_values
from ..record import KeyCounts
from ..refusals import current_backward, refuse_recomputation
from ..selection import key_counts, refuse_without_window
from ..state import KeptKeys
from ..state.chunks import check_left, check_sequences
from ..state.rows import Rows, chosen
from ..state.stored import check_names, check_setting, with_default_settings
from ..wrong_keywords import with_keyword_hints
from .arguments import check_tokens

__all__ = ["AttentionCache"]

_NAMES = ("key", "value", "bias")
_LENGTH_DIMENSION = {"key": 1, "value": 1, "bias": 3}
_SETTINGS = ("rollback", "every_key", "length")


@with_keyword_hints
class AttentionCache:
    """The tokens that one layer keeps for decoding, in order.

    If the layer is causal and has a window, these are the keys that later tokens can still see, as
    a `KeptKeys`: ``window_size`` of them for each head, plus the last and the first if the layer
    keeps these, whatever the number of tokens. Memory and time of a step are constant, and the
    addresses that a step reads or writes stay the same. Otherwise, and if the first call has a mask
    other than padding, these are all keys, values and biases. Without ``max_length`` their memory
    doubles when it is full.

    Attributes:
        max_length: most tokens that it can hold, or None. If it keeps a window's keys, it can see
            any number of tokens.
        rollback: number of last tokens that `truncate` can remove if it keeps a window's keys.
        every_key: whether it keeps all keys even for a layer with a window.
    """

    max_length: int | None
    rollback: int
    every_key: bool

    def __init__(
        self, max_length: int | None = None, *, rollback: int = 0, every_key: bool = False
    ) -> None:
        """Make an empty cache.

        Args:
            max_length: allocate memory for this many tokens at once, if all are kept.
            rollback: number of last tokens that `truncate` must be able to remove, such as drafts.
            every_key: keep all keys, regardless of the window, for masks that change which earlier
                tokens are seen.

        Raises:
            TypeError: a number is not an integer, or every_key is not a boolean.
            ValueError: max_length is less than 1, or rollback is negative.
        """
        if max_length is not None:
            max_length = index("max_length", max_length, maximum=checks.MAX_ROWS)
            if max_length < 1:
                raise ValueError(
                    f"max_length must be at least 1, or None to grow, got {max_length}"
                )
        self.max_length = max_length
        self.rollback = index("rollback", rollback, 0, checks.MAX_ROWS)
        self.every_key = flag("every_key", every_key)
        self._length = 0
        self._buffers: dict[str, Tensor] = {}
        self._kept: KeptKeys | None = None
        self._made_during = current_backward()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled cache, also of version 2.0.0a1."""
        if "length" in state:
            self.__init__(state["max_length"])  # type: ignore[misc]
            state = {"_length": state["length"], "_buffers": state["_buffers"]}
        self.__dict__.update(state)
        self._made_during = current_backward()
        with torch.inference_mode(False):
            self._buffers = {name: writable(buffer) for name, buffer in self._buffers.items()}

    def __repr__(self) -> str:
        """Show the numbers of tokens seen and allocated."""
        return (
            f"AttentionCache(length={self.known_length}, capacity={self.capacity}, "
            f"max_length={self.max_length})"
        )

    @property
    def length(self) -> int:
        """Number of tokens seen. If it keeps a window's keys on a GPU, this synchronizes."""
        return self._length if self._kept is None else self._kept.length

    @property
    def known_length(self) -> int | None:
        """The length; None if compiled code would have to read it from a device, or its counter has
        no readable values.
        """
        counter = None if self._kept is None else self._kept.counter
        if counter is not None and (torch.compiler.is_compiling() or not has_values(counter)):
            return None
        return self.length

    @property
    def capacity(self) -> int:
        """Number of tokens for which memory is allocated."""
        if self._kept is not None:
            return self._kept.capacity
        return self._buffers["key"].shape[1] if self._buffers else 0

    @property
    def kept(self) -> KeptKeys | None:
        """The window's keys, if it keeps only these."""
        return self._kept

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return int64 ``(count,)``: the positions of the next tokens."""
        if self._kept is not None:
            return self._kept.positions(count, device)
        return torch.arange(self._length, self._length + count, device=device)

    def keeps_window(self, window_size: int | None, attn_mask: object) -> bool:
        """Say whether the next tokens will be kept only as long as they can be seen.

        Args:
            window_size: of the layer.
            attn_mask: of the call, for all keys.

        Raises:
            ValueError: earlier tokens are dropped, and this mask may make them visible again.
        """
        if self.every_key or window_size is None or self._buffers:
            return False
        is_padding = attn_mask is None or (isinstance(attn_mask, Tensor) and attn_mask.dim() == 2)
        if self._kept is not None and not is_padding:
            raise ValueError(
                "attn_mask must be None or bool (B, K), padding that stays padding, for a cache "
                "that keeps the window's keys alone; another mask may show a key that was "
                "forgotten: use AttentionCache(every_key=True) with it"
            )
        return is_padding

    def append(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        *,
        window_size: int | None = None,
        keep_last: int = 0,
        keep_first: int = 0,
        backend: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add the next tokens, and return key, value and bias of all that they see.

        Args:
            key, value: ``(B, N, Hk, D)``.
            bias: ``(B, Hk, 1, N)``; -inf for tokens that are never seen, such as padding.
            window_size: of a causal layer: keep only what it can still see. None keeps all.
            keep_last, keep_first: of the layer.
            backend: for the selection, as in `flash_dmattn_func`.

        Returns:
            Without a window views ``(B, length, Hk, D)``, the same of value, and ``(B, Hk, 1,
            length)``. With a window, the keys that the new tokens can see. The tokens attend to
            them causally, aligned bottom right, with that window, and with
            ``attn_mask=cache.kept.seen(bias)`` if the last or the first keys are kept. The next
            `append` does not change views of all tokens; `truncate` followed by `append` may
            overwrite them. With a window, the next `append` may overwrite the returned tensors.

        Raises:
            TypeError: an argument is not a floating-point tensor.
            ValueError: a tensor does not fit the others, differs in shape, dtype or device from
                those in the cache, or max_length is exceeded; without a window, a tensor requires
                a gradient; or a number of kept keys differs from that of earlier calls.
            RuntimeError: the call is part of a backward pass, as in activation checkpointing, and
                the cache was made before it.
        """
        counts = None
        if window_size is None:
            refuse_without_window(keep_last, keep_first)
        else:
            counts = key_counts(window_size, keep_last, keep_first)
        seen: tuple[Tensor, Tensor, Tensor] = self.taken_in(
            key, value, bias, lambda *seen: seen, None, counts=counts, backend=backend
        )
        return seen

    def taken_in(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Any],
        call: tuple[object, ...] | None,
        *,
        counts: KeyCounts | None,
        backend: str | None,
    ) -> Any:
        """Do the same as `append` unless ``attend`` raises, and return the result of ``attend``.

        Args:
            key, value, bias, backend: as in `append`.
            attend: computes the result from the key, value and bias that the tokens see.
            call: as in `KeptKeys.taken_in`.
            counts: of the keys that a causal layer keeps; None keeps all.

        Raises:
            TypeError, ValueError: as `append`.
            RuntimeError: as `append`.
        """
        self._refuse_recomputation()
        tokens = dict(zip(_NAMES, (key, value, bias), strict=True))
        check_tokens(tokens)
        if self._kept is not None or (counts is not None and not self._holds_all()):
            return self._take_in_kept(tokens, attend, call, counts, backend)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tokens.values()):
            raise ValueError(
                "cache: without a window cached keys and values are for inference, and have no "
                "gradient; call under torch.no_grad() or torch.inference_mode()"
            )
        self._check(tokens)
        length = self._length + key.shape[1]
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"cache has max_length={self.max_length} and holds {self._length} tokens; "
                f"{key.shape[1]} more do not fit"
            )
        # A boolean, because torch.compile of torch 2.11 cannot trace "is" of dictionaries.
        grows = not self._buffers or length > self.capacity
        buffers = self._grown(tokens, length) if grows else self._buffers
        for name, added in tokens.items():
            _part(buffers, name, self._length, length).copy_(added)
        if grows:
            with torch.inference_mode(False):
                buffers = {name: writable(buffer) for name, buffer in buffers.items()}
        result = attend(*(_part(buffers, name, 0, length) for name in _NAMES))
        self._buffers, self._length = buffers, length
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return a state for `load_state_dict`, in separate memory.

        It holds only numbers and tensors, which ``torch.load(..., weights_only=True)`` can read.
        """
        state: dict[str, Any] = {name: getattr(self, name) for name in _SETTINGS}
        if self._kept is not None:
            state["kept"] = self._kept.state_dict()
        for name in self._buffers:
            state[name] = _part(self._buffers, name, 0, self._length).detach().clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`.

        Raises:
            TypeError: a field has the wrong type or dtype.
            ValueError: its rollback or every_key differs, or it is longer than max_length; or a
                field is missing or unknown, or has the wrong shape.
        """
        check_names(state, _SETTINGS, ("kept", *_NAMES))
        for name in _SETTINGS[:2]:
            check_setting(state, name, getattr(self, name), "AttentionCache")
        length = checks.index("length of state", state["length"], 0)
        loaded = AttentionCache(self.max_length, rollback=self.rollback, every_key=self.every_key)
        if "kept" in state:
            check_names(state, (*_SETTINGS, "kept"))
            check_names(state["kept"], ("window_size",), state["kept"])
            kept = with_default_settings(state["kept"])
            names = ("window_size", "keep_last", "keep_first")
            counts = {name: checks.index(f"{name} of state", kept[name]) for name in names}
            loaded._kept = KeptKeys(**counts, rollback=self.rollback)
            loaded._kept.load_state_dict(kept)
        elif any(name in state for name in _NAMES):
            check_names(state, (*_SETTINGS, *_NAMES))
            with torch.no_grad():
                loaded.append(*(state[name] for name in _NAMES))
        if loaded.length != length:
            raise ValueError(
                f"length of state must be {loaded.length}, as its tensors, got {length}"
            )
        self._length, self._buffers, self._kept = loaded._length, loaded._buffers, loaded._kept

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i by sequence ``indices[i]``: for beam search, or to drop sequences.

        Args:
            indices: int64 or int32 ``(new B,)``.

        Raises:
            TypeError: indices is not a tensor of integers.
            ValueError: the number of dimensions is wrong, or an index is out of range, which is
                checked on CPUs only.
        """
        held = self._buffers if self._kept is None else self._kept.tensors
        check_sequences(indices, held.get("key"), "the cache")
        self._refuse_recomputation()
        if self._kept is not None:
            self._kept.reorder(indices)
            return
        with torch.inference_mode(False):
            self._buffers = {
                name: writable(chosen(held, indices)) for name, held in self._buffers.items()
            }

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens; 0 empties the cache but keeps its memory.

        Raises:
            TypeError: length is not an integer.
            ValueError: length is negative, exceeds the cache's, or would remove more than
                ``rollback`` tokens of a cache that keeps a window's keys.
        """
        length, held = index("length", length), self.length
        revocable = held if self._kept is None else self._kept.revocable
        check_left(length, held, revocable, f"AttentionCache(rollback={self.rollback})")
        self._refuse_recomputation()
        if self._kept is None:
            self._length = length
        elif length == 0:
            self._kept.reset()
        else:
            self._kept.forget(held - length)

    def detach(self) -> None:
        """Detach the held tensors from their gradients, between training steps on a stream."""
        if self._kept is not None:
            self._kept = self._kept.detach()

    def _refuse_recomputation(self, counter: Tensor | None = None) -> None:
        refuse_recomputation("an AttentionCache", self._made_during, counter)

    def _holds_all(self) -> bool:
        return self.every_key or bool(self._buffers)

    def _take_in_kept(
        self,
        tokens: dict[str, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Any],
        call: tuple[object, ...] | None,
        counts: KeyCounts | None,
        backend: str | None,
    ) -> Any:
        kept = self._kept
        if kept is None:
            assert counts is not None
            window_size, keep_last, keep_first = counts
            kept = KeptKeys(
                window_size, keep_last=keep_last, keep_first=keep_first, rollback=self.rollback
            )
        for name, expected, count in zip(
            ("window_size", "keep_last", "keep_first"),
            kept.counts,
            (None, 0, 0) if counts is None else counts,
            strict=True,
        ):
            if count != expected:
                raise ValueError(
                    f"{name} must be {expected}, whose keys the cache keeps, got {count}"
                )
        if kept.takes_in_place(**tokens):
            result = kept.taken_in(**tokens, attend=attend, call=call, backend=backend)
        else:
            seen, kept = kept.extended_by_marked(**tokens, backend=backend)
            self._refuse_recomputation(kept.counter)
            result = attend(*seen)
        self._kept = kept
        return result

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

    def _grown(self, tokens: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        capacity = max(length, 2 * self.capacity) if self.max_length is None else self.max_length
        grown = {}
        for name, added in tokens.items():
            shape = list(added.shape)
            shape[_LENGTH_DIMENSION[name]] = capacity
            # Inference tensors cannot be written outside of inference mode; others can anywhere.
            with torch.inference_mode(False):
                grown[name] = added.new_empty(shape)
            if self._buffers:
                held = _part(self._buffers, name, 0, self._length)
                _part(grown, name, 0, self._length).copy_(held)
        return grown


def _part(buffers: dict[str, Tensor], name: str, start: int, end: int) -> Tensor:
    return buffers[name].narrow(_LENGTH_DIMENSION[name], start, end - start)


# Lets torch.load(weights_only=True) load a pickled cache or a pickled state.
torch.serialization.add_safe_globals([AttentionCache, KeptKeys, Rows])
