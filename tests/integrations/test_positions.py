# SPDX-License-Identifier: BSD-3-Clause
"""As in transformers, positions define packed documents only without mask and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .tiny_models import LENGTH, tiny_model, tokens, transformers

# The window of the first model holds all keys.
WAYS = [
    ("doge-without-selection", "named"),
    ("doge-without-selection", "applied"),
    ("llama", "named"),
    ("mistral", "named"),
]
JUMP = torch.cat([torch.arange(17), torch.arange(60, 60 + LENGTH - 17)]).expand(2, LENGTH)
RESTART = torch.cat([torch.arange(17), torch.arange(LENGTH - 17)]).expand(2, LENGTH)
ALL = torch.ones(2, LENGTH, dtype=torch.long)
HOLE = ALL.clone()
HOLE[0, 9:15] = 0  # a section that is shorter than the other sequence's
CASES = {
    "all-ones": {"attention_mask": ALL, "position_ids": JUMP},
    "all-ones-restart": {"attention_mask": ALL, "position_ids": RESTART},
    "hole": {"attention_mask": HOLE, "position_ids": HOLE.cumsum(1) - 1},
    "hole-only": {"attention_mask": HOLE},
    "no-mask": {"position_ids": JUMP},
    "no-mask-restart": {"position_ids": RESTART},
}


def logits(model: Any, how: str, inputs: dict[str, Tensor]) -> Tensor:
    model.eval()
    options: dict[str, Any] = {"use_cache": False}
    if how == "prompt":
        options = {"past_key_values": transformers.DynamicCache(config=model.config)}
    with torch.set_grad_enabled(how == "gradients"):
        out: Tensor = model(tokens(), **inputs, **options).logits
    return out.detach()[inputs.get("attention_mask", ALL).bool()]


@pytest.mark.parametrize("how", ["gradients", "inference", "prompt"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family, way", WAYS)
def test_logits_are_those_of_eager(family: str, way: str, case: str, how: str) -> None:
    got = logits(tiny_model(family, way), how, CASES[case])
    want = logits(tiny_model(family), how, CASES[case])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family, way", WAYS)
def test_generation_makes_such_positions(family: str, way: str) -> None:
    got, want = (
        model.eval().generate(
            tokens(), attention_mask=HOLE, max_new_tokens=3, do_sample=False, output_logits=True,
            return_dict_in_generate=True, eos_token_id=None,
        ).logits
        for model in (tiny_model(family, way), tiny_model(family))
    )  # fmt: skip
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_no_documents_in_a_model_that_sees_both_ways() -> None:
    inputs = {"position_ids": RESTART}
    got, want = (
        tiny_model("bert", way).eval()(tokens(), **inputs).logits for way in ("named", "eager")
    )
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_compiled_prompt() -> None:
    """The compiler cannot read the values of positions, so any row may hold several documents."""
    torch._dynamo.reset()
    model = torch.compile(tiny_model("llama", "named", layers=1), backend="eager")
    got = logits(model, "prompt", CASES["no-mask"])
    want = logits(tiny_model("llama", layers=1), "prompt", CASES["no-mask"])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
