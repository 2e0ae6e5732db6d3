# SPDX-License-Identifier: BSD-3-Clause
"""The default device and dtype of the process do not change results of calls with tensors."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flash_dmattn
from flash_dmattn import (
    AttentionCache,
    DynamicMaskAttention,
    IntervalMask,
    KeptKeys,
    attention_reference,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
    pair_bias_attention,
)
from flash_dmattn.distributed import (
    ContextParallelAttention,
    context_parallel_dmattn,
    context_parallel_forgetting,
)
from flash_dmattn.integrations import evoformer_attention, triangle_attention
from flash_dmattn.integrations.transformers_attention import (
    flash_dynamic_mask_attention_forward,
)
from flash_dmattn.selftest.with_torch import compare
from flash_dmattn.utils.mask import create_mask
from flash_dmattn.utils.padding import pad_input, unpad_input, upad_input
from support import Target, rand_bool, randn

B, Q, K, H, HK, D = 2, 30, 30, 4, 2, 16


def dtype_of(target: Target) -> torch.dtype:
    """Return a dtype that the device's pack supports; some calls choose it themselves."""
    return target.dtypes[-1 if target.device == "cuda" else 0]


class Given(NamedTuple):
    """The inputs of the calls, made before the defaults change."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    sink: Tensor
    keys: Tensor  # bool (B, K)
    rows: Tensor  # bool (B, 1, Q, K)
    ids: Tensor  # int64 (B, K)
    lengths: Tensor  # int64 (B,)
    cu_seqlens: Tensor
    pages: Tensor
    hidden: Tensor
    device: str
    backend: str

    @property
    def leaves(self) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in self[:4]]


def given(target: Target) -> Given:
    dtype = dtype_of(target)
    shapes = (B, Q, H, D), (B, K, HK, D), (B, K, HK, D), (B, HK, 1, K), (H,)
    tensors = [
        *(randn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)),
        rand_bool(B, K, density=0.8),
        rand_bool(B, 1, Q, K),
        torch.tensor([[0] * 9 + [1] * 21, [3] * 30]),
        torch.tensor([5, 12]),
        torch.tensor([0, 13, B * K], dtype=torch.int32),
        torch.arange(B * 3, dtype=torch.int32).view(B, 3),
        randn(B, K, 64, dtype=dtype, seed=9),
    ]
    return Given(*(t.to(target.device) for t in tensors), target.device, target.backend)


def with_gradients(
    g: Given, call: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
) -> list[Tensor]:
    leaves = g.leaves
    results = call(*leaves)
    loss = results[0].square().sum()
    return [*results, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def dense(g: Given, mask: Any = None, **options: Any) -> list[Tensor]:
    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return flash_dmattn_func(
            query, key, value, mask, bias, return_lse=True, backend=g.backend, **options
        )

    return with_gradients(g, call)


def packed(g: Given, **options: Any) -> list[Tensor]:
    bounds = g.cu_seqlens, g.cu_seqlens, 47, 47

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        bias = bias.transpose(0, 1).flatten(1).unsqueeze(1)
        return flash_dmattn_varlen_func(
            query, key, value, *bounds, attn_bias=bias, return_lse=True, backend=g.backend,
            **options,
        )  # fmt: skip

    return with_gradients(g, call)


def paged(g: Given) -> tuple[Tensor, ...]:
    bounds = torch.arange(0, 3 * Q, Q, dtype=torch.int32, device=g.device)
    key, value = (t.reshape(B * 3, 10, HK, D) for t in (g.key, g.value))
    return flash_dmattn_varlen_func(
        g.query.flatten(0, 1), key, value, bounds, bounds, Q, K, is_causal=True,
        block_table=g.pages, return_lse=True, backend=g.backend,
    )  # fmt: skip


def masks(g: Given) -> list[Tensor]:
    made = [
        IntervalMask.from_key_padding(g.keys, Q),
        IntervalMask.sliding_window(4, 0, Q, K, device=g.device),
        IntervalMask.documents(g.ids),
        IntervalMask.documents(cu_seqlens=g.cu_seqlens),
        IntervalMask.prefix_lm(g.lengths, Q, K),
        dynamic_mask(g.bias, 5, True, g.keys, backend=g.backend),
        dynamic_mask(g.bias, 5, False, backend=g.backend),
        dynamic_mask(g.bias.expand(-1, -1, Q, -1), 5, True, backend=g.backend),
    ]
    made += [made[0] & made[1], made[0].to_bool(Q)]
    return [
        tensor
        for mask in made
        for tensor in ((mask.start, mask.end) if isinstance(mask, IntervalMask) else (mask,))
    ]


def plans(g: Given) -> list[Tensor]:
    outs = []
    for mask in (g.keys, g.rows, IntervalMask.documents(g.ids)):
        plan = make_plan(g.query, g.key, mask, True, backend=g.backend)
        outs.append(flash_dmattn_func(g.query, g.key, g.value, attn_bias=g.bias, plan=plan))
    return outs


def kept(g: Given, heads: int) -> list[Tensor]:
    state, other, outs = KeptKeys(4, rollback=2), KeptKeys(4, start=11), []
    bias = g.bias[:, :1] if heads == 1 else g.bias.repeat_interleave(heads // HK, 1)
    for start, end in ((0, 10), (10, 11), (11, 14), (14, 15)):
        part = slice(start, end)
        tokens = g.query[:, part], g.key[:, part], g.value[:, part], bias[..., part]
        options = {"update": True, "sink": g.sink, "backend": g.backend}
        outs.append(state.attend(*tokens, g.keys[:, part], **options))
        if start > 10:
            other.update(*tokens[1:], backend=g.backend)
        if start == 11:
            state.forget(1)
    state.reorder(g.pages[0, :2])
    third = KeptKeys(4)
    third.update(g.key[:, :11], g.value[:, :11], bias[..., :11], backend=g.backend)
    third.merge(other, backend=g.backend)
    loaded = KeptKeys(4)
    loaded.load_state_dict(third.state_dict())
    loaded = loaded.updated(g.key[:, :3], g.value[:, :3], bias[..., :3], backend=g.backend)
    held = (state, third, loaded.to(g.device), third.detach())
    positions = state.positions(3, g.query.device)
    return [*outs, positions, *(t for each in held for t in each.tensors.values())]


def layer(g: Given, make: Callable[[], AttentionCache] | None, **settings: Any) -> list[Tensor]:
    """Run a layer that was made under the earlier defaults."""
    module = LAYERS[str(sorted(settings.items())), g.device, g.backend]
    if make is None:
        out = module(g.hidden, g.keys)
        loss = out.square().sum()
        return [out, *torch.autograd.grad(loss, list(module.parameters()))]
    cache = make()
    with torch.no_grad():
        outs = [
            module(g.hidden[:, start:end], cache=cache, padding=g.keys[:, start:end])
            for start, end in ((0, 10), (10, 11), (11, 14), (14, 15))
        ]
        cache.truncate(13)
        cache.reorder(g.pages[0, :2])
        loaded = make()
        loaded.load_state_dict(cache.state_dict())
        outs.append(module(g.hidden[:, 13:], cache=loaded))
    return outs


def layer_packed(g: Given) -> list[Tensor]:
    module = LAYERS[str([]), g.device, g.backend]
    return [module(g.hidden.flatten(0, 1), cu_seqlens=g.cu_seqlens)]


def pairs(g: Given) -> list[Tensor]:
    five = [t[None].float().to(g.query.dtype) for t in (g.query, g.key, g.value)]
    pair = g.bias.expand(-1, -1, Q, -1)[:1, None].contiguous()
    out, lse = pair_bias_attention(
        *five, None, pair, g.bias[None], return_lse=True, backend=g.backend
    )
    q, k, v = (t.transpose(2, 3) for t in (five[0][:, :, :, :HK], five[1], five[2]))
    mask = g.keys[None, :, None, None]
    rows = [t[:, :, :, :HK] for t in five]
    added = g.bias[None, :, :1].to(q.dtype)
    return [
        out,
        lse,
        triangle_attention(q, k, v, pair.float(), mask, return_aux=True)[0],
        evoformer_attention(*rows, [added, None]),
    ]


def attention_function(g: Given) -> list[Tensor]:
    """transformers' attention function: padding, added mask rows, and packed sequences."""
    module = torch.nn.Module()
    q, k, v = (t.transpose(1, 2) for t in (g.query, g.key, g.value))
    added = g.bias.new_zeros(B, 1, Q, K).masked_fill(~g.rows, torch.finfo(g.bias.dtype).min)
    positions = (g.ids.cumsum(1) - 1).clamp(min=0) % 11
    options = {"is_causal": True, "window_size": 5}
    return [
        flash_dynamic_mask_attention_forward(module, q, k, v, mask, bias, **options, **packing)[0]
        for mask, bias, packing in (
            (g.keys, g.bias, {}),
            (g.keys.long(), g.bias, {}),
            (added, None, {}),
            (None, g.bias[:1], {"position_ids": positions}),
        )
    ]


