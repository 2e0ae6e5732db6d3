# SPDX-License-Identifier: BSD-3-Clause
"""The masks that transformers makes once per forward pass for the layers of a model.

Inputs such as a 2-D padding mask are passed to the attention function unchanged if they are
sufficient. A Q x K mask is made only if no smaller form is equivalent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from flash_dmattn.masks import IntervalMask

from .implementations import expects_eager_masks
from .packed_documents import Documents

__all__ = ["compact_model_mask", "model_mask"]

ModelMask = Tensor | IntervalMask | Documents | None

_CAUSAL = masking_utils.causal_mask_function
_BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)
# The attention of these computes with the mask, or crops it, before it calls the attention
# function. Newer versions of transformers state this for Doge in each call.
_MASK_IS_COMPUTED_WITH = frozenset({"doge", "pix2struct_text_model"})
# The causal attention of these sets is_causal=False, so the mask must include causality.
_MASK_SAYS_WHAT_IS_CAUSAL = frozenset({"pegasus_x", "videoprism_text_model"})
_NOTHING_IS_SKIPPED = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
# Mask elements that are examined at a time.
_BLOCK_ELEMENTS = 1 << 24


def model_mask(**settings: Any) -> ModelMask:
    """Return the mask of a forward pass, for models that may compute with it.

    Args:
        **settings: the arguments that transformers passes to every mask function.

    Returns:
        None, if ``is_causal`` is sufficient; bool ``(B, keys so far)``, or ``(B, 1, 1, keys)`` for
        the queries of another sequence, True for tokens; an `IntervalMask` or `Documents` for
        patterns that these express; otherwise bool ``(B, 1, Q, K)``, or a floating mask of that
        shape for a model that expects the masks of eager attention.
    """
    function = settings.get("mask_function", _CAUSAL)
    model_type = getattr(settings.get("config"), "model_type", None)
    if expects_eager_masks(settings.get("config")):
        added: Tensor = masking_utils.eager_mask(**settings | _NOTHING_IS_SKIPPED)
        return added
    if model_type in _MASK_IS_COMPUTED_WITH or _has_indexer(settings.get("config")):
        return _full_mask(settings)
    if model_type in _MASK_SAYS_WHAT_IS_CAUSAL and function is _CAUSAL:
        return _full_mask(settings)
    # allow_is_causal_skip is False for packed sequences and other patterns.
    if function is _CAUSAL and not settings.get("allow_is_causal_skip", True):
        return _full_mask(settings)
    return _smallest(settings)


def _has_indexer(config: Any) -> bool:
    """Say whether a model may select keys for each query among those that its mask keeps."""
    return getattr(config, "index_topk", None) is not None


def compact_model_mask(**settings: Any) -> ModelMask:
    """Return the mask of a forward pass, as `model_mask`, for a Doge that only passes it on.

    Besides causal masks, with and without packed sequences, such a model has sliding windows.
    """
    function = settings.get("mask_function", _CAUSAL)
    if function is _CAUSAL or settings.get("local_size") is not None:
        return _smallest(settings)
    return _documents(settings)


def _smallest(settings: dict[str, Any]) -> ModelMask:
    function = settings.get("mask_function", _CAUSAL)
    if function is _BIDIRECTIONAL:
        padding = _none_if_all(_padding(settings))
        if padding is None or _query_sizes(settings)[0] == settings["kv_length"]:
            return padding
        # Pooling heads, such as that of Siglip 2, repeat the mask for each head.
        return padding[:, None, None]
    if function is _CAUSAL:
        return _causal(settings)
    queries, offset = _query_sizes(settings)
    is_whole = queries == settings["kv_length"] and settings.get("kv_offset", 0) == 0
    # generate(), which disables gradients, assumes that the masks of some caches are tensors.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not is_whole or offset != 0:
        return _full_mask(settings)
    intervals = _intervals(settings, queries)
    return _full_mask(settings) if intervals is None else _simplify(intervals)


def _causal(settings: dict[str, Any]) -> ModelMask:
    keys, key_offset = settings["kv_length"], settings.get("kv_offset", 0)
    queries, offset = _query_sizes(settings)
    padding = _padding(settings)
    if queries == keys and key_offset == 0:
        return _none_if_all(padding)
    if queries == 1 and isinstance(offset, Tensor):
        # The length of a static cache is known only on the device.
        place = torch.arange(keys, device=offset.device) + key_offset
        seen: Tensor = (place <= offset)[None]
        return (seen if padding is None else seen & padding)[:, None, None]
    if isinstance(offset, Tensor) and torch.compiler.is_compiling():
        return _full_mask(settings)
    written_keys = int(offset) + queries - key_offset
    if written_keys == keys:
        return _none_if_all(padding)
    if written_keys > keys:
        return _full_mask(settings)
    if padding is not None:
        return padding[:, :written_keys]
    device = settings.get("device")
    if device is None:
        device = settings["cache_position"].device
    size: tuple[int, int] = (settings["batch_size"], written_keys)
    return torch.ones(size, dtype=torch.bool, device=device)


def _query_sizes(settings: dict[str, Any]) -> tuple[int, int | Tensor]:
    """Return Q and the position of the first query, which may be known only on the device."""
    positions = settings.get("cache_position")
    if positions is None:
        return settings["q_length"], settings.get("q_offset", 0)
    # Versions without q_offset pass the positions of all queries.
    return positions.shape[0], positions[0]


def _padding(settings: dict[str, Any]) -> Tensor | None:
    """Return bool ``(B, kv_length)``, False for keys beyond the end of the 2-D mask."""
    mask: Tensor | None = settings.get("attention_mask")
    if mask is None:
        return None
    keys, offset = settings["kv_length"], settings.get("kv_offset", 0)
    mask = mask[:, offset : offset + keys].to(torch.bool)
    return torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))


def _none_if_all(padding: Tensor | None) -> Tensor | None:
    if padding is None or torch.compiler.is_compiling() or not padding.all():
        return padding
    return None


def _full_mask(settings: dict[str, Any]) -> Tensor:
    """Return the whole mask, bool ``(B, 1, Q, K)``, by transformers' function for SDPA."""
    mask: Tensor = masking_utils.sdpa_mask(**settings | _NOTHING_IS_SKIPPED)
    return mask


