# SPDX-License-Identifier: BSD-3-Clause
"""Giving a loaded model attention with a per-key bias."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch

from flash_dmattn import checks
from flash_dmattn.checks import flag
from flash_dmattn.selection import refuse_without_window
from flash_dmattn.wrong_keywords import hide_unknown_keywords, refuse_keywords

from .implementations import ATTENTION_NAME, KEY_BIAS_ATTENTION_NAME
from .import_utils import require_transformers
from .key_bias import KeyBias, KeyBiasFunction, attach_key_bias, is_doge_attention, patch_doge
from .registration import register
from .saving import forget_note, warn_when_saved

__all__ = ["apply_flash_dmattn"]

Model = TypeVar("Model", bound=torch.nn.Module)


@hide_unknown_keywords
def apply_flash_dmattn(
    model: Model,
    key_bias: KeyBiasFunction | None = None,
    *,
    attention: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] | None = None,
    window_size: int | None = None,
    keep_last: int = 0,
    keep_first: int = 0,
    every_key: bool = False,
    **unknown: NoReturn,
) -> Model:
    """Let the attention of a loaded model compute with a per-key bias and no Q x K tensor.

    A Doge model computes such a bias, and then expands it to a Q x K mask. After this call the bias
    goes into attention as it is, ``(B, Hk, 1, K)``, with the model's ``keep_window_size``: same
    results, without the Q x K tensors. Any other model gets a bias from ``key_bias``.

    Args:
        model: of transformers; changed in place. Saved files do not include ``key_bias`` and the
            numbers of kept keys. ``save_pretrained`` warns, and records it in the config file, so
            that loading warns, too.
        key_bias: for models other than Doge. Called as ``key_bias(module, value)`` with an
            attention module and its values ``(B, Hk, K, D)``, including those of the cache. Returns
            ``(B, K)``, ``(B, {H|Hk|1}, K)`` or ``(B, {H|Hk|1}, 1, K)``, differentiable. With
            ``window_size`` the bias of a token must depend only on its own value: outside of
            training a `DynamicCache` keeps only the keys that later tokens can see, as for Doge.
        attention: with ``key_bias``: the class, or classes, of the modules that get it.
        window_size: the number of keys with the largest bias to keep, at least 1, or 0 with
            keep_last or keep_first; by default all keys, or Doge's own number.
        keep_last, keep_first: with ``key_bias`` and ``window_size``: also keep this many of the
            last and of the first keys that a query sees. Doge's weights need 0.
        every_key: with ``key_bias``: caches keep every key. Needed if the bias of a token depends
            on its position or on other tokens.

    Returns:
        The model.

    Raises:
        ImportError: transformers is absent or too old.
        TypeError: an argument has the wrong type.
        ValueError: the model has no module to change, or only one of ``key_bias`` and
            ``attention`` is given.
        RuntimeError: transformers does not let the model use another attention.
    """
    if unknown:
        refuse_keywords(apply_flash_dmattn, unknown)
    require_transformers()
    register()
    _check_types(model, key_bias, attention)
    every_key = flag("every_key", every_key)
    if every_key and key_bias is None:
        raise ValueError("every_key must be False without key_bias")
    if window_size is None or key_bias is None:
        needed = "window_size" if window_size is None else "key_bias, as Doge's weights need it"
        refuse_without_window(keep_last, keep_first, f"without {needed}")
    keep_counts = {
        "keep_last": checks.index("keep_last", keep_last, 0),
        "keep_first": checks.index("keep_first", keep_first, 0),
    }
    if window_size is not None:
        window_size = checks.index(
            "window_size", window_size, 0 if any(keep_counts.values()) else 1
        )
    if (key_bias is None) != (attention is None):
        missing = "attention" if attention is None else "key_bias"
        raise ValueError(f"{missing} must be given too: key_bias and attention belong together")
    if key_bias is None:
        modules = [m for m in model.modules() if is_doge_attention(m)]
    else:
        assert attention is not None
        modules = [m for m in model.modules() if isinstance(m, attention)]
    if not modules:
        wanted = "Doge's attention" if attention is None else f"attention={attention!r}"
        raise ValueError(
            f"{type(model).__name__} has no module of {wanted}; for a model other than Doge give "
            "key_bias and attention"
        )
    _set_attention(model, KEY_BIAS_ATTENTION_NAME if key_bias is None else ATTENTION_NAME)
    forget_note(getattr(model, "config", None))
    if key_bias is not None:
        for module in modules:
            attach_key_bias(
                module, KeyBias(key_bias, window_size, **keep_counts, every_key=every_key)
            )
        kept = {} if window_size is None else {"window_size": window_size}
        kept |= {name: count for name, count in keep_counts.items() if count}
        words = ["key_bias", *(f"{name}={count}" for name, count in kept.items())]
        warn_when_saved(modules[0], " and ".join(words))
        return model
    from .doge import let_steps_be_fused

    for module in modules:
        patch_doge(module, window_size)
        let_steps_be_fused(type(module))
    first: Any = modules[0]
    is_in_config = first.keep_window_size == getattr(first.config, "keep_window_size", None)
    warn_when_saved(first, "" if is_in_config else f"window_size={first.keep_window_size}")
    return model


def _check_types(model: Any, key_bias: Any, attention: Any) -> None:
    if not (isinstance(model, torch.nn.Module) and hasattr(model, "set_attn_implementation")):
        hint = ""
        if isinstance(model, str):
            hint = "; AutoModelForCausalLM.from_pretrained(...) of transformers loads one"
        raise TypeError(
            f"model must be a loaded model of transformers, got {checks.described(model)}{hint}"
        )
    if key_bias is not None and not callable(key_bias):
        checks.refuse_type("key_bias", "a function or None", key_bias)
    classes = attention if isinstance(attention, tuple) else (attention,)
    if attention is not None and not (classes and all(isinstance(c, type) for c in classes)):
        checks.refuse_type("attention", "a class of modules, a tuple of them, or None", attention)


def _set_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    actual = model.config._attn_implementation
    if actual != name:
        raise RuntimeError(
            f"transformers gave {type(model).__name__} attn_implementation={actual!r} in place of "
            f"{name!r}; its attention is not called through the attention interface"
        )
