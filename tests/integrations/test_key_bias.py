# SPDX-License-Identifier: BSD-3-Clause
"""Biases for each key: Doge's own, and biases added to other models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_dmattn.integrations import apply_flash_dmattn

from .tiny_models import LENGTH, inputs_of, tiny_model, tokens, transformers


class LargeTensors(TorchDispatchMode):
    """Records each operator whose result has one dimension of Q and one of K."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and list(output.shape).count(self.length) > 1:
                self.found.append((str(func), tuple(output.shape)))
        return outputs


@pytest.mark.parametrize("case", ["whole", "left", "right", "packed"])
def test_no_tensor_of_queries_by_keys_is_made(case: str) -> None:
    with LargeTensors(LENGTH) as large:
        model = tiny_model("doge", "applied")
        out = model(tokens(), use_cache=False, labels=tokens(), **inputs_of(case))
        out.loss.backward()
    assert large.found == []
    assert model.model.layers[0].self_attn.A.grad.abs().sum() > 0


def test_such_tensors_would_be_seen() -> None:
    with LargeTensors(LENGTH) as large:
        tiny_model("doge", "named")(tokens(), use_cache=False)
    assert any("topk" in name or "masked_fill" in name for name, _ in large.found)


class Decay(torch.nn.Module):
    """A bias computed from values, like that of a user's module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 8, generator=torch.manual_seed(1)))

    def forward(self, attention: torch.nn.Module, value: Tensor) -> Tensor:
        return torch.einsum("bhkd,hd->bhk", value, self.weight)


@pytest.mark.parametrize(
    ("window", "last", "first"), [(None, 0, 0), (6, 0, 0), (6, 5, 2), (0, 3, 0), (2, 9, 30)]
)
def test_a_bias_for_another_model(window: int | None, last: int, first: int) -> None:
    bias = Decay()
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    model = apply_flash_dmattn(
        tiny_model("llama", layers=1), bias, attention=attention, window_size=window,
        keep_last=last, keep_first=first,
    )  # fmt: skip
    got = model(tokens(), use_cache=False).logits
    got.square().sum().backward()
    own = bias.weight.grad
    bias.weight.grad = None

    # The same bias by eager attention: a hook reads the values, and a mask adds the bias.
    eager = tiny_model("llama", layers=1)
    layer = eager.model.layers[0].self_attn

    def add_bias(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        value = module.v_proj(kwargs["hidden_states"]).view(2, LENGTH, 2, 8).transpose(1, 2)
        added = bias(module, value).unsqueeze(2).expand(-1, -1, LENGTH, -1)
        lowest = torch.finfo(torch.float32).min
        kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        added = added.masked_fill(~kept, lowest)
        if window is not None:
            place = torch.arange(LENGTH)
            by_place = kept & ((place < first) | (place > place[:, None] - last))
            best = added.masked_fill(by_place, lowest).topk(window, -1).indices
            top = torch.zeros_like(added, dtype=torch.bool).scatter(-1, best, True)
            added = added.masked_fill(~(top | by_place), lowest)
        return args, {**kwargs, "attention_mask": added.repeat_interleave(2, 1)}

    layer.register_forward_pre_hook(add_bias, with_kwargs=True)
    want = eager(tokens(), use_cache=False).logits
    want.square().sum().backward()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(own, bias.weight.grad, atol=1e-3, rtol=1e-3)


def test_places_need_a_bias_and_a_window() -> None:
    llama = transformers.models.llama.modeling_llama.LlamaAttention
    with pytest.raises(ValueError, match="keep_last must be 0 without key_bias, as Doge's weights"):
        apply_flash_dmattn(tiny_model("doge"), window_size=4, keep_last=2)
    given = {"key_bias": Decay(), "attention": llama}
    with pytest.raises(ValueError, match="keep_first must be 0 without window_size, got 1"):
        apply_flash_dmattn(tiny_model("llama"), keep_first=1, **given)
    with pytest.raises(ValueError, match="keep_last must be at least 0, got -3"):
        apply_flash_dmattn(tiny_model("llama"), keep_last=-3, window_size=2, **given)


def test_keywords_of_other_names_are_told() -> None:
    with pytest.raises(TypeError, match="'keep_window_size': it is called window_size here"):
        apply_flash_dmattn(tiny_model("doge"), keep_window_size=4)  # type: ignore[arg-type]


def test_saving_tells_of_places(tmp_path: Any) -> None:
    llama = transformers.models.llama.modeling_llama.LlamaAttention
    model = apply_flash_dmattn(
        tiny_model("llama"), Decay(), attention=llama, window_size=3, keep_last=5
    )
    with pytest.warns(UserWarning, match="key_bias and window_size=3 and keep_last=5"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_places(padded: bool) -> None:
    """Decoding token by token with a cache equals one pass over the whole sequence."""
    llama = transformers.models.llama.modeling_llama.LlamaAttention
    places = {"window_size": 4, "keep_last": 5, "keep_first": 2}
    model = apply_flash_dmattn(tiny_model("llama"), Decay(), attention=llama, **places).eval()
    ids, mask = tokens(), None
    if padded:
        mask = (torch.arange(LENGTH) >= torch.tensor([[6], [0]])).long()
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=False).logits
        cache, steps = None, []
        for start, end in [(0, 10), *((i, i + 1) for i in range(10, LENGTH))]:
            seen = None if mask is None else mask[:, :end]
            step = model(ids[:, start:end], attention_mask=seen, past_key_values=cache)
            cache = step.past_key_values
            steps.append(step.logits)
    got = torch.cat(steps, 1)
    if padded:  # the outputs of padding are undefined
        out, got = (t * mask.unsqueeze(-1) for t in (out, got))
    torch.testing.assert_close(got, out, atol=1e-4, rtol=1e-4)


def test_window_in_place_of_the_models_own() -> None:
    model = apply_flash_dmattn(tiny_model("doge"), window_size=LENGTH)
    got = model(tokens()).logits
    torch.testing.assert_close(
        got, tiny_model("doge-without-selection")(tokens()).logits, atol=1e-5, rtol=1e-4
    )


def test_applying_twice_is_applying_once() -> None:
    once, twice = tiny_model("doge", "applied"), tiny_model("doge", "applied")
    assert torch.equal(apply_flash_dmattn(twice)(tokens()).logits, once(tokens()).logits)


def test_other_models_of_the_process_stay_as_they_are() -> None:
    before = tiny_model("doge")
    want = before(tokens()).logits
    tiny_model("doge", "applied")
    assert torch.equal(before(tokens()).logits, want)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no module of Doge's attention"):
        apply_flash_dmattn(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"^attention must be given too"):
        apply_flash_dmattn(tiny_model("llama"), Decay())
    with pytest.raises(ValueError, match=r"^key_bias must be given too"):
        apply_flash_dmattn(tiny_model("llama"), attention=torch.nn.Linear)
    with pytest.raises(ValueError, match="window_size must be at least 1, got 0"):
        apply_flash_dmattn(tiny_model("doge"), window_size=0)
    with pytest.raises(ValueError, match="no module of attention="):
        apply_flash_dmattn(tiny_model("llama"), Decay(), attention=torch.nn.Conv1d)


def test_a_refusal_keeps_the_note_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file must still say what the model lacks."""
    model = tiny_model("llama")
    model.config.needs_apply_flash_dmattn = "key_bias"
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with pytest.raises(
        RuntimeError, match="transformers gave LlamaForCausalLM attn_implementation="
    ):
        apply_flash_dmattn(model, Decay(), attention=type(model.model.layers[0].self_attn))
    assert model.config.needs_apply_flash_dmattn == "key_bias"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model": "doge"}, r"model must be a loaded model .* got 'doge'; AutoModelForCausalLM"),
        ({"model": None}, r"model must be a loaded model .* got None"),
        ({"model": torch.nn.Linear(2, 2)}, r"model must be a loaded model .* got Linear object"),
        ({"key_bias": 3, "attention": torch.nn.Linear}, r"key_bias must be a function .* got 3"),
        ({"key_bias": abs, "attention": "all"}, r"attention must be a class .* got 'all'"),
        ({"window_size": True}, r"window_size must be an integer, got True"),
    ],
)
def test_wrong_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        apply_flash_dmattn(**{"model": tiny_model("doge"), **arguments})
