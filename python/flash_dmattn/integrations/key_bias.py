# SPDX-License-Identifier: BSD-3-Clause
"""Per-key biases that attention modules compute from their values, without expansion."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flash_dmattn import checks
from flash_dmattn.record import KeyCounts

from .implementations import ATTENTION_NAME, other_attention
from .mask_forms import Mask, checked_bias, sum_of_biases

if TYPE_CHECKING:
    from .cache import KeptLayer

__all__ = [
    "CACHE_NAMES",
    "CALL",
    "BiasedCall",
    "KeyBias",
    "KeyBiasFunction",
    "apply_key_bias",
    "attach_key_bias",
    "has_bias",
    "is_doge_attention",
    "patch_doge",
    "take_key_bias",
]

KeyBiasFunction = Callable[[torch.nn.Module, Tensor], Tensor]

_ATTRIBUTE = "flash_dmattn_key_bias"
_CHECKED = "flash_dmattn_checked_key_bias"
CALL = "flash_dmattn_call"
# transformers' argument names of the cache; the second one is used from 5.24 on.
CACHE_NAMES = ("past_key_values", "cache")


class KeyBias(NamedTuple):
    """How a module computes its bias, and how many keys it keeps."""

    function: KeyBiasFunction
    window_size: int | None
    keep_last: int = 0
    keep_first: int = 0
    every_key: bool = False  # caches keep every key


class KeptCall:
    """The state that a call of a module with a `KeyBias` passes on, if its cache drops keys."""

    def __init__(self, layer: KeptLayer) -> None:
        """Store the cache layer, which the module updates."""
        self.layer = layer
        self.is_read = False


class DogeCall:
    """The state that a call of a Doge module passes through functions that expect a mask."""

    mask: Mask
    bias: Tensor | None
    window_size: int | None
    layer: KeptLayer | None
    prepare_dynamic_mask: Callable[..., Tensor] | None

    def __init__(
        self,
        mask: Mask,
        layer: KeptLayer | None,
        prepare_dynamic_mask: Callable[..., Tensor] | None = None,
    ) -> None:
        """Store the mask. The module adds the other attributes when it has computed them.

        A layer that keeps only visible keys has the padding and the biases.

        Args:
            mask: of the call.
            layer: of a cache that keeps only visible keys, or None.
            prepare_dynamic_mask: the module's own method, for other attention implementations.
        """
        self.mask = mask if layer is None else None
        self.bias = None
        self.window_size = None
        self.layer = layer
        self.prepare_dynamic_mask = prepare_dynamic_mask


class BiasedCall(NamedTuple):
    """Keys and values of a call, ``(B, Hk, K, D)``, and what determines their visibility."""

    key: Tensor
    value: Tensor
    mask: Mask
    bias: Tensor | None
    window_size: int | None
    # keep_last and keep_first by name; None keeps those of the call.
    keep_counts: dict[str, int] | None = None


def apply_key_bias(
    module: torch.nn.Module,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bias: Tensor | None,
    window_size: int | None,
    kwargs: dict[str, Any],
) -> BiasedCall:
    """Return a call with the changes that `apply_flash_dmattn` made to the module."""
    call: DogeCall | KeptCall | None = kwargs.pop(CALL, None)
    if isinstance(call, KeptCall):
        is_given_more = bias is not None or kwargs.get("position_bias") is not None
        return _apply_kept_bias(module, call, key, value, is_given_more=is_given_more)
    if call is not None:
        if call.layer is not None:
            key, value = call.layer.keys, call.layer.values
        keep_counts = {"keep_last": 0, "keep_first": 0}
        return BiasedCall(key, value, call.mask, call.bias, call.window_size, keep_counts)
    settings: KeyBias | None = getattr(module, _ATTRIBUTE, None)
    if settings is None:
        return BiasedCall(key, value, mask, bias, window_size)
    key_bias = _compute_bias(module, settings.function, value)
    bias = sum_of_biases(key_bias=key_bias, attention_bias=bias)
    if window_size is not None:
        return BiasedCall(key, value, mask, bias, window_size)
    keep_counts = {"keep_last": settings.keep_last, "keep_first": settings.keep_first}
    return BiasedCall(key, value, mask, bias, settings.window_size, keep_counts)


def attach_key_bias(module: torch.nn.Module, bias: KeyBias) -> None:
    """Give an attention module a bias, which `apply_key_bias` computes in its calls."""
    if not has_bias(module):
        module.register_forward_pre_hook(_refuse_other_attention)
        module.register_forward_pre_hook(_hand_on_kept_layer, with_kwargs=True)
        module.register_forward_hook(_refuse_unread_layer, with_kwargs=True)
    if bias.window_size is not None:
        from .cache import remember_recording

        remember_recording()
    setattr(module, _ATTRIBUTE, bias)


def has_bias(module: torch.nn.Module) -> bool:
    """Say whether a module has a bias of `apply_flash_dmattn`, which needs this attention."""
    return hasattr(module, _ATTRIBUTE)


def _refuse_other_attention(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    if (other := other_attention(module)) is not None:
        raise NotImplementedError(
            f"attn_implementation={other!r} computes without the key_bias that apply_flash_dmattn "
            f"gave {type(module).__name__}: call "
            f"model.set_attn_implementation({ATTENTION_NAME!r}), or load the model anew to compute "
            "without it"
        )


def _apply_kept_bias(
    module: torch.nn.Module, call: KeptCall, key: Tensor, value: Tensor, *, is_given_more: bool
) -> BiasedCall:
    """Return a call with the keys and values that its cache keeps."""
    settings: KeyBias = getattr(module, _ATTRIBUTE)
    layer, call.is_read = call.layer, True
    if is_given_more or layer.is_prepared or key.shape[2] != layer.keys.shape[2]:
        what = "adds another bias" if is_given_more else "does not attend to what its cache returns"
        raise NotImplementedError(f"{type(module).__name__} {what}; {_KEEP_EVERY_KEY}")
    assert layer.bias is not None
    keep_counts = {"keep_last": settings.keep_last, "keep_first": settings.keep_first}
    mask = layer.kept.seen(layer.bias)
    return BiasedCall(key, value, mask, layer.bias, settings.window_size, keep_counts)


_KEEP_EVERY_KEY = (
    "the cache keeps only what can be seen: call apply_flash_dmattn with every_key=True, and it "
    "keeps all"
)


def _hand_on_kept_layer(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let the cache of a call keep only visible keys, if the module's call allows that."""
    settings: KeyBias = getattr(module, _ATTRIBUTE)
    names = _parameter_names(type(module).forward)
    index = getattr(module, "layer_idx", None)
    if settings.window_size is None or settings.every_key or names is None or index is None:
        return None
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
    is_causal = getattr(module, "is_causal", True) and named.get("is_causal") is not False
    limits = (getattr(module, "sliding_window", None), *map(named.get, _OTHER_LIMITS))
    if cache is None or not is_causal or any(limit is not None for limit in limits):
        return None
    from .cache import kept_layer_of

    counts = KeyCounts(settings.window_size, settings.keep_last, settings.keep_first)
    mask = named.get("attention_mask")
    needs_all = ""
    if torch.is_grad_enabled():
        needs_all = (
            "with gradients the biases of all of them are needed; call under torch.no_grad(), or "
            "begin with gradients enabled, and the cache keeps every key"
        )
    layer = kept_layer_of(cache, index, counts, mask, needs_all, for_doge=False)
    if layer is None:
        return None
    padding = mask if isinstance(mask, Tensor) else None
    layer.prepare(functools.partial(_bias_of_each_value, module, settings.function), padding)
    return args, {**kwargs, CALL: KeptCall(layer)}


