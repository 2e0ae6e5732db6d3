# SPDX-License-Identifier: BSD-3-Clause
"""The keys of a prefix of any length that a window still sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import checks
from ..arguments import backend_name
from ..checks import flag
from ..interface import Output, flash_dmattn_func
from ..wrong_keywords import hide_unknown_keywords, refuse_keywords, with_keyword_hints
from .chunks import check_heads, check_like, described_call
from .held_rows import HeldRows
from .rows import Rows, concatenated, in_order, kept_rows, mark_dropped


@with_keyword_hints
class KeptKeys(HeldRows):
    """The ``window_size`` keys with the largest bias so far: all that later queries can see.

    With a per-key bias and a causal selection, a key that has left the ``window_size`` best never
    returns. So this object holds exactly what later queries see of any prefix, in memory of
    constant size: keys, values, biases and positions of at most ``window_size`` tokens for each
    head of the bias. Ties are resolved by position, as in `flash_dmattn_func`, and biases of NaN
    and -inf are never kept. With ``keep_last`` and ``keep_first`` the last and the first tokens are
    also kept, and the window selects among the others.

    This requires that what is visible only grows, as with causality, and padding that stays
    padding. It excludes sliding windows and documents, where a dropped key would be replaced by one
    that is no longer held; use `flash_dmattn_func` for these.

    `update` and `merge` change the object in place, in the same memory, which CUDA graphs and
    compiled programs rely on; they are for inference. If gradients flow to rows of earlier calls,
    other memory replaces them, and gradients still flow. `updated` and `merged` return another
    object whose keys, values and biases are differentiable; `detach` removes the gradients. A call
    that raises changes nothing. In a backward pass, in which activation checkpointing calls
    functions again, changing an object that was made before it raises RuntimeError.

    Attributes:
        window_size: number of keys that a query keeps.
        keep_last, keep_first: numbers of last and first tokens that are also kept.
        rollback: number of last tokens that `forget` can remove.
    """

    @hide_unknown_keywords
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        padding: Tensor | None = None,
        *,
        update: bool = False,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        return_lse: bool = False,
        backend: str | None = None,
        **unknown: NoReturn,
    ) -> Output:
        """Let the next tokens attend to the held keys and, causally, to themselves.

        Args:
            query: ``(B, N, H, D)``.
            key, value: ``(B, N, Hk, D)``.
            bias: a number for each key, ``({B|1}, {H|Hk|1}, 1, N)``, or a per-key form of
                `flash_dmattn_func`.
            padding: bool ``(B, N)``, True for tokens; others are never seen.
            update: also do `update`. This saves the attention of a single token some work.
            softmax_scale, softcap, sink, return_lse, backend: as in `flash_dmattn_func`.

        Returns:
            The results of `flash_dmattn_func` for these queries and all keys so far, with
            ``is_causal=True``, ``window_size``, ``keep_last`` and ``keep_first``, equal within
            rounding.

        Raises:
            TypeError, ValueError: as `flash_dmattn_func`; or the tokens do not fit the held ones.
        """
        if unknown:
            refuse_keywords(KeptKeys.attend, unknown)
        check_heads("query", query)
        check_heads("key", key)
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"query must have a row for each of the {key.shape[1]} tokens of key, got shape "
                f"{tuple(query.shape)}"
            )
        chunk = self._rows(key, value, bias, padding, heads=query.shape[2])

        def attend(seen: Rows) -> Output:
            return flash_dmattn_func(
                query,
                seen.key,
                seen.value,
                self.seen(seen.bias),
                seen.bias,
                softmax_scale,
                True,
                softcap,
                window_size=self.window_size,
                keep_last=self.keep_last,
                keep_first=self.keep_first,
                sink=sink,
                return_lse=return_lse,
                backend=backend,
            )

        if not flag("update", update):
            return attend(self._columns(chunk))
        settings = softmax_scale, softcap, return_lse, backend
        call = described_call(query, sink, settings)
        return self._taken_in(chunk, backend_name(backend), attend, call)

    @hide_unknown_keywords
    def update(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        padding: Tensor | None = None,
        *,
        backend: str | None = None,
        **unknown: NoReturn,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take in the next tokens, in place.

        Args:
            key, value, bias, padding, backend: as in `attend`.

        Returns:
            Key, value and bias that the new tokens see. They attend to these causally, aligned
            bottom right, with ``window_size``; with ``keep_last`` or ``keep_first`` also with
            ``attn_mask=state.seen(bias)``. The next `update` may overwrite them.

        Raises:
            TypeError, ValueError: as `attend`; or a gradient is required, for which use `updated`.
        """
        if unknown:
            refuse_keywords(KeptKeys.update, unknown)
        chunk = self._rows(key, value, bias, padding)
        seen = self._taken_in(chunk, backend_name(backend), lambda rows: rows)
        return seen.key, seen.value, seen.bias

    @hide_unknown_keywords
    def visible(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        padding: Tensor | None = None,
        **unknown: NoReturn,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of `update` for tokens without taking them in.

        Args:
            key, value, bias, padding: as in `attend`.
        """
        if unknown:
            refuse_keywords(KeptKeys.visible, unknown)
        seen = self._columns(self._rows(key, value, bias, padding))
        return seen.key, seen.value, seen.bias

    def visible_by_marked(
        self, key: Tensor, value: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do `visible` for tokens whose padding is marked by a bias of -inf."""
        seen = self._columns(self._rows(key, value, bias, None, is_marked=True))
        return seen.key, seen.value, seen.bias

    def seen(self, bias: Tensor) -> Tensor | None:
        """Return which columns of a bias from `update` are tokens.

        Other columns must not count among the last and the first keys. None if no counting is
        needed: all keys are kept, or none for its place.
        """
        counts = self.counts
        if not counts.keeps_first_or_last or bias.shape[3] <= counts.total:
            return None
        return bias.detach() != -torch.inf

    @hide_unknown_keywords
    def updated(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        padding: Tensor | None = None,
        *,
        backend: str | None = None,
        **unknown: NoReturn,
    ) -> KeptKeys:
        """Return the state after the next tokens, with gradients for those it keeps.

        Args:
            key, value, bias, padding, backend: as in `attend`.
        """
        if unknown:
            refuse_keywords(KeptKeys.updated, unknown)
        return self.extended(key, value, bias, padding, backend=backend)[1]

    @hide_unknown_keywords
    def extended(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        padding: Tensor | None = None,
        *,
        backend: str | None = None,
        **unknown: NoReturn,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], KeptKeys]:
        """Return the results of `update`, and the state of `updated`.

        Args:
            key, value, bias, padding, backend: as in `attend`.
        """
        if unknown:
            refuse_keywords(KeptKeys.extended, unknown)
        return self._state_after(self._rows(key, value, bias, padding), backend)

    def extended_by_marked(
        self, key: Tensor, value: Tensor, bias: Tensor, *, backend: str | None = None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], KeptKeys]:
        """Do `extended` for tokens whose padding is marked by a bias of -inf."""
        return self._state_after(self._rows(key, value, bias, None, is_marked=True), backend)

    def _state_after(
        self, chunk: Rows, backend: str | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], KeptKeys]:
        seen, state = self._extended(chunk, backend_name(backend))
        return (seen.key, seen.value, seen.bias), state._owned()

    def taken_in(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Any],
        call: tuple[object, ...] | None,
        *,
        backend: str | None = None,
    ) -> Any:
        """Take in the next tokens, in place, unless attention raises.

        Args:
            key, value, bias, backend: as in `attend`; a bias of -inf marks padding.
            attend: computes the result from the results of `update`.
            call: the `described_call` by which ``attend`` accepts or refuses; None if it refuses
                nothing.
        """
        chunk = self._rows(key, value, bias, None, is_marked=True)
        return self._taken_in(chunk, backend_name(backend), lambda rows: attend(*rows[:3]), call)

    def takes_in_place(self, key: Tensor, value: Tensor, bias: Tensor) -> bool:
        """Say whether `update` can take these tokens without losing a gradient."""
        return not self._needs_gradient(Rows(key, value, bias, bias))

    def merge(self, other: KeptKeys, *, backend: str | None = None) -> None:
        """Take in the tokens of another state, in place.

        Args:
            other: a state of other positions (``start``) and the same number of heads, in any
                order.
            backend: for the selection, as in `flash_dmattn_func`.

        Raises:
            TypeError: other is not a KeptKeys.
            ValueError: it does not fit, has a rollback, or a gradient is required.
        """
        self._refuse_recomputation()
        _check_is_state(other)
        if self._needs_gradient(other._kept):
            raise ValueError(
                "a state that is merged in place has no gradient, nor has other; call under "
                "torch.no_grad(), or use merged()"
            )
        if other._carries_gradients():
            other = other.detach()
        with torch.inference_mode(False), torch.enable_grad():
            merged = self.merged(other, backend=backend)
        self._replace_by(merged)

    def merged(self, other: KeptKeys, *, backend: str | None = None) -> KeptKeys:
        """Return the state of the tokens of both states, in separate memory.

        Args:
            other, backend: as in `merge`.
        """
        _check_is_state(other)
        for name in ("window_size", "keep_last", "keep_first"):
            expected, count = getattr(self, name), getattr(other, name)
            if expected != count:
                raise ValueError(f"other must have {name}={expected}, got {count}")
        for name, rollback in (("this state", self.rollback), ("other", other.rollback)):
            if rollback:
                raise ValueError(f"merge needs states of rollback=0, but {name} has {rollback}")
        if other._kept is None or self._kept is None:
            return (other if self._kept is None else self).clone()
        check_like(self._kept, other._kept, "other")
        assert self._counter is not None
        assert other._counter is not None
        result = self._copied()
        rows = in_order(concatenated(self._kept, other._kept))
        rows = mark_dropped(rows) if self.counts.keeps_first_or_last else rows
        result._kept = kept_rows(rows, self.counts, backend_name(backend))
        result._counter = torch.maximum(self._counter, other._counter)
        result._start = min(self._start, other._start)
        result._is_ordered = True
        return result._owned()


def _check_is_state(other: object) -> None:
    if not isinstance(other, KeptKeys):
        checks.refuse_type("other", "a KeptKeys", other)
