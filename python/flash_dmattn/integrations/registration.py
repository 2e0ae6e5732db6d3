# SPDX-License-Identifier: BSD-3-Clause
"""Registration with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .implementations import (
    ATTENTION_NAME,
    KEY_BIAS_ATTENTION_NAME,
    NAMES,
    choose_attention_dropout,
    note_masks_of,
)
from .import_utils import require_transformers
from .key_bias import has_bias
from .saving import warn_of_note
from .wrap_once import wrap_once

__all__ = ["register"]


def register(attention_dropout: str | None = None) -> None:
    """Register ``attn_implementation="flash_dmattn"`` with transformers. May be repeated.

    Args:
        attention_dropout: what happens if a model in training requests dropout of attention
            probabilities, as T5 does by its ``dropout_rate``: "refuse" raises NotImplementedError,
            "skip" trains without it but with all other dropout of the model. None keeps the
            previous choice, initially "refuse".

    Raises:
        ImportError: transformers is absent, or older than the ``transformers`` extra requires.
        ValueError: attention_dropout has another value.
    """
    require_transformers()
    if attention_dropout is not None:
        choose_attention_dropout(attention_dropout)
    from transformers import AttentionInterface, AttentionMaskInterface

    from .model_masks import compact_model_mask, model_mask
    from .transformers_attention import flash_dynamic_mask_attention_forward

    for name, mask in ((ATTENTION_NAME, model_mask), (KEY_BIAS_ATTENTION_NAME, compact_model_mask)):
        AttentionInterface.register(name, flash_dynamic_mask_attention_forward)
        AttentionMaskInterface.register(name, mask)
    _keep_attention_names()
    _refuse_continuous_batching()


def _keep_attention_names() -> None:
    """Keep transformers from treating these names as FlashAttention's.

    From version 5 it treats each such name, registered or not, as a flash attention kernel. It
    loads that kernel before the model is made, and for some models replaces the name.
    """
    from transformers import PreTrainedModel

    wrap_once(PreTrainedModel, "_check_and_adjust_attn_implementation", _check_implementation)


def _check_implementation(
    check: Callable[..., Any], model: Any, implementation: str | None, *args: Any, **kwargs: Any
) -> Any:
    warn_of_note(model.config)
    if implementation not in NAMES:
        return check(model, implementation, *args, **kwargs)
    _refuse_own_attention(type(model))
    note_masks_of(type(model), model.config)
    return implementation


def _refuse_own_attention(model_class: Any) -> None:
    """Raise NotImplementedError for a transformers model that never calls attention functions."""
    calls_functions = getattr(model_class, "_can_set_attn_implementation", None)
    # The check reads source code, which may be absent for user-defined models.
    if not model_class.__module__.startswith("transformers.") or calls_functions is None:
        return
    if not calls_functions():
        raise NotImplementedError(
            f"attn_implementation={ATTENTION_NAME!r}: {model_class.__name__} computes attention in "
            "its own code and calls no registered function; load it with "
            "attn_implementation='eager', or, where it is a part of a model, give the parts their "
            "own by a dict"
        )


def _refuse_continuous_batching() -> None:
    """Refuse continuous batching at its start, because its paged cache is not supported.

    Later errors occur in another thread: they are only logged, and the answers are empty.
    """
    try:
        from transformers.generation.continuous_batching import continuous_api
    except ImportError:
        return
    # generate_batch and all other entry points call this, in every version.
    models = getattr(continuous_api, "ContinuousMixin", None)
    wrap_once(models, "init_continuous_batching", _begin_batching)


def _begin_batching(begin: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    implementation = model.config._attn_implementation
    is_biased = any(has_bias(module) for module in model.modules())
    if implementation in NAMES or is_biased:
        alternative = "" if is_biased else ", or model.set_attn_implementation('sdpa') before it"
        raise NotImplementedError(
            f"attn_implementation={implementation!r}: the paged caches of continuous batching "
            "are not read by flash_dmattn; call generate() in place of generate_batch()"
            f"{alternative}"
        )
    return begin(model, *args, **kwargs)
