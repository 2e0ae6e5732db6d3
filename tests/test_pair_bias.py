# SPDX-License-Identifier: BSD-3-Clause
"""Two batch dimensions, and a bias of the keys beside a pair bias."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import flash_dmattn_func, pair_bias_attention
from flash_dmattn.bias_columns import with_bias_columns
from support import Target, assert_accurate, randn

Q, K, H, HK, D = 17, 33, 4, 2, 24
SHARED = [(1, 1), (1, 0), (0, 1), (0, 0)]  # the batch dimensions that a tensor has


def shape_of(batch: tuple[int, int], own: tuple[int, int], *rest: int) -> tuple[int, ...]:
    return (*(size if has else 1 for size, has in zip(batch, own, strict=True)), *rest)


def formula(
    leaves: dict[str, Tensor], mask: Tensor | None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    query, key, value = (leaves[name].transpose(2, 3) for name in ("query", "key", "value"))
    group = query.shape[2] // key.shape[2]
    key, value = (t.repeat_interleave(group, 2) for t in (key, value))
    scores = query.shape[-1] ** -0.5 * (query @ key.transpose(-1, -2))
    for name in ("bias", "key_bias"):
        if name in leaves:
            bias = leaves[name]
            if bias.shape[2] not in (1, query.shape[2]):
                bias = bias.repeat_interleave(group, 2)
            scores = scores + bias
    kept = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if mask is not None:
        kept = kept & mask
    if causal:
        kept = kept.tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~kept, -torch.inf)
    return (torch.softmax(scores, -1) @ value).transpose(2, 3), torch.logsumexp(scores, -1)


def check(target: Target, tensors: dict[str, Tensor], mask: Tensor | None, **options: Any) -> None:
    mask = None if mask is None else mask.to(target.device)

    def results(kind: str) -> dict[str, Tensor]:
        device = "cpu" if kind == "truth" else target.device
        leaves = {
            name: t.to(device, torch.float64 if kind == "truth" else t.dtype).requires_grad_()
            for name, t in tensors.items()
        }
        own = mask if mask is None else mask.to(device)
        if kind == "ours":
            out, lse = pair_bias_attention(
                leaves["query"], leaves["key"], leaves["value"], own, leaves.get("bias"),
                leaves.get("key_bias"), return_lse=True, backend=target.backend, **options,
            )  # fmt: skip
        else:
            dtype = leaves["query"].dtype
            cast = {name: t.to(dtype) for name, t in leaves.items()}
            out, lse = formula(cast, own, options.get("is_causal", False))
        cotangents = [randn(*t.shape, seed=n).to(device, t.dtype) for n, t in enumerate((out, lse))]
        gradients = torch.autograd.grad([out, lse], list(leaves.values()), cotangents)
        named = {f"d{name}": g.cpu() for name, g in zip(leaves, gradients, strict=True)}
        return {"out": out.detach().cpu(), "lse": lse.detach().cpu(), **named}

    assert_accurate(results("ours"), results("truth"), results("eager"))


def tensors_of(batch: tuple[int, int], dtype: torch.dtype, **more: Tensor) -> dict[str, Tensor]:
    rows, columns = (*batch, Q, H, D), (*batch, K, HK, D)
    named = {"query": rows, "key": columns, "value": columns}
    made = {name: randn(*shape, seed=n).to(dtype) for n, (name, shape) in enumerate(named.items())}
    return made | more


def mask_of(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("batch", [(1, 3), (2, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("own", list(itertools.product(SHARED, SHARED)), ids=str)
def test_batch_dimensions_are_shared(
    own: tuple[tuple[int, int], tuple[int, int]], batch: tuple[int, int], pack_target: Target
) -> None:
    dtype = pack_target.dtypes[-1]
    bias = randn(*shape_of(batch, own[0], H, Q, K), seed=5)
    mask = mask_of(*shape_of(batch, own[1], 1, Q, K))
    check(pack_target, tensors_of(batch, dtype, bias=bias), mask)


@pytest.mark.parametrize("batch", [(1, 3), (2, 3), (3, 2)])
@pytest.mark.parametrize("own", list(itertools.product(SHARED[:3], SHARED)), ids=str)
def test_two_biases(
    own: tuple[tuple[int, int], tuple[int, int]], batch: tuple[int, int], pack_target: Target
) -> None:
    for dtype in pack_target.dtypes[:2]:
        bias = randn(*shape_of(batch, own[0], H, Q, K), seed=5).to(dtype)
        key_bias = 3 * randn(*shape_of(batch, own[1], 1, 1, K), seed=6)
        tensors = tensors_of(batch, dtype, bias=bias, key_bias=key_bias)
        check(pack_target, tensors, None, is_causal=True)


@pytest.mark.parametrize("biases", [("bias",), ("key_bias",), ("bias", "key_bias")], ids=str)
@pytest.mark.parametrize("width", [D // 3, D + 1, 2 * D, 256])
def test_values_of_another_head_dimension(
    width: int, biases: tuple[str, ...], pack_target: Target
) -> None:
    """Results are as wide as value, though one of two biases makes query and key wider."""
    batch = 2, 3
    more = {"value": randn(*batch, K, HK, width, seed=9), "bias": randn(1, 3, H, Q, K, seed=5)}
    more["key_bias"] = randn(2, 1, 1, 1, K, seed=6)
    dtype = pack_target.dtypes[0]
    made = tensors_of(batch, dtype, **{name: t.to(dtype) for name, t in more.items()})
    check(pack_target, {n: t for n, t in made.items() if "bias" not in n or n in biases}, None)


@pytest.mark.parametrize("heads", [1, HK, H])
def test_a_bias_of_the_keys_alone_and_added_to_another(heads: int, target: Target) -> None:
    dtype = target.dtypes[-1]
    key_bias = randn(2, 3, HK, 1, K, seed=6)
    check(target, tensors_of((2, 3), dtype, key_bias=key_bias), None)
    both = tensors_of((2, 3), dtype, key_bias=key_bias, bias=randn(2, 3, heads, 1, K, seed=5))
    check(target, both, mask_of(2, 3, 1, 1, K))


@pytest.mark.parametrize("batch", [(16, 17), (17, 16)])
def test_gradients_of_several_calls_are_added_in_float32(
    batch: tuple[int, int], pack_target: Target
) -> None:
    """In 16 bits a sum of sixteen equal numbers would be several units off."""
    dtype = torch.bfloat16
    own = (0, 1) if batch[0] < batch[1] else (1, 0)
    one = tensors_of((1, 1), dtype)
    many = {name: t.expand(*batch, *t.shape[2:]).to(pack_target.device) for name, t in one.items()}
    bias = randn(*shape_of(batch, own, 1, Q, K), seed=5).to(pack_target.device, dtype)

    def gradient(dtype: torch.dtype) -> Tensor:
        leaf = bias.to(dtype).requires_grad_()
        out = pair_bias_attention(**many, attn_bias=leaf, backend=pack_target.backend)
        (found,) = torch.autograd.grad(out.float().square().sum(), leaf)
        return found.double()

    exact = gradient(torch.float32)
    error = (gradient(dtype) - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-6 * exact.abs().max()).all()


def test_one_batch_dimension_equals_the_ordinary_call(target: Target) -> None:
    tensors = tensors_of((1, 3), target.dtypes[0], bias=randn(1, 1, H, Q, K, seed=5))
    query, key, value, bias = (t.to(target.device) for t in tensors.values())
    mask = mask_of(1, 3, 1, 1, K).to(target.device)
    sink = randn(H, seed=8).to(target.device)
    options = {"sink": sink, "softcap": 5.0, "return_lse": True, "backend": target.backend}
    found = pair_bias_attention(query, key, value, mask, bias, **options)
    wanted = flash_dmattn_func(query[0], key[0], value[0], mask[0], bias[0], **options)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got[0], want)


def test_nothing_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded tensors are narrowed; shared ones are passed on unchanged."""
    from flash_dmattn import pair_bias

    shapes: list[tuple[int, ...]] = []

    def note(query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any, **_: Any) -> Any:
        shapes.append((tuple(mask.shape), tuple(bias.shape)))
        return torch.zeros_like(query), query.new_zeros(query.shape[0], H, Q)

    monkeypatch.setattr(pair_bias, "flash_dmattn_func", note)
    tensors = tensors_of((2, 3), torch.float32)
    bias = randn(2, 1, H, Q, K).expand(2, 3, H, Q, K)
    pair_bias_attention(**tensors, attn_mask=mask_of(2, 3, 1, 1, K), attn_bias=bias)
    assert shapes == [((3, 1, 1, K), (1, H, Q, K))] * 2
    shapes.clear()
    bias = randn(1, 1, H, Q, K).expand(2, 3, H, Q, K)
    pair_bias_attention(**tensors, attn_mask=mask_of(2, 3, 1, 1, K), attn_bias=bias)
    assert shapes == [((6, 1, 1, K), (1, H, Q, K))]