# Arguments besides the mask that limit the visible keys.
_OTHER_LIMITS = ("window_size", "keep_window_size", "sliding_window")


@functools.lru_cache(maxsize=256)
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of a method's arguments, or None if it takes no other keywords."""
    _, *parameters = inspect.signature(forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


def _refuse_unread_layer(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    call = kwargs.get(CALL)
    if isinstance(call, KeptCall) and not call.is_read:
        raise NotImplementedError(
            f"{type(module).__name__} does not hand on its keyword arguments to attention; "
            f"{_KEEP_EVERY_KEY}"
        )


def _compute_bias(module: torch.nn.Module, function: KeyBiasFunction, value: Tensor) -> Tensor:
    """Return the bias ``({B|1}, {H|Hk|1}, 1, K)`` of values ``(B, Hk, K, D)``."""
    bias = checked_bias("the result of key_bias", function(module, value))
    (batch, kv_heads, keys, _), heads = value.shape, bias.shape[1]
    is_of_heads = heads == 1 or heads % kv_heads == 0
    if not (checks.is_one_of(bias.shape[0], 1, batch) and is_of_heads and bias.shape[3] == keys):
        raise ValueError(
            "the result of key_bias must have shape (B, K), (B, {H|Hk|1}, K) or "
            f"(B, {{H|Hk|1}}, 1, K) with B={batch}, Hk={kv_heads}, K={keys}, got "
            f"{tuple(bias.shape)}"
        )
    return bias if bias.is_floating_point() else bias.to(torch.float32)


def _bias_of_each_value(
    module: torch.nn.Module, function: KeyBiasFunction, value: Tensor
) -> Tensor:
    """Return the bias of values ``(B, N, Hk, D)``, which must not depend on other values."""
    value = value.transpose(1, 2)
    bias = _compute_bias(module, function, value)
    is_checked = getattr(module, _CHECKED, None) is function or torch.compiler.is_compiling()
    if value.shape[2] and not is_checked:
        _check_each_value(module, function, value)
        setattr(module, _CHECKED, function)
    return bias


def _check_each_value(module: torch.nn.Module, function: KeyBiasFunction, value: Tensor) -> None:
    """Raise ValueError if the last values get other biases when they are passed alone."""
    if value.shape[2] == 1:
        value = torch.cat([value, 2 * value + 1], 2)
    half = value.shape[2] // 2
    together = _compute_bias(module, function, value)[..., half:].float()
    alone = _compute_bias(module, function, value[:, :, half:]).float()
    size = together.nan_to_num(0, 0, 0).abs().amax()
    bound = size * (1e-4 if value.element_size() > 2 else 3e-2)
    if together.shape != alone.shape or not torch.allclose(
        together, alone, rtol=0, atol=float(bound), equal_nan=True
    ):
        raise ValueError(
            "key_bias must give each token a bias by its own value, whatever its place and the "
            "other values are, as caches keep only what can be seen; got another bias for tokens "
            "that are alone: call apply_flash_dmattn with every_key=True, and they keep all"
        )


def is_doge_attention(module: torch.nn.Module) -> bool:
    """Say whether a module computes the bias of Doge models."""
    return hasattr(module, "prepare_dynamic_mask") and hasattr(module, "dt_proj")


def patch_doge(module: Any, window_size: int | None) -> None:
    """Pass the bias around the functions that would expand it to a mask.

    Uses instance attributes and hooks: they are copied with the model, and other Doge models of the
    process are unchanged.
    """
    if window_size is not None:
        module.keep_window_size = window_size
    from .cache import remember_recording

    remember_recording()
    if module.prepare_dynamic_mask is not take_key_bias:
        module.prepare_dynamic_mask = take_key_bias
        module.register_forward_pre_hook(_hand_on_mask, with_kwargs=True)


def _hand_on_mask(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # (hidden_states, position_embeddings, attention_mask, ...), mostly passed by name.
    mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
    names = (name for name in CACHE_NAMES if kwargs.get(name) is not None)
    cache = args[3] if len(args) > 3 else kwargs.get(next(names, ""))
    layer = _kept_layer(module, cache, mask)
    if other_attention(module) is None:
        call = DogeCall(mask, layer)
        kwargs = {**kwargs, CALL: call}
    else:
        prepare_dynamic_mask = functools.partial(type(module).prepare_dynamic_mask, module)
        call = DogeCall(mask, None, prepare_dynamic_mask)
    if len(args) > 2:
        return (*args[:2], call, *args[3:]), kwargs
    return args, {**kwargs, "attention_mask": call}


def _kept_layer(module: Any, cache: Any, mask: Mask) -> KeptLayer | None:
    """Return the module's cache layer if it keeps only visible keys, prepared for a call."""
    if cache is None:
        return None
    from .cache import kept_layer_of

    counts, needs_all = KeyCounts(module.keep_window_size), _needs_every_key(module)
    layer = kept_layer_of(cache, module.layer_idx, counts, mask, needs_all, for_doge=True)
    if layer is not None:
        padding = mask if isinstance(mask, Tensor) else None
        layer.prepare(functools.partial(_doge_bias, module), padding)
    return layer


def _needs_every_key(module: Any) -> str:
    """Return why a module needs all keys, and the remedy; or ""."""
    if (other := other_attention(module)) is not None:
        return f"attn_implementation={other!r} reads all of them; begin with a new cache"
    if torch.is_grad_enabled() and any(
        parameter.requires_grad for parameter in (module.A, *module.dt_proj.parameters())
    ):
        return (
            "in training the biases of all of them have gradients; call under torch.no_grad(), or "
            "begin with gradients enabled or with a subclass of DynamicCache, which keeps every key"
        )
    return ""


def _doge_bias(module: Any, value: Tensor) -> Tensor:
    """Return the bias ``(B, Hk, 1, N)`` of values ``(B, N, Hk, D)``, by the model's operations."""
    states = module.dt_proj(value.flatten(2))
    return torch.exp(module.A * softplus(states)).transpose(-1, -2).unsqueeze(2)


def take_key_bias(
    hidden_states: Tensor,
    dt_states: Tensor,
    keep_window_size: int = 2048,
    attention_mask: DogeCall | None = None,
) -> Tensor:
    """Store the bias ``(B, Hk, K)`` for the attention function; return an empty mask."""
    if not isinstance(attention_mask, DogeCall):
        raise TypeError(
            "a Doge attention module changed by apply_flash_dmattn must be called as a module, "
            "not by its forward method"
        )
    if attention_mask.prepare_dynamic_mask is not None:
        return attention_mask.prepare_dynamic_mask(
            hidden_states=hidden_states,
            dt_states=dt_states,
            keep_window_size=keep_window_size,
            attention_mask=attention_mask.mask,
        )
    layer = attention_mask.layer
    # The cache layer has computed the biases of its keys.
    attention_mask.bias = dt_states.unsqueeze(2) if layer is None else layer.bias
    attention_mask.window_size = keep_window_size
    return dt_states.new_empty(*dt_states.shape[:2], 0, 0)
