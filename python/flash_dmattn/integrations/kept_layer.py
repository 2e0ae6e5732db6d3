# SPDX-License-Identifier: BSD-3-Clause
"""A layer of a transformers cache that keeps what a model with a window can still see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from flash_dmattn.state import KeptKeys
from flash_dmattn.state.rows import Rows

from .wrapping import wrap_once

__all__ = ["KeptLayer", "kept_layer_of", "remember_recording"]

_RECORDS = "_flash_dmattn_records_past"
# Key, value (B, N, Hk, D) and bias (B, Hk, 1, N).
_Tokens = tuple[Tensor, Tensor, Tensor]


class KeptLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """What `KeptKeys` keeps of the tokens of a Doge layer, in memory that does not grow.

    While it records the past, as `generate` asks of caches that drafts are taken back from, tokens
    are held besides until `crop` says how many of them stay.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, window_size: int) -> None:
        """Keep nothing yet.

        Args:
            window_size: keys that a query keeps.
        """
        super().__init__()
        self.kept = KeptKeys(window_size)
        self.record_past = False
        self.bias: Tensor | None = None  # (B, Hk, 1, rows), of `keys` and `values`
        self._held: _Tokens | None = None
        self._seen = 0
        self._padding: Tensor | None = None
        self._key_bias: Callable[[Tensor], Tensor] | None = None

    @property
    def is_croppable(self) -> bool:
        """Say whether `crop` can take tokens back."""
        return self.record_past

    def prepare(self, key_bias: Callable[[Tensor], Tensor], padding: Tensor | None) -> None:
        """Take what the next `update` is not given.

        Args:
            key_bias: returns the bias ``(B, Hk, 1, N)`` of values ``(B, N, Hk, D)``.
            padding: bool ``(B, N)``, True for tokens.
        """
        self._key_bias, self._padding = key_bias, padding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first update allocates."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in the tokens that follow.

        Args:
            key_states, value_states: ``(B, Hk, N, D)``.
            *args, **kwargs: what other layers are given.

        Returns:
            The last key and value. `keys`, `values` and `bias` are of all that the tokens can see;
            the module, which computes biases of what it is given here, would compute these again.
        """
        assert self._key_bias is not None, "prepare() comes before update()"
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        bias = self._key_bias(value)
        if self._padding is not None:
            bias = bias.masked_fill(~self._padding[:, None, None], -torch.inf)
        self._key_bias = self._padding = None
        self._seen += key.shape[1]
        tokens = key, value, bias
        self.is_initialized = True
        if self.record_past:
            self._held = tokens if self._held is None else _joined(self._held, tokens)
            self._show(*self.kept.visible(*self._held))
        else:
            self._show(*self.kept.update(*tokens))
        return self.keys[:, :, -1:], self.values[:, :, -1:]

    def _show(self, key: Tensor, value: Tensor, bias: Tensor) -> None:
        """Let attention read these: key, value ``(B, rows, Hk, D)``, bias ``(B, Hk, 1, rows)``."""
        self.keys, self.values, self.bias = key.transpose(1, 2), value.transpose(1, 2), bias

    def can_step(self, shape: tuple[int, int, int], like: Tensor, window_size: int) -> bool:
        """Say whether `step` may do in place of `update`.

        Args:
            shape: B, Hk and D of the token that `prepare` was told of.
            like: a tensor of the dtype and device of its states and biases.
            window_size: keys that the module keeps.
        """
        return (
            not self.record_past
            and self._padding is None
            and self.kept.window_size == window_size
            and self.kept.has_slots_for(shape, like, like.dtype)
        )

    def step(self, write: Callable[[Rows, Tensor], None]) -> Rows:
        """Let one token be written into the rows that are kept, and return these.

        Args:
            write: is given the rows and their counter.
        """
        self._key_bias = None
        self._seen += 1
        rows = self.kept.step(write)
        self._show(rows.key, rows.value, rows.bias)
        return rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all keys so far, of which masks are made, and where they begin."""
        return self._seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens were seen."""
        return self._seen

    def get_max_length(self) -> int:
        """Return -1, for no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in some versions

    def activate_past_recording(self) -> None:
        """Hold tokens until `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of those held, of which the others are then kept for good.

        Args:
            tokens_to_remove: as a negative number; 0 forgets none.
        """
        count = -tokens_to_remove
        held = 0 if self._held is None else self._held[0].shape[1]
        if not 0 <= count <= held:
            raise ValueError(
                f"tokens_to_remove must be from {-held} to 0, as the cache holds {held} tokens "
                f"that can be taken back, got {tokens_to_remove}; call activate_past_recording() "
                "before the tokens come"
            )
        if self._held is not None:
            key, value, bias = self._held
            self.kept.update(
                key[:, : held - count], value[:, : held - count], bias[..., : held - count]
            )
        self._held = None
        self._seen -= count

    def reset(self) -> None:
        """Forget everything."""
        self.kept.reset()
        self._held, self._seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence i what sequence ``beam_idx[i]`` was."""
        self.kept.reorder(beam_idx)
        if self._held is not None:
            key, value, bias = (t.index_select(0, beam_idx.to(t.device)) for t in self._held)
            self._held = key, value, bias

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._reorder_by(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self._reorder_by(lambda rows: rows[indices.to(rows.device)])

    def _reorder_by(self, choice: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None:
            self.reorder_cache(choice(torch.arange(self.keys.shape[0], device=self.keys.device)))


def kept_layer_of(cache: Any, index: int, window_size: int, mask: object) -> KeptLayer | None:
    """Return the layer of a cache that keeps a window's keys, or None where it keeps all.

    A cache that grows, and holds nothing yet, is given such a layer: without gradients, and unless
    the mask does more than pad, for then a key that has been dropped may be seen again.

    Args:
        cache: of transformers, or None.
        index: of the layer.
        window_size: keys that a query keeps.
        mask: of this call.

    Raises:
        ValueError: the layer has forgotten keys, and this mask may show them.
    """
    is_padding = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    # Before it had the method, transformers took drafts back from caches without saying so first.
    if type(cache) is not cache_utils.DynamicCache or not hasattr(cache, "activate_past_recording"):
        return None
    layers = cache.layers
    if index < len(layers) and isinstance(layers[index], KeptLayer):
        layer: KeptLayer = layers[index]
        if not is_padding:
            raise ValueError(
                "attention_mask must be None or (B, keys) after a prefill with such a mask, since "
                "the cache keeps only what later tokens can see; begin with the mask of four "
                "dimensions, and the cache keeps all"
            )
        return layer
    if torch.is_grad_enabled() or not is_padding or window_size < 1 or cache.offloading:
        return None
    if cache.layer_class_to_replicate is cache_utils.DynamicLayer:
        while len(layers) <= index:
            layers.append(cache_utils.DynamicLayer())
    if index >= len(layers) or type(layers[index]) is not cache_utils.DynamicLayer:
        return None
    if layers[index].get_seq_length():
        return None
    layer = layers[index] = KeptLayer(window_size)
    layer.record_past = getattr(cache, _RECORDS, False)
    return layer


def remember_recording() -> None:
    """Let caches know what they were asked before they had layers of ours. Repeating is harmless.

    Drafts are announced to a cache before its first use, to layers that do not listen.
    """
    wrap_once(cache_utils.Cache, "activate_past_recording", _ask_and_remember)


def _ask_and_remember(ask: Callable[..., Any], cache: Any) -> Any:
    setattr(cache, _RECORDS, True)
    return ask(cache)


def _joined(one: _Tokens, other: _Tokens) -> _Tokens:
    return (
        torch.cat([one[0], other[0]], 1),
        torch.cat([one[1], other[1]], 1),
        torch.cat([one[2], other[2]], 3),
    )