def test_keys_of_minus_infinity_reach_nothing(target: Target) -> None:
    tensors = tensors_of((1, 2), target.dtypes[0], bias=randn(1, 1, H, Q, K, seed=5))
    key_bias = torch.zeros(1, 2, 1, 1, K)
    key_bias[:, 0, ..., 5] = -torch.inf
    key_bias[:, 1] = -torch.inf
    tensors["key"][:, 0, 5] = tensors["value"][:, 0, 5] = torch.nan
    tensors["value"][:, 1] = torch.nan
    leaves = [t.to(target.device).requires_grad_() for t in (*tensors.values(), key_bias)]
    query, key, value, bias, of_keys = leaves
    out, lse = pair_bias_attention(
        query, key, value, None, bias, of_keys, return_lse=True, backend=target.backend
    )
    assert out.isfinite().all()
    assert (out[:, 1] == 0).all()
    assert (lse[:, 1] == -torch.inf).all()
    for gradient in torch.autograd.grad(out.float().square().sum(), leaves):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("batch, queries, keys", [((0, 3), 5, 5), ((2, 0), 5, 5), ((2, 3), 0, 5),
                                                  ((2, 3), 5, 0)])  # fmt: skip
def test_sizes_of_zero(
    batch: tuple[int, int], queries: int, keys: int, pack_target: Target
) -> None:
    dtype, device = pack_target.dtypes[0], pack_target.device
    query = torch.zeros(*batch, queries, H, D, dtype=dtype, device=device)
    key = torch.zeros(*batch, keys, HK, D, dtype=dtype, device=device)
    bias = torch.zeros(batch[0], 1, H, queries, keys, device=device)
    mask = torch.ones(1, batch[1], 1, 1, keys, dtype=torch.bool, device=device)
    out = pair_bias_attention(query, key, key, mask, bias, backend=pack_target.backend)
    assert isinstance(out, Tensor)
    assert out.shape == query.shape
    assert not out.any()


