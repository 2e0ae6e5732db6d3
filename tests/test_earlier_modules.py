# SPDX-License-Identifier: BSD-3-Clause
"""The modules of flash-dmattn 1.2.2: their argument order and defaults."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends import is_available
from flash_dmattn.flash_dmattn_flex import flex_dmattn_func
from flash_dmattn.flash_dmattn_interface import flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.flash_dmattn_triton import triton_dmattn_func
from support import rand_bool, randn

QUERY, KEY, VALUE = (randn(1, 8, 2, 16, seed=n) for n in range(3))
MASK, BIAS = rand_bool(1, 2, 8, 8, density=0.8), randn(1, 2, 8, 8, seed=3)


def wanted(**options: Any) -> Tensor:
    out = flash_dmattn_func(QUERY, KEY, VALUE, MASK, BIAS, **options)
    assert isinstance(out, Tensor)
    return out


def test_functions_are_those_of_the_package() -> None:
    assert flash_dmattn_func is flash_dmattn.flash_dmattn_func
    assert flash_dmattn_varlen_func is flash_dmattn.flash_dmattn_varlen_func


@pytest.mark.skipif(not is_available("flex"), reason="no FlexAttention")
def test_flex_is_causal_by_default() -> None:
    out = flex_dmattn_func(QUERY, KEY, VALUE, MASK, BIAS)
    torch.testing.assert_close(out, wanted(is_causal=True))
    out = flex_dmattn_func(QUERY, KEY, VALUE, MASK, BIAS, False, 0.3)
    torch.testing.assert_close(out, wanted(softmax_scale=0.3))
    out, lse = flex_dmattn_func(QUERY, KEY, VALUE, MASK, BIAS, False, return_lse=True)
    assert lse.shape == (1, 2, 8)


def test_triton_has_causality_before_the_scale() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        out = triton_dmattn_func(QUERY, KEY, VALUE, MASK, BIAS, True, 0.3)
        torch.testing.assert_close(out, wanted(is_causal=True, softmax_scale=0.3))
    else:  # the import works, and a call explains why the backend cannot run
        with pytest.raises(RuntimeError, match=r"backend 'triton' is not available here"):
            triton_dmattn_func(QUERY, KEY, VALUE, MASK, BIAS, True, 0.3)


def test_names_of_integrations() -> None:
    """The names of 1.2.2's modules are aliases of the current transformers integration."""
    pytest.importorskip("transformers")
    from flash_dmattn.integrations import (
        flash_dynamic_mask_attention,
        model_attention,
        modeling_flash_dynamic_mask_attention_utils,
        transformers_attention,
    )

    for alias, module in (
        (flash_dynamic_mask_attention, transformers_attention),
        (modeling_flash_dynamic_mask_attention_utils, model_attention),
    ):
        for name in alias.__all__:
            assert getattr(alias, name) is getattr(module, name)
