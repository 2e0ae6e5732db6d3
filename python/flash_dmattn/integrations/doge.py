# SPDX-License-Identifier: BSD-3-Clause
"""A decoding step of a Doge attention module in few kernels instead of about fifty."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_dmattn.arguments import backend_name
from flash_dmattn.dispatch_state import PLAIN_TYPES
from flash_dmattn.modules.fusing import are_unmodified, is_token, plain_parts
from flash_dmattn.modules.parts import Part
from flash_dmattn.state.stepping import has_kernel

from .cache import KeptLayer
from .implementations import other_attention
from .key_bias import CACHE_NAMES, CALL, take_key_bias
from .wrap_once import wrap_once

__all__ = ["doge_step", "let_steps_be_fused"]

# Arguments without effect on the results of a module that has a cache and no gradients.
_NEUTRAL = frozenset({"cache_position", "position_ids", "use_cache"})
_POSITIONAL = ("hidden_states", "position_embeddings", "attention_mask", CACHE_NAMES[0])
_SUPPORTED = frozenset({*_POSITIONAL, *CACHE_NAMES, CALL})
# Steps by module, valid until the module changes.
_steps: weakref.WeakKeyDictionary[nn.Module, _Step] = weakref.WeakKeyDictionary()


class _Step:
    """The kernels of a module's decoding steps, and the parts that they were made for."""

    def __init__(self, module: Any, parts: tuple[Part, ...]) -> None:
        from flash_dmattn.backends.triton.kernels.project import ROTARY_BY_COSINES
        from flash_dmattn.modules.step_kernels import Sizes, StepKernels
        from flash_dmattn.state.insert_kernel import BiasOfValues

        query, key, states, norms = parts[0], parts[1], parts[4], parts[5:]
        dim = module.head_dim
        norm_eps: list[Any] = [norm.module.variance_epsilon for norm in norms]
        self.parts = parts
        # Converting a module's dtype keeps its parameter objects, so store the dtype.
        self.dtype = query.weight.dtype
        self._amplitude = module.A
        self._settings = _settings(module)
        self.sizes = Sizes(
            query.weight.shape[1], query.weight.shape[0] // dim, key.weight.shape[0] // dim, dim
        )
        self.kernels = StepKernels(
            self.sizes,
            parts,
            BiasOfValues(states.weight, states.bias, module.A, is_exponential=True),
            eps=(norm_eps[0], norm_eps[1]),
            rounds_norm=True,
            rotary=ROTARY_BY_COSINES.value,
            scale=module.scaling,
            backend=backend_name(None),
        )

    def is_of(self, module: Any) -> bool:
        """Say whether the module still has these parts and settings."""
        return _settings(module) == self._settings and module.A is self._amplitude


def let_steps_be_fused(kind: Any) -> None:
    """Let modules of a class that pass on a `KeptLayer` try `doge_step`. May be repeated.

    The class is changed instead of the module, because data-parallel replicas share a module's
    attributes.
    """
    if kind.forward.__module__ == kind.__module__:  # otherwise the method has been replaced
        wrap_once(kind, "forward", _step_or_forward)


def _step_or_forward(forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    call = kwargs.get(CALL)
    if call is not None and call.layer is not None:
        output = doge_step(module, call.layer, args, kwargs)
        if output is not None:
            return output, None
    return forward(module, *args, **kwargs)


def doge_step(
    module: Any, layer: KeptLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return a module's output for one token, ``(B, 1, width)``, which its cache takes in.

    Args:
        module: changed by `apply_flash_dmattn`.
        layer: of the cache, prepared for this call.
        args, kwargs: of the call.

    Returns:
        None, without any effect, if the module is modified or the call has an argument that the
        kernels do not support.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or module.training:
        return None
    arguments = {**kwargs, **dict(zip(_POSITIONAL, args, strict=False))}
    if len(args) > len(_POSITIONAL) or not all(
        value is None or value is False or name in _NEUTRAL or name in _SUPPORTED
        for name, value in arguments.items()
    ):
        return None
    x, cos_sin = arguments["hidden_states"], arguments["position_embeddings"]
    if (
        not is_token(x)
        or not has_kernel(x.device.type)
        or not _are_supported_cos_sin(cos_sin, x, module)
    ):
        return None
    if other_attention(module) is not None:
        return None
    if module.prepare_dynamic_mask is not take_key_bias:
        return None
    step = _steps.get(module)
    if step is None or step.dtype != x.dtype or not step.is_of(module):
        step = _make_step(module)
    if step is None or not are_unmodified(step.parts, x.dtype, x.device):
        return None
    width, _, kv_heads, dim = step.sizes
    if x.shape[2] != width:
        return None
    if not layer.can_step((x.shape[0], kv_heads, dim), x, module.keep_window_size):
        return None
    from flash_dmattn.modules.step_kernels import RotaryInputs

    cos, sin = cos_sin
    row_stride = cos.stride(0) if cos.shape[0] > 1 else 0
    return step.kernels(
        x, RotaryInputs(cos, sin, row_stride), layer.step, layer.kept.counts, None, 0.0
    )


def _make_step(module: Any) -> _Step | None:
    from transformers.models.doge import modeling_doge

    if type(module) is not modeling_doge.DogeAttention:
        return None
    parts = plain_parts(module, modeling_doge.DogeRMSNorm)
    if parts is None or len(parts) != 7:
        return None
    _steps[module] = step = _Step(module, parts)
    return step


def _settings(module: Any) -> tuple[object, ...]:
    norms = module.q_norm, module.k_norm
    return (
        *module._modules.values(),
        module.head_dim,
        module.scaling,
        *(getattr(norm, "variance_epsilon", None) for norm in norms),
    )


def _are_supported_cos_sin(cos_sin: Any, x: Tensor, module: Any) -> bool:
    """Say whether these are cosines and sines per sequence, or common to all sequences."""
    if not isinstance(cos_sin, tuple) or len(cos_sin) != 2:
        return False
    cos, sin = cos_sin
    return (
        type(cos) in PLAIN_TYPES
        and type(sin) in PLAIN_TYPES
        and cos.shape == sin.shape
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1:] == (1, module.head_dim)
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
        and cos.dtype == sin.dtype == x.dtype
        and cos.device == sin.device == x.device
    )
