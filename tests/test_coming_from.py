# SPDX-License-Identifier: BSD-3-Clause
"""Each pair of calls in docs/coming_from.md gives equal results, and its old keywords get messages.

SDPA and FlexAttention are torch's. Other packages are used if they are installed and there is a
GPU; otherwise the formula of their documentation replaces them.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import IntervalMask, KeptKeys, flash_dmattn_func
from flash_dmattn.modules import (
    AttentionCache,
    DynamicMaskAttention,
    ForgettingAttention,
    ForgettingCache,
)

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "coming_from.md").read_text()
PAIRS = dict(re.findall(r"^## ([^\n]+)\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
TOKENS = 300


def attention(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, scale: float | None) -> Tensor:
    """Attend with a bias (H, Q, K) that is added to the scaled scores."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale + scores
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def distances(rows: int, keys: int) -> Tensor:
    """Return each key's distance before the place of each query, aligned bottom right."""
    return torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    alibi_slopes: Tensor,
) -> Tensor:
    back = distances(q.shape[1], k.shape[1])
    left, right = window_size
    kept = (back <= left) & (back >= -right) & ((back >= 0) | (not causal))
    scores = -alibi_slopes[:, None, None] * back.abs()
    return attention(q, k, v, scores.masked_fill(~kept, -torch.inf), None)


class LowerTriangularMask:
    pass


def memory_efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_bias: LowerTriangularMask, scale: float
) -> Tensor:
    assert isinstance(attn_bias, LowerTriangularMask)
    later = torch.ones(q.shape[1], k.shape[1]).triu(1) > 0
    return attention(q, k, v, torch.zeros(later.shape).masked_fill(later, -torch.inf), scale)


def parallel_forgetting_attn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    total = g.double().cumsum(1).transpose(1, 2)
    decay = total[..., :, None] - total[..., None, :]
    decay = decay.masked_fill(distances(q.shape[1], k.shape[1]) < 0, -torch.inf)
    return attention(q, k, v, decay.to(q.dtype), None)


FORMULAS: dict[str, tuple[str, list[Any]]] = {
    "FlashAttention": ("flash_attn", [flash_attn_func]),
    "xformers": ("xformers.ops", [LowerTriangularMask, memory_efficient_attention]),
    "flash-linear-attention": ("fla.ops.forgetting_attn", [parallel_forgetting_attn]),
}


def test_the_page_has_a_pair_for_each_package() -> None:
    assert PAIRS.keys() == {*FORMULAS, "SDPA", "FlexAttention"}


@pytest.mark.parametrize("name", PAIRS)
def test_both_calls_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, dtype, error = "cpu", torch.float32, 1e-5
    if name == "FlexAttention":
        pytest.importorskip("torch.nn.attention.flex_attention")
    if name in FORMULAS:
        module, parts = FORMULAS[name]
        first = module.partition(".")[0]
        if torch.cuda.is_available() and util.find_spec(first) is not None:
            device, dtype, error = "cuda", torch.bfloat16, 2e-2
        else:
            for depth in range(module.count(".") + 1):
                path = ".".join(module.split(".")[: depth + 1])
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
            for part in parts:
                setattr(sys.modules[module], part.__name__, part)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, TOKENS, 4, 32, device=device, dtype=dtype)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.003], device=device)
    gates = torch.nn.functional.logsigmoid(torch.randn(2, TOKENS, 4, device=device) + 2)
    given = {"torch": torch, "q": q, "k": k, "v": v, "N": TOKENS, "slopes": slopes, "gates": gates}
    exec(compile(PAIRS[name], f"coming_from.md: {name}", "exec", dont_inherit=True), given)
    assert given["ours"].shape == q.shape
    torch.testing.assert_close(given["ours"], given["theirs"], atol=error, rtol=error)
    assert not torch.allclose(given["ours"], flash_dmattn_func(q, k, v), atol=10 * error)


def keywords() -> list[str]:
    """Return the names in the first column of the page's table."""
    cells = re.findall(r"^\| ([^|]+) \| ", PAGE, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)]
    return [name for name in names if name != "window_size"]


