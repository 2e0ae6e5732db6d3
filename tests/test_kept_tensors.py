# SPDX-License-Identifier: BSD-3-Clause
"""States with shared biases, and with tensors of other modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import KeptKeys, flash_dmattn_func

BIASES: dict[str, Tensor] = {
    "sequences": torch.randn(1, 2, 1, 20),
    "sequences and heads": torch.randn(1, 1, 1, 20),
    "expanded heads": torch.randn(3, 1, 1, 20).expand(-1, 2, -1, -1),
    "expanded query heads": torch.randn(3, 1, 1, 20).expand(-1, 4, -1, -1),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_a_state_keeps_rows_of_all(bias: Tensor, backend: str) -> None:
    query, key, value = (torch.randn(3, 20, heads, 8) for heads in (4, 2, 2))
    want = flash_dmattn_func(
        query, key, value, None, bias, is_causal=True, window_size=4, backend=backend
    )
    state, outs = KeptKeys(4), []
    for part in (slice(0, 9), slice(9, 10), slice(10, 20)):
        tokens = (tensor[:, part] for tensor in (query, key, value))
        out = state.attend(*tokens, bias[..., part], update=True, backend=backend)
        assert isinstance(out, Tensor)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), want)
    assert state.tensors["key"].shape[0] == 3


def test_what_is_loaded_in_inference_mode_goes_on_outside_of_it() -> None:
    tokens = [torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 2, 1, 1)]
    state, other = KeptKeys(4), KeptKeys(4)
    state.update(*tokens)
    with torch.inference_mode():
        other.load_state_dict(
            {n: t.clone() if isinstance(t, Tensor) else t for n, t in state.state_dict().items()}
        )
    for each in (state, other):
        each.update(*tokens)
    assert torch.equal(other.tensors["key"], state.tensors["key"])


def test_traced_steps_take_in_what_comes() -> None:
    """A token that is dropped during tracing must not make the traced step drop all tokens."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(key: Tensor, value: Tensor, bias: Tensor, *held: Tensor) -> Tensor:
        state = KeptKeys(2)
        state.load_state_dict(
            {"window_size": 2, "rollback": 0, "start": 0, **dict(zip(names, held, strict=True))}
        )
        state.update(key, value, bias)
        return state.tensors["bias"].clone()

    first = KeptKeys(2)
    key, value = torch.randn(2, 1, 3, 1, 4)
    first.update(key, value, torch.tensor([3.0, 2.0, 1.0]).view(1, 1, 1, 3))
    held = {n: t for n, t in first.state_dict().items() if isinstance(t, Tensor)}
    names = list(held)
    dropped, taken = (torch.full((1, 1, 1, 1), bias) for bias in (0.0, 5.0))
    token = torch.randn(1, 1, 1, 4)
    traced = make_fx(step)(token, token, dropped, *held.values())
    for bias in (dropped, taken):
        got = traced(token, token, bias, *held.values())
        assert torch.equal(got, step(token, token, bias, *held.values()))