def references(g: Given) -> list[Tensor]:
    out, lse = attention_reference(g.query, g.key, g.value, g.keys, g.bias, causal=True)
    probabilities = flash_dmattn_func(
        g.query, g.key, g.value, g.rows, g.bias, return_attn_probs=True, backend=g.backend
    )
    return [out, lse, *probabilities]


def helpers(g: Given) -> list[Tensor]:
    low = torch.finfo(torch.float32).min
    bias = g.bias.expand(-1, -1, Q, -1).float()
    unpadded, indices, cu_seqlens, _, used = unpad_input(g.hidden, g.keys)
    parts = upad_input(g.query, g.key, g.value, g.keys, Q, unpad_input)
    one = upad_input(g.query[:, :1], g.key, g.value, g.keys, 1, unpad_input)
    return [
        create_mask(bias, g.keys, B, Q, K, 5, low),
        create_mask(bias, g.keys, B, Q, K, 5, low, block_size=4),
        pad_input(unpadded, indices, B, K),
        cu_seqlens,
        used,
        *(t for each in (parts, one) for t in (*each[:4], *each[4])),
    ]


CALLS: dict[str, Callable[[Given], Any]] = {
    "no mask": dense,
    "causal": lambda g: dense(g, is_causal=True, sink=g.sink, softcap=3.0),
    "keys": lambda g: dense(g, g.keys),
    "rows": lambda g: dense(g, g.rows, deterministic=True),
    "intervals": lambda g: dense(g, IntervalMask.documents(g.ids), is_causal=True),
    "window": lambda g: dense(g, g.keys, is_causal=True, window_size=5),
    "window without causality": lambda g: dense(g, window_size=5),
    "window of all": lambda g: dense(g, is_causal=True, window_size=K),
    "packed": lambda g: packed(g, is_causal=True),
    "packed window": lambda g: packed(g, is_causal=True, window_size=5),
    "paged": paged,
    "masks": masks,
    "plans": plans,
    "kept keys": lambda g: kept(g, HK),
    "kept keys of a shared bias": lambda g: kept(g, 1),
    "kept keys of query heads": lambda g: kept(g, H),
    "layer": lambda g: layer(g, None),
    "layer of all": lambda g: layer(g, None, window_size=None),
    "cache": lambda g: layer(g, lambda: AttentionCache(rollback=2)),
    "cache of all": lambda g: layer(g, lambda: AttentionCache(every_key=True)),
    "cache of max_length": lambda g: layer(g, lambda: AttentionCache(40), window_size=None),
    "packed layer": layer_packed,
    "pairs": pairs,
    "attention function": attention_function,
    "references": references,
    "helpers": helpers,
}
LAYERS: dict[tuple[str, str, str], DynamicMaskAttention] = {}