def test_every_keyword_of_the_page_is_told_what_it_is_here() -> None:
    assert len(keywords()) > 12
    q, k, v = torch.randn(3, 1, 8, 1, 8)
    for name in keywords():
        with pytest.raises(TypeError, match=f"argument '{name}': "):
            flash_dmattn_func(q, k, v, **{name: None})
    with pytest.raises(TypeError, match=r"window_size must be .*IntervalMask\.sliding_window"):
        flash_dmattn_func(q, k, v, is_causal=True, window_size=(4, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attn_mask with 2 dimensions must have shape \(B, K\)"):
        flash_dmattn_func(q, k, v, torch.ones(8, 8, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"attn_mask must have dtype torch\.bool"):
        flash_dmattn_func(q, k, v, torch.zeros(1, 1, 8, 8))


LAYERS = [
    partial(layer(8, 2), torch.zeros(1, 4, 8))
    for layer in (DynamicMaskAttention, ForgettingAttention)
]
TOKENS_OF_STATE = (*torch.zeros(3, 1, 4, 2, 8), torch.zeros(1, 2, 1, 4))
_STATE = KeptKeys(3)
BOUNDS = (torch.zeros(1, 1, 5, dtype=torch.int32),) * 2


@pytest.mark.parametrize(
    ("call", "keyword", "told"),
    [
        (partial(DynamicMaskAttention, 8, 2), "causal", "it is called is_causal here"),
        (partial(DynamicMaskAttention, 8, 2), "dropout_p", "there is no dropout"),
        (partial(DynamicMaskAttention, 8, 2), "bias", "it is called projection_bias here"),
        (partial(DynamicMaskAttention, 8), "num_attention_heads", "it is called num_heads here"),
        (partial(ForgettingAttention, 8, 2), "scale", "it is called softmax_scale here"),
        (partial(ForgettingAttention, 8, 2), "causal", "it always is"),
        (AttentionCache, "max_cache_len", "it is called max_length here"),
        (partial(KeptKeys, 3), "topk", "it is called window_size here"),
        (LAYERS[0], "attention_mask", "it is called attn_mask here"),
        (LAYERS[0], "past_key_values", "it is called cache here"),
        (LAYERS[1], "cu_seqlens_k", "it is called cu_seqlens here"),
        (partial(KeptKeys(3).attend, *TOKENS_OF_STATE), "scaling", "it is called softmax_scale"),
        (
            partial(LAYERS[0].func.attend, *TOKENS_OF_STATE),
            "attention_mask",
            "it is called attn_mask here",
        ),
        (
            partial(LAYERS[1].func.attend, *TOKENS_OF_STATE),
            "attn_mask",
            "it is called padding here",
        ),
        *(
            (partial(call, *TOKENS_OF_STATE[1:]), "attention_mask", "it is called padding here")
            for call in (_STATE.update, _STATE.updated, _STATE.visible, _STATE.extended)
        ),
        (partial(IntervalMask, *BOUNDS), "seqlen_q", "it is called query_length here"),
        (partial(IntervalMask.documents, length=5), "cu_seqlens_q", "it is called cu_seqlens here"),
        (IntervalMask.documents, "segment_ids", "it is called document_ids here"),
        (partial(IntervalMask.tree, BOUNDS[0][0]), "prefix_len", "it is called prefix_length here"),
    ],
)
def test_keywords_of_layers_masks_and_states(call: Any, keyword: str, told: str) -> None:
    with pytest.raises(TypeError, match=f"argument '{keyword}': {told}"):
        call(**{keyword: None})


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(IntervalMask.sliding_window, 3, 0, 5, 5), "sliding_window"),
        (partial(IntervalMask.delayed_eviction, BOUNDS[0] > 0, 2), "delayed_eviction"),
        (partial(IntervalMask.from_key_padding, BOUNDS[0][0] > 0, 5), "from_key_padding"),
        (partial(IntervalMask.prefix_lm, BOUNDS[0][0, 0], 5, 5), "prefix_lm"),
    ],
)
def test_masks_tell_what_there_is_not(call: Any, named: str) -> None:
    text = rf"^IntervalMask\.{named}\(\) got an unexpected .* 'dropout': there is no dropout"
    with pytest.raises(TypeError, match=text):
        call(dropout=0.0)
    assert "unknown" not in inspect.signature(call.func).parameters


def test_unknown_keywords_have_no_hint() -> None:
    class Layer(DynamicMaskAttention):
        pass

    with pytest.raises(TypeError, match=r"^Layer\(\) got an unexpected keyword argument 'top'$"):
        Layer(8, 2, top=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^ForgettingCache\(\) got an unexpected .* 'top'$"):
        ForgettingCache(top=3)  # type: ignore[call-arg]
    signature = inspect.signature(Layer)
    assert "embed_dim" in signature.parameters
    assert "unknown" not in inspect.signature(Layer.forward).parameters
