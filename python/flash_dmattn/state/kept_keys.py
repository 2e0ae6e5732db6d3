# SPDX-License-Identifier: BSD-3-Clause
"""The window's keys of a prefix of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import checks
from ..arguments import backend_name, flag
from ..interface import Output, flash_dmattn_func
from ..wrong_keywords import refuse_keywords, telling_keywords, without_unknown
from .chunks import check_heads, check_like, described_call
from .held_rows import HeldRows
from .rows import Rows, concatenated, in_order, kept_rows, marked


@telling_keywords
class KeptKeys(HeldRows):
    """The ``window_size`` keys with the largest bias among those so far: all that is still visible.

    With a bias for each key and a causal selection, a key that has left the ``window_size`` best
    never returns. So what later queries see of any prefix is in this object, exactly, in memory
    that does not grow: keys, values, biases and positions of at most ``window_size`` tokens for
    each head of the bias. Ties are decided by the position, as in `flash_dmattn_func`, and biases
    of NaN and -inf are never kept. With ``keep_last`` and ``keep_first`` the last and the first
    tokens are kept besides, and the window is of the others.

    That holds while what is visible only grows: causality, and padding that stays padding. It does
    not hold for sliding windows and documents, where a key that is dropped would make room for one
    that has been forgotten; use `flash_dmattn_func` for these.

    `update` and `merge` change the object in place, in the same memory, which CUDA graphs and
    compiled programs rely on; they are for inference. Only where gradients flow to what earlier
    calls have left, other memory takes its place, and they still flow to it. `updated` and `merged`
    return another object, through whose keys, values and biases gradients flow; `detach` cuts them
    off. A call that raises changes nothing. In a backward pass, where activation checkpointing
    calls a function again, what changes an object that was made before raises RuntimeError.

    Attributes:
        window_size: keys that a query keeps.
        keep_last, keep_first: and the last and the first tokens.
        rollback: tokens at the end that `forget` can take back.
    """

    @without_unknown
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
        """Let the tokens that follow attend to what is held and, causally, to themselves.

        Args:
            query: ``(B, N, H, D)``.
            key, value: ``(B, N, Hk, D)``.
            bias: a number for each key, ``({B|1}, {H|Hk|1}, 1, N)``, or as `flash_dmattn_func`
                takes it for every query alike.
            padding: bool ``(B, N)``, True for tokens; others are never seen.
            update: also do what `update` does, which the attention of a single token is then spared
                part of its work for.
            softmax_scale, softcap, sink, return_lse, backend: as in `flash_dmattn_func`.

        Returns:
            As `flash_dmattn_func` for these queries and all keys so far, with ``is_causal=True``,
            ``window_size``, ``keep_last`` and ``keep_first``, equal within rounding.

        Raises:
            TypeError, ValueError: as `flash_dmattn_func`; or the tokens do not fit those held.
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

    @without_unknown
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
        """Take in the tokens that follow, in place.

        Args:
            key, value, bias, padding, backend: as in `attend`.

        Returns:
            Key, value and bias of what the new tokens see, which they attend to causally, aligned
            to the bottom right, with ``window_size``; with ``keep_last`` or ``keep_first`` also
            with ``attn_mask=state.seen(bias)``. The next `update` may overwrite them.

        Raises:
            TypeError, ValueError: as `attend`; or a gradient is required, which `updated` is for.
        """
        if unknown:
            refuse_keywords(KeptKeys.update, unknown)
        chunk = self._rows(key, value, bias, padding)
        seen = self._taken_in(chunk, backend_name(backend), lambda rows: rows)
        return seen.key, seen.value, seen.bias

    @without_unknown
    def visible(
        self,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        padding: Tensor | None = None,
        **unknown: NoReturn,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `update` returns for tokens that are not taken in.

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
        """Do what `visible` does for tokens of which a bias of -inf marks padding."""
        seen = self._columns(self._rows(key, value, bias, None, is_marked=True))
        return seen.key, seen.value, seen.bias

    def seen(self, bias: Tensor) -> Tensor | None:
        """Return which of the columns that `update` has returned the bias of are tokens.

        Others must not be counted among the last and the first keys. None where nothing has to be
        counted: as all are kept, or none for their place.
        """
        counts = self.counts
        if not counts.by_place or bias.shape[3] <= counts.total:
            return None
        return bias.detach() != -torch.inf

    @without_unknown
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
        """Return the state after the tokens that follow, with gradients for those it keeps.

        Args:
            key, value, bias, padding, backend: as in `attend`.
        """
        if unknown:
            refuse_keywords(KeptKeys.updated, unknown)
        return self.extended(key, value, bias, padding, backend=backend)[1]

    @without_unknown
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
        """Return what `update` returns, and the state that `updated` returns.

        Args:
            key, value, bias, padding, backend: as in `attend`.
        """
        if unknown:
            refuse_keywords(KeptKeys.extended, unknown)
        return self._after(self._rows(key, value, bias, padding), backend)

    def extended_by_marked(
        self, key: Tensor, value: Tensor, bias: Tensor, *, backend: str | None = None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], KeptKeys]:
        """Do what `extended` does for tokens of which a bias of -inf marks padding."""
        return self._after(self._rows(key, value, bias, None, is_marked=True), backend)

    def _after(
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
        """Take in the tokens that follow, in place, unless attention raises.

        Args:
            key, value, bias, backend: as in `attend`; a bias of -inf marks padding.
            attend: returns the result for what `update` returns.
            call: what `attend` accepts or refuses, `described_call`; None where it refuses nothing.
        """
        chunk = self._rows(key, value, bias, None, is_marked=True)
        return self._taken_in(chunk, backend_name(backend), lambda rows: attend(*rows[:3]), call)

    def takes_in_place(self, key: Tensor, value: Tensor, bias: Tensor) -> bool:
        """Say whether `update` takes these tokens, as no gradient would be lost."""
        return not self._needs_gradient(Rows(key, value, bias, bias))

    def merge(self, other: KeptKeys, *, backend: str | None = None) -> None:
        """Take in what another state has seen, in place.

        Args:
            other: a state of other positions (``start``) and as many heads, in any order.
            backend: that selects, as in `flash_dmattn_func`.

        Raises:
            TypeError: other is no KeptKeys.
            ValueError: it does not fit, can take tokens back, or a gradient is required.
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
        """Return the state of the tokens that either has seen, in memory of its own.

        Args:
            other, backend: as in `merge`.
        """
        _check_is_state(other)
        for name in ("window_size", "keep_last", "keep_first"):
            own, given = getattr(self, name), getattr(other, name)
            if own != given:
                raise ValueError(f"other must have {name}={own}, got {given}")
        for name, rollback in (("this state", self.rollback), ("other", other.rollback)):
            if rollback:
                raise ValueError(f"merge needs states of rollback=0, but {name} has {rollback}")
        if other._kept is None or self._kept is None:
            return (other if self._kept is None else self).clone()
        check_like(self._kept, other._kept, "other")
        assert self._counter is not None
        assert other._counter is not None
        result = self._copied()
        every = in_order(concatenated(self._kept, other._kept))
        every = marked(every) if self.counts.by_place else every
        result._kept = kept_rows(every, self.counts, backend_name(backend))
        result._counter = torch.maximum(self._counter, other._counter)
        result._start = min(self._start, other._start)
        result._is_ordered = True
        return result._owned()


def _check_is_state(other: object) -> None:
    if not isinstance(other, KeptKeys):
        checks.refuse_type("other", "a KeptKeys", other)