def make_layers(target: Target) -> None:
    for settings in ({}, {"window_size": None}):
        torch.manual_seed(0)
        LAYERS[str(sorted(settings.items())), target.device, target.backend] = DynamicMaskAttention(
            64, H, HK, device=target.device, dtype=dtype_of(target), backend=target.backend,
            **{"window_size": 5, "sink": True, "init_std": 0.2, **settings},
        )  # fmt: skip


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def set_defaults(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Return a function that sets a default dtype, and a default device without values."""
    monkeypatch.setenv("FLASH_DMATTN_DETERMINISTIC", "1")  # results are compared bit for bit

    def change() -> None:
        torch.set_default_device("meta")
        torch.set_default_dtype(request.param)

    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def assert_equal(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.device, one.dtype) == (other.device, other.dtype)
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("name", CALLS)
def test_defaults_change_no_result(
    name: str, set_defaults: Callable[[], None], target: Target
) -> None:
    make_layers(target)
    tensors = given(target)
    want = CALLS[name](tensors)
    set_defaults()
    assert_equal(CALLS[name](tensors), want)


def test_defaults_change_no_result_of_the_selftest(set_defaults: Callable[[], None]) -> None:
    want = list(compare("cpu"))
    set_defaults()
    assert list(compare("cpu")) == want


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)
def test_defaults_change_no_result_of_a_group(
    set_defaults: Callable[[], None], tmp_path: Path
) -> None:
    g = given(Target("cpu", "cpu"))
    module = ContextParallelAttention(64, H, HK, window_size=5, device="cpu", dtype=torch.float32)

    def results() -> list[Tensor]:
        flat = [t.flatten(0, 1) for t in g[:3]]
        bias = g.bias.transpose(0, 1).flatten(1).unsqueeze(1)
        return [
            *with_gradients(g, lambda *tensors: (context_parallel_dmattn(*tensors, 5),)),
            context_parallel_dmattn(*flat, bias, 5, cu_seqlens=g.cu_seqlens),
            module(g.hidden, padding=g.keys),
            module(g.hidden.flatten(0, 1), cu_seqlens=g.cu_seqlens),
            context_parallel_forgetting(*g[:3], -g.bias[:, :, 0].abs(), -4.0, padding=g.keys),
        ]

    method = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    try:
        want = results()
        set_defaults()
        assert_equal(results(), want)
    finally:
        dist.destroy_process_group()


# Functions that make tensors on the default device unless they get a device.
_MAKERS = frozenset(
    {
        "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
        "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
        "tril_indices", "triu_indices", "zeros",
    }
)  # fmt: skip
# Integers make int64 tensors for any default dtype.
_WITHOUT_DTYPE = frozenset({"arange", "randint", "randperm", "tril_indices", "triu_indices"})


def test_each_tensor_that_the_package_makes_has_a_named_device() -> None:
    """It also has a named dtype, unless the function makes integers."""
    package, found = Path(flash_dmattn.__file__).parent, 0
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, name = node.func.value, node.func.attr
            if not (isinstance(owner, ast.Name) and owner.id == "torch" and name in _MAKERS):
                continue
            found += 1
            place = f"{path.relative_to(package)}:{node.lineno}: torch.{name}"
            named = {keyword.arg for keyword in node.keywords}
            if None in named:  # **place
                continue
            assert "device" in named, f"{place} names no device"
            assert "dtype" in named or name in _WITHOUT_DTYPE, f"{place} names no dtype"
    assert found > 40
