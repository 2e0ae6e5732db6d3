# SPDX-License-Identifier: BSD-3-Clause
"""DynamicMaskAttention with the rest of PyTorch, and its messages for wrong arguments."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_dmattn import AttentionCache, DynamicMaskAttention, IntervalMask
from plain_module import EMBED, make_biases_exact, make_input, make_module
from support import Target


def gradients(module: DynamicMaskAttention, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.float().square().sum(), list(module.parameters())))


def assert_same_results(
    module: DynamicMaskAttention, got: Tensor, want: Tensor, tolerance: float = 1e-5
) -> None:
    pairs = zip([got, *gradients(module, got)], [want, *gradients(module, want)], strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        allowed = tolerance * max(1.0, other.abs().max().item())
        assert (one - other).abs().max() <= allowed


def tolerance_of(target: Target) -> float:
    return 1e-5 if target.dtypes[0] == torch.float32 else 1e-2


@pytest.mark.parametrize("form", ["no mask", "padding", "intervals", "packed"])
def test_compile(form: str, target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 21)
    options: dict[str, Any] = {}
    if form == "padding":
        options["attn_mask"] = torch.arange(21, device=x.device).expand(2, 21) < 17
    elif form == "intervals":
        options["attn_mask"] = IntervalMask.sliding_window(9, 0, 21, 21, device=x.device)
    elif form == "packed":
        x = x.flatten(0, 1)
        cu_seqlens = torch.tensor([0, 5, 30, 42], dtype=torch.int32, device=x.device)
        options.update(cu_seqlens=cu_seqlens, max_seqlen=25)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_results(module, compiled(x, **options), module(x, **options), tolerance_of(target))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*jit.trace.*")
def test_a_trace_is_the_same_with_and_without_gradients(target: Target) -> None:
    """torch.jit.trace traces again without gradients and compares."""
    module = make_module(target)
    x = make_input(module, 2, 9)
    traced = torch.jit.trace(module, x)
    assert_same_results(module, traced(x), module(x), tolerance_of(target))


@pytest.mark.parametrize(
    "norm", [torch.nn.Identity(), torch.nn.RMSNorm(6, elementwise_affine=False)], ids=repr
)
def test_a_norm_without_weight_takes_the_place_of_one_with(
    norm: torch.nn.Module, target: Target
) -> None:
    module = make_module(target)
    x = make_input(module, 2, 9)
    module.q_norm = module.k_norm = norm
    assert module(x).shape == x.shape


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_trains_with_inductor_under_autocast(pack_target: Target) -> None:
    """The graph has no break, and rounding of biases does not decide which keys are kept."""
    module = make_module(pack_target, torch.bfloat16).float()
    x = make_input(module, 2, 21)
    torch._dynamo.reset()
    found = []
    for call in (torch.compile(module, fullgraph=True), module):
        with torch.autocast(pack_target.device, torch.bfloat16):
            found.append(call(x))
    assert_same_results(module, *found, 2e-2)


def test_compile_with_dynamic_shapes(target: Target) -> None:
    module = make_module(target)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (21, 34, 11):
        x = make_input(module, 2, rows)
        assert_same_results(module, compiled(x), module(x), tolerance_of(target))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [4, 21])
def test_one_export_serves_lengths_on_both_sides_of_the_window(
    rows: int, masked: bool, strict: bool, target: Target
) -> None:
    module = make_module(target)
    length = torch.export.Dim("length", min=2, max=64)
    sizes = {"hidden_states": {1: length}}

    def inputs(count: int) -> tuple[Tensor, ...]:
        x = make_input(module, 2, count)
        seen = torch.arange(count, device=x.device) >= torch.tensor([[0], [1]], device=x.device)
        return (x, seen) if masked else (x,)

    if masked:
        sizes["attn_mask"] = {1: length}
    with torch.no_grad():
        exported = torch.export.export(module, inputs(rows), dynamic_shapes=sizes, strict=strict)
        for count in (2, 4, 5, 6, 30):
            torch.testing.assert_close(exported.module()(*inputs(count)), module(*inputs(count)))


def test_autocast(target: Target) -> None:
    module = make_module(target, torch.float32)
    make_biases_exact(module)
    x = make_input(module, 2, 21)
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    exact = copy.deepcopy(module).double()
    exact.backend = "reference"
    want = exact(x.double())
    assert (out - want).abs().max() <= 0.03 * want.abs().max()
    for got, true in zip(gradients(module, out), gradients(exact, want), strict=True):
        assert got.dtype == torch.float32
        assert (got - true).abs().max() <= 0.05 * true.abs().max()


def test_autocast_with_a_cache(target: Target) -> None:
    module = make_module(target, torch.float32)
    make_biases_exact(module)
    x = make_input(module, 2, 21)
    cache = AttentionCache()
    with torch.no_grad(), torch.autocast(target.device, dtype=torch.bfloat16):
        parts = [module(x[:, :20], cache=cache), module(x[:, 20:], cache=cache)]
        torch.testing.assert_close(torch.cat(parts, 1), module(x), atol=0.1, rtol=0.02)


def test_gradient_checkpointing(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 21)
    again: Tensor = checkpoint(module, x, use_reentrant=False)
    assert_same_results(module, again, module(x), tolerance_of(target))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_compute_the_same(
    duplicate: Callable[[DynamicMaskAttention], DynamicMaskAttention], target: Target
) -> None:
    module = make_module(target, bias_form="exp", softcap=3.0)
    x = make_input(module, 2, 21)
    other = duplicate(module)
    assert torch.equal(other(x), module(x))
    assert repr(other) == repr(module)
    with torch.no_grad():
        module.A.add_(1)
    assert not torch.equal(other(x), module(x))


def test_state_dict_is_stable() -> None:
    module = DynamicMaskAttention(24, 4, 2, projection_bias=True)
    weights = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert weights == {
        "A": (2,),
        "q_proj.weight": (24, 24),
        "q_proj.bias": (24,),
        "k_proj.weight": (12, 24),
        "k_proj.bias": (12,),
        "v_proj.weight": (12, 24),
        "v_proj.bias": (12,),
        "dt_proj.weight": (2, 12),
        "dt_proj.bias": (2,),
        "o_proj.weight": (24, 24),
        "o_proj.bias": (24,),
        "q_norm.weight": (6,),
        "k_norm.weight": (6,),
    }
    other = DynamicMaskAttention(24, 4, 2, projection_bias=True)
    other.load_state_dict(module.state_dict())
    x = torch.randn(1, 9, 24)
    assert torch.equal(other(x), module(x))


def test_defaults() -> None:
    module = DynamicMaskAttention(64, 4)
    assert (module.num_kv_heads, module.head_dim) == (4, 16)
    assert (module.window_size, module.keep_last, module.keep_first) == (1024, 1024, 0)
    assert DynamicMaskAttention(64, 4, window_size=3).keep_last == 3
    assert DynamicMaskAttention(64, 4, window_size=3, is_causal=False).keep_last == 0
    assert DynamicMaskAttention(64, 4, window_size=None).keep_last == 0
    assert "window_size=1024, keep_last=1024, is_causal=True, bias_form='softplus'" in repr(module)
    assert "rotary_base=10000.0, softcap=0.0, sink=False" in repr(module)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_reset_parameters_draws_anew() -> None:
    module = DynamicMaskAttention(64, 4, projection_bias=True, sink=True, init_std=0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    torch.manual_seed(0)
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        if name.endswith("proj.weight") or name in ("A", "sink"):
            assert not (parameter == 7).any(), name
        else:
            assert (parameter == float(name.endswith("norm.weight"))).all(), name
    assert module.q_proj.weight.std().item() == pytest.approx(0.5, rel=0.05)


def test_made_on_a_device_and_in_a_dtype(target: Target) -> None:
    module = DynamicMaskAttention(
        24, 4, device=target.device, dtype=torch.bfloat16, backend=target.backend
    )
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in module.parameters()} == {target.device}
    x = torch.randn(1, 5, 24, device=target.device, dtype=torch.bfloat16)
    assert module(x).dtype == torch.bfloat16
    assert module.key_bias(x.view(1, 5, 4, 6)).dtype == torch.float32
    meta = DynamicMaskAttention(24, 4, device="meta")
    assert meta(torch.empty(2, 3, 24, device="meta")).shape == (2, 3, 24)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"embed_dim": 0}, ValueError, "embed_dim must be at least 1, got 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be an integer, got 2.0"),
        ({"num_kv_heads": 3}, ValueError, "multiple of num_kv_heads, got 4 and 3"),
        ({"embed_dim": 26}, ValueError, "embed_dim must be a multiple of num_heads .*26 and 4"),
        ({"head_dim": 257}, ValueError, "head_dim must be at most 256, got 257"),
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
        ({"bias_form": "linear"}, ValueError, "one of softplus, exp, got 'linear'"),
        ({"head_dim": 5}, ValueError, "head_dim even, .*rotary_base=10000.0 and head_dim=5"),
        ({"rotary_base": -1.0}, ValueError, "rotary_base must be positive"),
        ({"softcap": -2.0}, ValueError, "softcap must be finite and at least 0, got -2.0"),
    ],
)
def test_wrong_settings_are_explained(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        DynamicMaskAttention(**{"embed_dim": 24, "num_heads": 4, **changes})


PACKED = {"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}
X = torch.zeros(1, 5, EMBED)


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (None, {}, TypeError, "hidden_states must be a torch.Tensor, got None"),
        (X[0], {}, ValueError, r"shape \(B, N, embed_dim\), embed_dim=24, got \(5, 24\)"),
        (X[..., :8], {}, ValueError, r"embed_dim=24, got \(1, 5, 8\)"),
        (X, PACKED, ValueError, r"\(total, embed_dim\) with cu_seqlens.* got \(1, 5, 24\)"),
        (X, {"cache": {}}, TypeError, "cache must be an AttentionCache or None, got dict of"),
        (X[0], {**PACKED, "cache": AttentionCache()}, ValueError, "with cu_seqlens; pad"),
        (X, {"position_ids": torch.zeros(5)}, TypeError, "hold integers, got torch.float32"),
        (
            X,
            {"position_ids": torch.arange(4)},
            ValueError,
            r"shape \(5,\) or \(1, 5\), got \(4,\)",
        ),
        (X, {"attn_mask": torch.ones(1, 5)}, TypeError, "attn_mask must have dtype torch.bool"),
        (
            X,
            {"attn_mask": torch.ones(1, 4, dtype=torch.bool)},
            ValueError,
            r"attn_mask must have all 5 keys .*, here those of 5 tokens, got shape \(1, 4\)",
        ),
        (
            X[0],
            {**PACKED, "attn_mask": IntervalMask(*torch.zeros(2, 1, 5, dtype=torch.int32))},
            ValueError,
            "window_size cannot be combined with an IntervalMask",
        ),
    ],
)
def test_wrong_arguments_are_explained(
    x: Tensor, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    module = DynamicMaskAttention(EMBED, 4, window_size=3, keep_last=0)
    with pytest.raises(error, match=text):
        module(x, **options)


def test_decoding_needs_causality() -> None:
    module = DynamicMaskAttention(EMBED, 4, is_causal=False)
    with torch.no_grad(), pytest.raises(ValueError, match="cache needs is_causal=True"):
        module(X, cache=AttentionCache())


def test_module_equals_a_doge_layer() -> None:
    """Transformers' Doge with the same weights gives the same results within its own rounding."""
    doge = pytest.importorskip("transformers.models.doge.modeling_doge")
    config = pytest.importorskip("transformers").DogeConfig(
        hidden_size=EMBED,
        num_attention_heads=4,
        num_key_value_heads=2,
        keep_window_size=6,
        attn_implementation="eager",
    )
    layer = doge.DogeAttention(config, 0)
    torch.nn.init.normal_(layer.A)
    module = DynamicMaskAttention(EMBED, 4, 2, window_size=6, keep_last=0, bias_form="exp")
    module.load_state_dict(layer.state_dict())
    x = torch.randn(2, 25, EMBED)
    hidden = ~torch.ones(25, 25, dtype=torch.bool).tril()
    additive = torch.zeros(2, 1, 25, 25).masked_fill(hidden, torch.finfo(torch.float32).min)
    position = doge.DogeRotaryEmbedding(config)(x, torch.arange(25)[None])
    want, _ = layer(x, position, additive)
    torch.testing.assert_close(module(x), want, atol=1e-5, rtol=1e-5)
