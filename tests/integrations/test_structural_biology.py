# SPDX-License-Identifier: BSD-3-Clause
"""triangle_attention and evoformer_attention against the formulas of the functions with the same
arguments.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn.integrations import evoformer_attention, triangle_attention
from support import Target, assert_accurate, randn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, N, H, S, D = 2, 3, 4, 20, 16


def triangle_formula(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax(where(mask, scale q k + bias, -1e9)) v."""
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.transpose(-1, -2)) + bias
    if mask is not None:
        scores = scores.masked_fill(mask == 0, max(-1e9, torch.finfo(scores.dtype).min))
    out = torch.softmax(scores, -1) @ v
    return out, torch.logsumexp(scores, -1), scores.amax(-1)


def evoformer_formula(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor | None]) -> Tensor:
    q, k, v = (t.transpose(2, 3) for t in (q, k, v))
    scores = q.shape[-1] ** -0.5 * (q @ k.transpose(-1, -2))
    for bias in biases:
        if bias is not None:
            scores = scores + bias
    return (torch.softmax(scores, -1) @ v).transpose(2, 3)


def compare(target: Target, function: Any, formula: Any, tensors: dict[str, Tensor]) -> None:
    """Assert the 2x rule for the result and all gradients against the float64 formula."""

    def results(compute: Any, device: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
        leaves = {
            name: t.detach().to(device, t.dtype if dtype is None else dtype).requires_grad_()
            for name, t in tensors.items()
        }
        out = compute(leaves)
        cotangent = randn(*out.shape, seed=99).to(tensors["q"].dtype).to(out)
        gradients = torch.autograd.grad(out, list(leaves.values()), cotangent)
        named = {f"d{name}": g.cpu() for name, g in zip(leaves, gradients, strict=True)}
        return {"out": out.detach().cpu(), **named}

    def eager(leaves: dict[str, Tensor]) -> Any:
        return formula({name: t.to(leaves["q"].dtype) for name, t in leaves.items()})

    assert_accurate(
        results(function, target.device, None),
        results(formula, "cpu", torch.float64),
        results(eager, target.device, None),
    )


def skip_unless_computed(dtype: torch.dtype, target: Target) -> None:
    if dtype not in target.dtypes:
        pytest.skip(f"{target} does not compute in {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", ["query", "float32"])
@pytest.mark.parametrize("batch, inner, queries, keys", [
    (1, 20, 20, 20), (2, 3, 17, 33), (3, 2, 9, 150), (1, 1, 1, 1), (2, 130, 16, 16),
])  # fmt: skip
def test_triangle_attention(
    dtype: torch.dtype,
    bias_dtype: str,
    batch: int,
    inner: int,
    queries: int,
    keys: int,
    pack_target: Target,
) -> None:
    skip_unless_computed(dtype, pack_target)
    tensors = {
        "q": randn(batch, inner, H, queries, D, seed=0).to(dtype),
        "k": randn(batch, inner, H, keys, D, seed=1).to(dtype),
        "v": randn(batch, inner, H, keys, D, seed=2).to(dtype),
        "bias": randn(batch, 1, H, queries, keys, seed=3),
    }
    if bias_dtype == "query":
        tensors["bias"] = tensors["bias"].to(dtype)
    mask = torch.rand(batch, inner, 1, 1, keys, generator=torch.Generator().manual_seed(4)) < 0.7
    mask[..., 0] = True
    mask[:, 0] = False  # gives the mean of the values

    def function(leaves: dict[str, Tensor]) -> Tensor:
        out = triangle_attention(**leaves, mask=mask.to(pack_target.device))
        assert isinstance(out, Tensor)
        return out

    def formula(leaves: dict[str, Tensor]) -> Tensor:
        return triangle_formula(**leaves, mask=mask.to(leaves["q"].device), scale=None)[0]

    compare(pack_target, function, formula, tensors)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_forms_of_triangle_attention(mask_dtype: torch.dtype) -> None:
    """No batch, another scale, and numeric masks."""
    q, k, v = (randn(N, H, S, D, seed=n) for n in range(3))
    bias, mask = randn(1, H, S, S, seed=3), torch.ones(N, 1, 1, S)
    mask[1, ..., 4:] = 0
    mask[2] = 0
    out, lse, largest = triangle_attention(
        q, k, v, bias, mask.to(mask_dtype), scale=0.3, return_aux=True
    )
    five = [t.unsqueeze(0) for t in (q, k, v, bias, mask)]
    for got, want in zip((out, lse, largest), triangle_formula(*five, 0.3), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)
    assert not lse.requires_grad
    without = triangle_attention(q, k, v, bias)
    assert isinstance(without, Tensor)
    torch.testing.assert_close(without, triangle_formula(*five[:4], None, None)[0])


def test_many_rows_have_their_largest_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.integrations import structural_biology

    monkeypatch.setattr(structural_biology, "_ELEMENTS_AT_ONCE", 1000)
    q, k, v = (randn(B, N, H, S, D, seed=n) for n in range(3))
    bias = randn(B, 1, H, S, S, seed=3)
    found = triangle_attention(q, k, v, bias, return_aux=True)
    torch.testing.assert_close(found[2], triangle_formula(q, k, v, bias, None, None)[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["both", "keys", "pairs", "none"])
@pytest.mark.parametrize("batch, inner, length", [(1, 5, 20), (2, 3, 33), (3, 2, 7)])
def test_evoformer_attention(
    dtype: torch.dtype, which: str, batch: int, inner: int, length: int, pack_target: Target
) -> None:
    skip_unless_computed(dtype, pack_target)
    shape = (batch, inner, length, H, D)
    tensors = {name: randn(*shape, seed=n).to(dtype) for n, name in enumerate("qkv")}
    if which in ("both", "keys"):
        of_keys = randn(batch, inner, 1, 1, length, seed=4)
        of_keys[0, :, ..., length // 2 :] = -1e4 if dtype == torch.float16 else -1e9
        tensors["of_keys"] = of_keys.to(dtype)
    if which in ("both", "pairs"):
        tensors["of_pairs"] = randn(batch, 1, H, length, length, seed=5).to(dtype)

    def biases(leaves: dict[str, Tensor]) -> list[Tensor | None]:
        found = [leaves.get("of_keys"), leaves.get("of_pairs")]
        return found[:1] if which == "keys" else [] if which == "none" else found

    compare(
        pack_target,
        lambda t: evoformer_attention(t["q"], t["k"], t["v"], biases(t)),
        lambda t: evoformer_formula(t["q"], t["k"], t["v"], biases(t)),
        tensors,
    )


def test_biases_may_be_float32_and_masked_everywhere() -> None:
    """A bias of -1e9 that drops all keys gives the mean of the values."""
    q, k, v = (randn(1, 2, S, H, D, seed=n).bfloat16() for n in range(3))
    of_keys = torch.full((1, 2, 1, 1, S), -1e9)
    of_keys[:, 1] = 0
    out = evoformer_attention(q, k, v, [of_keys, randn(1, 1, H, S, S, seed=5)])
    mean = v.float().mean(2, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out[:, 0].float(), mean[:, 0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", [tuple, collections.deque, torch.nn.ParameterList])
def test_any_sequence_of_biases(kind: Callable[[list[Tensor]], Any]) -> None:
    q, k, v = (randn(1, 2, S, H, D, seed=n) for n in range(3))
    biases = [randn(1, 2, 1, 1, S, seed=4), randn(1, 1, H, S, S, seed=5)]
    out = evoformer_attention(q, k, v, kind(biases))
    torch.testing.assert_close(out, evoformer_attention(q, k, v, biases))


WRONG = {
    "three biases": ([None] * 3, r"biases must be at most two tensors, got 3"),
    "bias of pairs first": (
        [torch.zeros(B, 1, H, S, S)],
        r"biases\[0\] must have shape \(2, 3, 1.*; biases are \[of keys, of pairs\]",
    ),
    "bias of other heads": (
        [None, torch.zeros(B, 1, 1, S, S)], r"biases\[1\] must have shape \(2, 1, 4, 20, 20\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_biases(case: str) -> None:
    biases, text = WRONG[case]
    q = torch.zeros(B, N, S, H, D)
    with pytest.raises(ValueError, match=text):
        evoformer_attention(q, q, q, biases)


def test_wrong_types() -> None:
    q = torch.zeros(B, N, S, H, D)
    of_keys = torch.zeros(B, N, 1, 1, S)
    for wrong, text in (
        (None, "None"),
        (of_keys, r"a torch.float32 tensor of shape \(2, 3, 1, 1, 20\)"),
        ({0: of_keys}, "dict of length 1"),
        ("biases", "'biases'"),
        (iter([of_keys]), "list_iterator object"),
    ):
        with pytest.raises(TypeError, match=f"biases must be a sequence of at .*, got {text}"):
            evoformer_attention(q, q, q, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"biases\[0\] must hold real numbers, got torch.bool"):
        evoformer_attention(q, q, q, [torch.ones(B, N, 1, 1, S) > 0])
    q = torch.zeros(B, N, H, S, D)
    with pytest.raises(TypeError, match=r"bias must hold real numbers, got torch.bool"):
        triangle_attention(q, q, q, torch.ones(B, 1, H, S, S) > 0)
    bias = torch.zeros(B, 1, H, S, S)
    with pytest.raises(TypeError, match=r"return_aux must be True, False or None, got 'yes'"):
        triangle_attention(q, q, q, bias, return_aux="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["K", "V"])
def test_keys_and_values_of_another_length(name: str) -> None:
    """The error names the argument of this function, not that of the function below it."""
    Q, bias = torch.zeros(B, N, S, H, D), torch.zeros(B, 1, H, S, S)
    tensors = {"K": Q, "V": Q} | {name: Q[:, :, :-1]}
    with pytest.raises(
        ValueError, match=rf"{name} must have .* = \(2, 3, 20\) as Q, got \(2, 3, 1"
    ):
        evoformer_attention(Q, **tensors, biases=[None, bias])
    q = Q.transpose(2, 3)
    tensors = {"k": q, "v": q} | {name.lower(): q[..., :-1, :]}
    text = rf"{name.lower()} must have .* = \(2, 3\) as q and K=20 as bias, got \(2, 3, 4, 19"
    with pytest.raises(ValueError, match=text):
        triangle_attention(q, **tensors, bias=bias)


def test_wrong_dimensions() -> None:
    q = torch.zeros(N, S, D)
    with pytest.raises(ValueError, match=r"q must have five dimensions, .* got \(3, 20, 16\)"):
        triangle_attention(q, q, q, q)
    with pytest.raises(ValueError, match=r"Q must have shape \(B, N, S, H, D\)"):
        evoformer_attention(q, q, q, [])
