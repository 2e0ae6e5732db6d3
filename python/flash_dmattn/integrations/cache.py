# SPDX-License-Identifier: BSD-3-Clause
"""A layer of a transformers cache that keeps only the keys that a window can still see."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import cache_utils

from flash_dmattn.record import KeyCounts
from flash_dmattn.state import KeptKeys
from flash_dmattn.state.rows import Rows, chosen

from .wrap_once import wrap_once

__all__ = ["KeptLayer", "kept_layer_of", "remember_recording"]

_RECORDS = "_flash_dmattn_records_past"
# Key, value (B, N, Hk, D) and bias (B, Hk, 1, N).
_Tokens = tuple[Tensor, Tensor, Tensor]


class KeptLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """The tokens that `KeptKeys` keeps of a layer with a bias, in memory of constant size.

    ``generate`` asks caches to record the past if it may remove draft tokens. While recording, new
    tokens are held separately until `crop` sets how many of them stay.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, counts: KeyCounts, *, for_doge: bool) -> None:
        """Make an empty layer.

        Args:
            counts: of the keys that a query keeps.
            for_doge: `update` returns only the last key and value, because the module would compute
                biases for all that it gets. Every token has a bias, so all are kept until the
                window is full.
        """
        super().__init__()
        self.for_doge = for_doge
        self.kept = KeptKeys(
            counts.window, keep_last=counts.keep_last, keep_first=counts.keep_first
        )
        self._widths = 0, 0  # of key and value; the narrower one is padded
        self.record_past = False
        self.bias: Tensor | None = None  # (B, Hk, 1, rows), of `keys` and `values`
        self._held: _Tokens | None = None
        self._seen = 0
        self._padding: Tensor | None = None
        self._key_bias: Callable[[Tensor], Tensor] | None = None

    @property
    def is_croppable(self) -> bool:
        """Say whether `crop` can remove tokens."""
        return self.record_past

    @property
    def is_prepared(self) -> bool:
        """Say whether `prepare` has been called since the last `update`."""
        return self._key_bias is not None

    def prepare(self, key_bias: Callable[[Tensor], Tensor], padding: Tensor | None) -> None:
        """Store arguments for the next `update` that transformers does not pass.

        Args:
            key_bias: returns the bias ``(B, {H|Hk|1}, 1, N)`` of values ``(B, N, Hk, D)``.
            padding: ``(B, keys)``, nonzero for tokens; the new ones are the last.
        """
        self._key_bias, self._padding = key_bias, padding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first update allocates."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in the next tokens.

        Args:
            key_states, value_states: ``(B, Hk, N, D)``.
            *args, **kwargs: arguments of other layers, ignored.

        Returns:
            The keys and values that the tokens can see, which `keys`, `values` and `bias` also
            hold; for Doge the last key and value.
        """
        if self._key_bias is None:
            raise ValueError(
                "past_key_values was filled by a model of apply_flash_dmattn, and keeps only what "
                "that can still see; give this model a cache of its own"
            )
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        bias = self._key_bias(value)
        # NaN: the token counts among the last and the first, but is not selected.
        if self.kept.counts.keeps_first_or_last:
            bias = bias.masked_fill(bias == -torch.inf, torch.nan)
        if self._padding is not None:
            padding = self._padding[:, self._padding.shape[1] - key.shape[1] :].bool()
            bias = bias.masked_fill(~padding[:, None, None], -torch.inf)
        self._widths = key.shape[-1], value.shape[-1]
        key, value = (_pad_width(max(self._widths), states) for states in (key, value))
        self._key_bias = self._padding = None
        tokens = key, value, bias
        if self.record_past:
            held = tokens if self._held is None else _join(self._held, tokens)
            self._show(*self.kept.visible_by_marked(*held))
            self._held = held
        else:
            self._show(*self._take_in(*tokens))
        self._seen += key.shape[1]
        self.is_initialized = True
        if self.for_doge:
            return self.keys[:, :, -1:], self.values[:, :, -1:]
        return self.keys, self.values

    def _take_in(self, key: Tensor, value: Tensor, bias: Tensor) -> _Tokens:
        """Return the keys that the tokens see, and keep those that later tokens can see.

        A call without gradients may permanently keep tokens that were recorded with gradients.
        """
        with _with_gradients():
            if not self.kept.takes_in_place(key, value, bias):
                seen, self.kept = self.kept.extended_by_marked(key, value, bias)
                return seen
        taken: _Tokens = self.kept.taken_in(key, value, bias, lambda *seen: seen, None)
        return taken

    def _show(self, key: Tensor, value: Tensor, bias: Tensor) -> None:
        """Expose key, value ``(B, rows, Hk, D)`` and bias ``(B, h, 1, rows)`` to attention."""
        of_key, of_value = self._widths
        self.keys = key.transpose(1, 2)[..., :of_key]
        self.values, self.bias = value.transpose(1, 2)[..., :of_value], bias

    def can_step(self, shape: tuple[int, int, int], like: Tensor, window_size: int) -> bool:
        """Say whether `step` may replace `update`.

        Args:
            shape: B, Hk and D of the token that `prepare` was called for.
            like: a tensor of the dtype and device of its states and biases.
            window_size: number of keys that the module keeps.
        """
        return (
            not self.record_past
            and self._padding is None
            and self.kept.window_size == window_size
            and self.kept.has_slots_for(shape, like, like.dtype)
        )

    def step(self, write: Callable[[Rows, Tensor], None]) -> Rows:
        """Let one token be written into the kept rows, and return these rows.

        Args:
            write: called with the rows and their counter.
        """
        self._key_bias = None
        rows = self.kept.step(write)
        self._seen += 1
        self._widths = rows.key.shape[-1], rows.value.shape[-1]
        self._show(rows.key, rows.value, rows.bias)
        return rows

    def every_key(self, reason: str) -> cache_utils.DynamicLayer:
        """Return a layer with all tokens; keys and values of padding are zeros.

        Args:
            reason: why they are needed.

        Raises:
            ValueError: some tokens were dropped.
        """
        if self._seen and not self.for_doge:
            raise ValueError(
                f"past_key_values keeps only what key_bias lets later tokens see: {reason}"
            )
        kept, count = self.kept.tensors, self.kept.length
        if count > self.kept.window_size:
            raise ValueError(
                f"past_key_values keeps {self.kept.window_size} of {count} keys: {reason}"
            )
        layer = cache_utils.DynamicLayer()
        if count:
            # Rows without a token go to the last place, which is cut off.
            place = torch.where(kept["bias"][:, :, 0] > -torch.inf, kept["position"], count)
            key, value = (_scatter(kept[name], place, count) for name in ("key", "value"))
            layer.update(key, value)
        if self._held is not None:
            layer.update(*(tensor.transpose(1, 2) for tensor in self._held[:2]))
        return layer

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all keys so far, which sizes masks, and their offset 0."""
        return self._seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self._seen

    def get_max_length(self) -> int:
        """Return -1 for no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in some versions

    def activate_past_recording(self) -> None:
        """Hold new tokens until `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: SupportsIndex) -> None:
        """Remove the last held tokens, and keep the other held tokens permanently.

        Args:
            tokens_to_remove: as a negative number; 0 removes none. Some versions of `generate` pass
                a tensor. It must not become the length, because lengths that only the device knows
                change how masks are made.
        """
        count = -operator.index(tokens_to_remove)
        held = 0 if self._held is None else self._held[0].shape[1]
        if not 0 <= count <= held:
            raise ValueError(
                f"tokens_to_remove must be from {-held} to 0, as the cache holds {held} tokens "
                f"that can be taken back, got {tokens_to_remove}; call activate_past_recording() "
                "before the tokens come"
            )
        if self._held is not None:
            key, value, bias = self._held
            with _with_gradients():  # otherwise the views have no gradients
                remaining = (
                    key[:, : held - count],
                    value[:, : held - count],
                    bias[..., : held - count],
                )
            self._take_in(*remaining)
        self._held = None
        self._seen -= count

    def reset(self) -> None:
        """Remove everything, including the number of sequences."""
        window, keep_last, keep_first = self.kept.counts
        self.kept = KeptKeys(window, keep_last=keep_last, keep_first=keep_first)
        self.keys = self.values = None  # type: ignore[assignment]
        self.bias = self._held = None
        self._seen, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i by sequence ``beam_idx[i]``."""
        self.kept.reorder(beam_idx)
        if self._held is not None:
            with _with_gradients():
                key, value, bias = (chosen(tensor, beam_idx) for tensor in self._held)
            self._held = key, value, bias

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._choose(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self._choose(lambda rows: rows[indices.to(rows.device)])

    def _choose(self, choice: Callable[[Tensor], Tensor]) -> None:
        # Not the batch of `keys`, which belongs to the sequences of the last call.
        kept = self.kept.tensors.get("key")
        key = kept if self._held is None else self._held[0]
        if key is not None:
            self.reorder_cache(choice(torch.arange(key.shape[0], device=key.device)))


def kept_layer_of(
    cache: Any, index: int, counts: KeyCounts, mask: object, needs_all: str, *, for_doge: bool
) -> KeptLayer | None:
    """Return the layer of a cache that keeps only visible keys, or None if it keeps all keys.

    An empty cache of growing size gets such a layer, if gradients are off and the mask is at most
    padding: with another mask a dropped key may become visible again. If a call needs every key of
    such a layer, the layer is converted, which is possible until it has dropped a key.

    Args:
        cache: of transformers, or None.
        index: of the layer.
        counts: of the keys that a query keeps.
        mask: of this call.
        needs_all: why this call needs every key, and the remedy if some are dropped; or "".
        for_doge: as in `KeptLayer`.

    Raises:
        ValueError: the layer has dropped keys that this call needs.
    """
    is_padding = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    # transformers without this method removes draft tokens from caches without notice.
    if type(cache) is not cache_utils.DynamicCache or not hasattr(cache, "activate_past_recording"):
        return None
    layers = cache.layers
    if index < len(layers) and isinstance(layers[index], KeptLayer):
        layer: KeptLayer = layers[index]
        held = layer.kept.counts
        if not needs_all and (counts.window > held.window or counts[1:] != held[1:]):
            needs_all = f"a window of {counts.window} sees more; begin with a new cache"
            if counts[1:] != held[1:]:
                needs_all = (
                    f"keep_last={counts.keep_last} and keep_first={counts.keep_first} see others; "
                    "begin with a new cache"
                )
        if not needs_all and not is_padding:
            needs_all = (
                "attention_mask must be None or (B, keys) after a prefill with such a mask, since "
                "the cache keeps only what later tokens can see; begin with the mask of four "
                "dimensions, and the cache keeps all"
            )
        if layer.get_seq_length() and not needs_all:
            return layer
        layers[index] = layer.every_key(needs_all)
    if needs_all or torch.is_grad_enabled() or not is_padding:
        return None
    if counts.total < 1 or cache.offloading:
        return None
    if cache.layer_class_to_replicate is cache_utils.DynamicLayer:
        while len(layers) <= index:
            layers.append(cache_utils.DynamicLayer())
    if index >= len(layers) or type(layers[index]) is not cache_utils.DynamicLayer:
        return None
    if layers[index].get_seq_length():
        return None
    layer = layers[index] = KeptLayer(counts, for_doge=for_doge)
    layer.record_past = getattr(cache, _RECORDS, False)
    return layer


def remember_recording() -> None:
    """Make caches remember a request to record the past that precedes their `KeptLayer`.

    ``generate`` makes the request before a cache's first use, when its layers ignore it. Repeated
    calls have no effect.
    """
    wrap_once(cache_utils.Cache, "activate_past_recording", _request_and_remember)


def _request_and_remember(request: Callable[..., Any], cache: Any) -> Any:
    setattr(cache, _RECORDS, True)
    return request(cache)


def _scatter(rows: Tensor, place: Tensor, count: int) -> Tensor:
    """Return ``(B, Hk, count, D)``: rows ``(B, N, Hk, D)`` at their places ``(B, Hk, N)``."""
    rows = rows.transpose(1, 2)
    padded = rows.new_zeros(*rows.shape[:2], count + 1, rows.shape[3])
    return padded.scatter(2, place[..., None].expand_as(rows), rows)[:, :, :count]


def _pad_width(width: int, states: Tensor) -> Tensor:
    """Pad the last dimension with zeros."""
    missing = width - states.shape[-1]
    return pad(states, (0, missing)) if missing else states


@contextlib.contextmanager
def _with_gradients() -> Iterator[None]:
    """Let gradients flow to earlier tokens, even if they are off in this call."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _join(one: _Tokens, other: _Tokens) -> _Tokens:
    with _with_gradients():
        return (
            torch.cat([one[0], other[0]], 1),
            torch.cat([one[1], other[1]], 1),
            torch.cat([one[2], other[2]], 3),
        )