def test_columns_hold_what_float32_does() -> None:
    bias = torch.tensor([1.234567, -1e9, 0.0, 1e-6, -123.456, torch.inf, 5.0])
    query, key = torch.randn(1, 2, 8).bfloat16(), torch.randn(7, 1, 8).bfloat16()
    extended = with_bias_columns(query, key, key, bias.unsqueeze(-1), 0.25)
    assert extended.query.shape[-1] == extended.value.shape[-1] == 16
    added = extended.key[:, 0, 8:].double().sum(-1) * 0.25
    torch.testing.assert_close(added, bias.double(), atol=0, rtol=1e-7)
    half = with_bias_columns(query.half(), key.half(), key.half(), bias.unsqueeze(-1), 0.25)
    assert half.key[1, 0, 8:].sum() < -1e5 or half.key[1, 0, 8] == torch.finfo(torch.float16).min


TENSORS = tensors_of((2, 3), torch.float32)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of four dimensions": (
        {"query": TENSORS["query"][0]}, ValueError, r"query must have shape \(B, N, rows"),
    "another batch": (
        {"key": TENSORS["key"][:1]}, ValueError, r"key must have the batch \(2, 3\) of query"),
    "a mask of another batch": (
        {"attn_mask": mask_of(3, 3, 1, 1, K)}, ValueError,
        r"attn_mask must have shape \(\{2\|1\}, \{3\|1\}, \{4\|2\|1\}, \{17\|1\}, \{33\|1\}\)"),
    "a bias of keys with rows": (
        {"key_bias": randn(2, 3, 1, Q, K)}, ValueError,
        r"key_bias must have shape \(.*, \{2\|1\}, 1, \{33\|1\}\), got"),
    "a bias of keys with the heads of queries": (
        {"key_bias": randn(2, 3, H, 1, K)}, ValueError, r"key_bias must have shape"),
    "softcap": (
        {"key_bias": randn(1, 3, 1, 1, K), "attn_bias": randn(1, 1, H, Q, K), "softcap": 2.0},
        NotImplementedError, r"softcap must be 0 or None with key_bias"),
    "scale": (
        {"key_bias": randn(1, 3, 1, 1, K), "attn_bias": randn(1, 1, H, Q, K),
         "softmax_scale": 0.0}, ValueError, r"softmax_scale must not be 0 with key_bias"),
    "a bias of keys of booleans": (
        {"key_bias": mask_of(1, 3, 1, 1, K), "attn_bias": randn(1, 1, H, Q, K)}, TypeError,
        r"key_bias must have a floating-point dtype of at least 16 bits, got torch.bool"),
    "a bias of keys on another device": (
        {"key_bias": randn(1, 3, 1, 1, K).to("meta")}, ValueError,
        r"key_bias must be on query's device cpu, got a tensor on meta"),
    "a mask of numbers with a bias of keys": (
        {"key_bias": randn(1, 3, 1, 1, K), "attn_bias": randn(1, 1, H, Q, K),
         "attn_mask": torch.ones(1, 1, 1, Q, K)}, TypeError,
        r"attn_mask must have dtype torch.bool \(True keeps\), got torch.float32"),
    "return_lse": ({"return_lse": 2}, TypeError, r"return_lse must be True, False or None, got 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    changes, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        pair_bias_attention(**{**TENSORS, **changes})


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 253), (torch.float32, 255)])
def test_the_largest_heads_beside_a_bias_of_the_keys(dtype: torch.dtype, most: int) -> None:
    biases = {"attn_bias": torch.zeros(1, 1, 1, 5, 5), "key_bias": torch.zeros(1, 1, 1, 1, 5)}
    widest = torch.randn(1, 2, 5, 1, most, dtype=dtype)
    assert pair_bias_attention(widest, widest, widest, **biases).shape == widest.shape
    wider = torch.randn(1, 2, 5, 1, most + 1, dtype=dtype)
    with pytest.raises(ValueError, match=f"head dimension {most + 1}, but .* at most {most} with"):
        pair_bias_attention(wider, wider, wider, **biases)
