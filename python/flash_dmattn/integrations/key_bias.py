# SPDX-License-Identifier: BSD-3-Clause
"""Biases that attention modules compute from their values, one for each key, at that size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_dmattn import checks

from .import_utils import require_transformers
from .mask_forms import Mask
from .registration import ATTENTION_NAME, KEY_BIAS_ATTENTION_NAME, register

__all__ = ["apply_flash_dmattn", "biased"]

KeyBiasFunction = Callable[[torch.nn.Module, Tensor], Tensor]
Model = TypeVar("Model", bound=torch.nn.Module)

_ATTRIBUTE = "flash_dmattn_key_bias"
_CALL = "flash_dmattn_call"


class KeyBias(NamedTuple):
    """What a module computes its bias by, and how many keys it keeps."""

    function: KeyBiasFunction
    window_size: int | None


class DogeCall:
    """What one call of a Doge attention module hands on, past the places that expect a mask."""

    mask: Mask
    bias: Tensor | None
    window_size: int | None

    def __init__(self, mask: Mask) -> None:
        """Keep the mask; the module adds the rest when it has computed it."""
        self.mask = mask
        self.bias = None
        self.window_size = None


def apply_flash_dmattn(
    model: Model,
    key_bias: KeyBiasFunction | None = None,
    *,
    attention: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] | None = None,
    window_size: int | None = None,
) -> Model:
    """Let the attention of a loaded model compute with one bias for each key, and nothing larger.

    A Doge model computes such a bias, and then makes a mask of size Q x K of it. After this call
    the bias goes into attention as it is, ``(B, Hk, 1, K)``, with the model's
    ``keep_window_size``: same results, without the Q x K tensors. Any other model gets a bias by
    ``key_bias``.

    Args:
        model: of transformers; changed in place. Weights, config file and ``save_pretrained`` stay
            what they were.
        key_bias: for models other than Doge. Called as ``key_bias(module, value)`` with an
            attention module and its values ``(B, Hk, K, D)``, those of the cache included; returns
            ``(B, {H|Hk|1}, K)`` or ``(B, {H|Hk|1}, 1, K)``, through which gradients flow.
        attention: with ``key_bias``: the class, or classes, of the modules that get it.
        window_size: keep so many keys with the largest bias; by default all, or Doge's own number.

    Returns:
        The model.

    Raises:
        ImportError: transformers is absent or too old.
        TypeError: an argument has the wrong type.
        ValueError: the model has no module to change, or only one of ``key_bias`` and
            ``attention`` is given.
        RuntimeError: transformers does not let the model have another attention.
    """
    require_transformers()
    register()
    _check_types(model, key_bias, attention)
    if window_size is not None:
        window_size = checks.index("window_size", window_size, 0)
    if (key_bias is None) != (attention is None):
        missing = "attention" if attention is None else "key_bias"
        raise ValueError(f"{missing} must be given too: key_bias and attention belong together")
    if key_bias is None:
        modules = [m for m in model.modules() if _is_doge_attention(m)]
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
    for module in modules:
        if key_bias is None:
            _patch_doge(module, window_size)
        else:
            setattr(module, _ATTRIBUTE, KeyBias(key_bias, window_size))
    return model


def biased(
    module: torch.nn.Module,
    value: Tensor,
    mask: Mask,
    bias: Tensor | None,
    window_size: int | None,
    kwargs: dict[str, Any],
) -> tuple[Mask, Tensor | None, int | None]:
    """Return mask, bias and window of a call, with what `apply_flash_dmattn` gave the module."""
    call: DogeCall | None = kwargs.pop(_CALL, None)
    if call is not None:
        return call.mask, call.bias, call.window_size
    given: KeyBias | None = getattr(module, _ATTRIBUTE, None)
    if given is None:
        return mask, bias, window_size
    own = checks.tensor("the result of key_bias", given.function(module, value))
    own = own if own.dim() == 4 else own.unsqueeze(-2)
    window = given.window_size if window_size is None else window_size
    return mask, own if bias is None else own + bias, window


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


def _is_doge_attention(module: torch.nn.Module) -> bool:
    return hasattr(module, "prepare_dynamic_mask") and hasattr(module, "dt_proj")


def _patch_doge(module: Any, window_size: int | None) -> None:
    """Lead what would become a mask around the functions that make it.

    Instance attributes and hooks: they are copied with the model, and other Doge models of the
    process stay as they are.
    """
    if window_size is not None:
        module.keep_window_size = window_size
    if module.prepare_dynamic_mask is not _take_key_bias:
        module.prepare_dynamic_mask = _take_key_bias
        module.register_forward_pre_hook(_hand_on_mask, with_kwargs=True)


def _hand_on_mask(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # (hidden_states, position_embeddings, attention_mask, ...), mostly given by name.
    mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
    call = DogeCall(mask)
    if len(args) > 2:
        args = (*args[:2], call, *args[3:])
        return args, {**kwargs, _CALL: call}
    return args, {**kwargs, "attention_mask": call, _CALL: call}


def _take_key_bias(
    hidden_states: Tensor,
    dt_states: Tensor,
    keep_window_size: int = 2048,
    attention_mask: DogeCall | None = None,
) -> Tensor:
    """Keep the bias ``(B, Hk, K)`` for the attention function; return a mask without elements."""
    if not isinstance(attention_mask, DogeCall):
        raise TypeError(
            "a Doge attention module changed by apply_flash_dmattn must be called as a module, "
            "not by its forward method"
        )
    attention_mask.bias = dt_states.unsqueeze(2)
    attention_mask.window_size = keep_window_size
    return dt_states.new_empty(*dt_states.shape[:2], 0, 0)


def _set_attention(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    taken = model.config._attn_implementation
    if taken != name:
        raise RuntimeError(
            f"transformers gave {type(model).__name__} attn_implementation={taken!r} in place of "
            f"{name!r}; its attention is not called through the attention interface"
        )