def _intervals(settings: dict[str, Any], queries: int) -> IntervalMask | None:
    """Return the mask as intervals, or None if separate runs of queries keep some key.

    The mask is made in blocks of rows, so that only one block is in memory.
    """
    keys = settings["kv_length"]
    rows = max(1, _BLOCK_ELEMENTS // max(1, keys))
    first: Tensor | None = None
    for begin in range(0, queries, rows):
        end = min(begin + rows, queries)
        kept = _full_mask({**settings, **_block(settings, begin, end)})[:, 0]
        count = kept.sum(1, dtype=torch.int32)
        # The first True row of each key, and one past the last True row.
        begins = kept.to(torch.uint8).argmax(1).to(torch.int32) + begin
        ends = end - kept.flip(1).to(torch.uint8).argmax(1).to(torch.int32)
        if first is None:
            first = torch.full_like(count, queries)
            last, total = torch.zeros_like(count), torch.zeros_like(count)
        first = torch.where(count > 0, torch.minimum(first, begins), first)
        last = torch.where(count > 0, torch.maximum(last, ends), last)
        total += count
    if first is None:
        return None
    if not ((last - first == total) | (total == 0)).all():
        return None
    first = torch.where(total > 0, first, 0)
    return IntervalMask(first[:, None], last[:, None], query_length=queries)


def _block(settings: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return the changes of settings for a range of queries."""
    if settings.get("cache_position") is not None:
        return {"cache_position": settings["cache_position"][begin:end]}
    return {"q_length": end - begin, "q_offset": begin}


def _documents(settings: dict[str, Any]) -> Documents:
    """Return the documents of a causal mask of packed sequences, by the neighbours it joins."""
    batch, keys, device = settings["batch_size"], settings["kv_length"], settings.get("device")
    if device is None:
        device = settings["cache_position"].device
    row, key = torch.arange(batch, device=device)[:, None], torch.arange(keys, device=device)[None]
    joined = settings["mask_function"](row, torch.zeros_like(row), key[:, 1:], key[:, :-1])
    return _documents_of_beginnings(~joined)


def _documents_of_beginnings(begins: Tensor) -> Documents:
    """Return the documents from flags of each token but the first that begin a document."""
    ids = begins.to(torch.int32).cumsum(1, dtype=torch.int32)
    return Documents(torch.nn.functional.pad(ids, (1, 0)))


def _simplify(intervals: IntervalMask) -> ModelMask:
    """Return None for one causal document, `Documents` for several, else the intervals."""
    start, end = intervals.start[:, 0], intervals.end[:, 0]
    key = torch.arange(start.shape[1], device=start.device)
    begins = end[:, 1:] != end[:, :-1]
    # A document begins where the one before it ends.
    is_partition = (start == key).all() & ((end[:, :-1] == key[1:]) | ~begins).all()
    reaches_end = (end[:, -1:] == start.shape[1]).all()
    if not is_partition & reaches_end:
        return intervals
    if not begins.any():
        return None
    return _documents_of_beginnings(begins)
