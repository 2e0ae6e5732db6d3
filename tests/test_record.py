# SPDX-License-Identifier: BSD-3-Clause
"""Definitions that follow from the declaration of a call's arguments."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash_dmattn import ops, record
from flash_dmattn.record import ATTENTION, AttentionInputs, Packing

# Exported programs name the arguments: existing ones stay, and new ones have defaults.
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? start, Tensor? end, "
    "Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_table, "
    "Tensor? given_plan, Tensor? sink, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, "
    "bool causal, float softcap, bool deterministic, SymInt max_kept, SymInt window, "
    "SymInt keep_last, SymInt keep_first, bool keeps_runs"
)
GRADIENTS = "Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dbias, Tensor dsink"


def test_operators_follow_from_the_record() -> None:
    assert ATTENTION.text == SCHEMA
    assert ATTENTION.differentiable == ("query", "key", "value", "bias", "sink")
    assert ops.__all__  # importing it defines the operators
    forward = str(torch.ops.flash_dmattn.attention_forward.default._schema)
    assert forward.startswith(
        f"flash_dmattn::attention_forward({SCHEMA}, str backend, bool keeps) ->"
    )
    backward = str(torch.ops.flash_dmattn.attention_backward.default._schema)
    assert backward.endswith(f"-> ({GRADIENTS})")


def test_packing_has_fields_of_the_call() -> None:
    defaults = AttentionInputs._field_defaults
    assert Packing._field_defaults == {name: defaults[name] for name in Packing._fields}


def test_tensors_come_before_settings() -> None:
    class Mixed(NamedTuple):
        scale: float
        sink: Annotated[Tensor, "differentiable"] | None

    class Ordered(NamedTuple):
        sink: Any
        scale: Any

    Ordered.__annotations__ = {"sink": record.Differentiable | None, "scale": float}
    assert record._schema(Ordered) == ("Tensor? sink, float scale", 1, ("sink",), (0,))
    Mixed.__annotations__ = {"scale": float, "sink": record.Differentiable | None}
    with pytest.raises(AssertionError, match="sink is a tensor after a setting"):
        record._schema(Mixed)
