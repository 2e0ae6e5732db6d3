# SPDX-License-Identifier: BSD-3-Clause
"""Generation with growing caches and with caches of a fixed size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support import Target, assert_accurate

from .tiny_models import WAYS, padding, tiny_model, tokens, transformers

# Repeated tokens would cause ties; see `tokens`.
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "no_repeat_ngram_size": 1}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family, way", WAYS)
def test_tokens_are_those_of_eager(family: str, way: str, padded: bool, cache: str) -> None:
    mask = padding("left") if padded else torch.ones_like(padding("left"))
    options = {**OPTIONS, "cache_implementation": cache, "attention_mask": mask}
    got = tiny_model(family, way).eval().generate(tokens(), **options)
    assert torch.equal(got, tiny_model(family).eval().generate(tokens(), **options))


def cached_logits(model: Any, cache: Any, parts: list[int]) -> Tensor:
    """Return the logits of all tokens, which the model gets in parts."""
    outputs, begin, device = [], 0, model.device
    mask = padding("left").to(device)
    with torch.no_grad():
        for part in parts:
            outputs.append(
                model(
                    tokens()[:, begin : begin + part].to(device),
                    attention_mask=mask[:, : begin + part],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
            )
            begin += part
    return torch.cat(outputs, 1)[mask.bool()].cpu()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    "family, way",
    [("doge-without-selection", "applied"), ("doge-without-selection", "named"),
     ("llama", "named")],
)  # fmt: skip
def test_logits_with_a_cache(family: str, way: str, kind: str, pack_target: Target) -> None:
    """Prefill, several further tokens together, then single tokens."""
    parts = [30, 7, 1, 1, 1]

    def logits(way: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        model = tiny_model(family, way, dtype=dtype, device=device).eval()
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        else:
            cache = transformers.DynamicCache()
        return {"out": cached_logits(model, cache, parts)}

    with torch.no_grad():
        truth = tiny_model(family).eval()(tokens(), attention_mask=padding("left")).logits
    truth = {"out": truth[padding("left").bool()].double()}
    for dtype in pack_target.dtypes:
        if dtype != torch.float16:
            got = logits(way, dtype, pack_target.device)
            assert_accurate(got, truth, logits("eager", dtype, "cpu"))


def test_static_cache_without_a_mask() -> None:
    for family, way in WAYS[:3]:
        outputs = []
        for model in (tiny_model(family), tiny_model(family, way)):
            cache = transformers.StaticCache(config=model.config, max_cache_len=48)
            with torch.no_grad():
                for part in (tokens()[:, :20], tokens()[:, 20:35], tokens()[:, 35:36]):
                    logits = model(part, past_key_values=cache, use_cache=True).logits
                    outputs.append(logits)
        for got, want in zip(outputs[3:], outputs[:3], strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
