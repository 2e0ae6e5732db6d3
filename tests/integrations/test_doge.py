# SPDX-License-Identifier: BSD-3-Clause
"""A Doge's fused decoding steps give the results of its modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from .tiny_models import padding, tiny_model, tokens, transformers

doge = pytest.importorskip("flash_dmattn.integrations.doge")

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.DynamicCache, "activate_past_recording"),
    reason="this transformers takes drafts back without saying so first",
)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each module call with a cache whether it ran as a fused step."""
    seen: list[bool] = []
    whole = doge.doge_step

    def watched(*args: Any) -> Tensor | None:
        output: Tensor | None = whole(*args)
        seen.append(output is not None)
        return output

    monkeypatch.setattr(doge, "doge_step", watched)
    return seen


def decoded(model: Any, ids: Tensor, prompt: int, **inputs: Any) -> tuple[Tensor, Any]:
    """Return the logits of each token after a prompt, one by one, and the cache."""
    cache = transformers.DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        model(ids[:, :prompt], past_key_values=cache)
        for n in range(prompt, ids.shape[1]):
            given = {name: mask[:, : n + 1] for name, mask in inputs.items()}
            logits.append(model(ids[:, n : n + 1], past_key_values=cache, **given).logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_steps_are_what_the_modules_compute(
    dtype: torch.dtype,
    batch: int,
    triton_device: str,
    fused: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if triton_device == "cuda" and dtype == torch.float32:
        pytest.skip("the packs of GPUs compute in 16 bits")
    model = tiny_model("doge", "applied").eval().to(triton_device, dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(".A"):
            torch.nn.init.normal_(parameter)
    ids = tokens(batch, 24).to(triton_device)  # exceeds the window
    got, cache = decoded(model, ids, 20)
    layers = len(cache.layers)
    assert fused == [False] * layers + [True] * layers * (ids.shape[1] - 20)
    monkeypatch.setattr(doge, "has_kernel", lambda _: False)
    want, other = decoded(model, ids, 20)
    eager = tiny_model("doge").eval().double()
    eager.load_state_dict(model.state_dict())
    exact, _ = decoded(eager, ids.cpu(), 20)
    errors = [(t.double().cpu() - exact).square().mean().sqrt() for t in (got, want)]
    assert errors[0] <= 2 * errors[1] + 1e-6, errors
    if dtype == torch.float32:  # in 16 bits, rounding decides which biases tie
        first, second = (c.layers[0].kept.tensors for c in (cache, other))
        assert torch.equal(first["position"], second["position"])
        for name in ("key", "value", "bias"):
            torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-5)


def test_calls_that_ask_for_more_go_to_the_module(
    triton_device: str, fused: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hooked, replaced, converted or padded module is not fused, and gives right results."""
    dtype = torch.bfloat16 if triton_device == "cuda" else torch.float32
    model, ids = (
        tiny_model("doge", "applied").eval().to(triton_device, dtype),
        tokens().to(triton_device),
    )
    attention = model.model.layers[0].self_attn

    def runs_fused(**inputs: Any) -> bool:
        fused.clear()
        decoded(model, ids[:, :22], 20, **inputs)
        return fused[2]

    assert runs_fused()
    assert not runs_fused(attention_mask=padding("left").to(triton_device))
    handle = attention.v_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert not runs_fused()
    handle.remove()
    assert runs_fused()
    monkeypatch.setattr(attention, "scaling", 0.7)
    want = decoded(model, ids[:, :22], 20)[0]
    assert fused[-2:] == [True, True]
    with monkeypatch.context() as patch:
        patch.setattr(doge, "has_kernel", lambda _: False)
        got = decoded(model, ids[:, :22], 20)[0]
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    for name, other in (("q_norm", torch.nn.Identity), ("q_proj", torch.nn.Sequential)):
        part = getattr(attention, name)
        setattr(attention, name, other(part))
        assert not runs_fused()
        setattr(attention, name, part)
        assert runs_fused()
    prune.identity(attention.k_proj, "weight")
    assert not runs_fused()


def test_copies_have_steps_of_their_own(triton_device: str, fused: list[bool]) -> None:
    """A copied module uses its own weights."""
    dtype = torch.bfloat16 if triton_device == "cuda" else torch.float32
    model, ids = (
        tiny_model("doge", "applied").eval().to(triton_device, dtype),
        tokens().to(triton_device),
    )
    decoded(model, ids[:, :22], 20)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    logits = decoded(other, ids[:, :22], 20)[0]
    assert logits.abs().max() > 0
    assert fused[-2:] == [True, True]
