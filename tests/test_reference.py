# SPDX-License-Identifier: BSD-3-Clause
"""The reference itself: finite differences of its derivatives, and a second form of its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import IntervalMask, attention_reference, flash_dmattn_func
from support import rand_bool, randn


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse.masked_fill(lse.isinf(), 0)


def leaves(*bias_shape: int) -> list[Tensor]:
    tensors = [randn(1, 5, 4, 3), randn(1, 6, 2, 3, seed=1), randn(1, 6, 2, 3, seed=2)]
    if bias_shape:
        tensors.append(randn(*bias_shape, seed=3))
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("backend", ["autograd", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(
    "bias_shape", [(), (1, 2, 1, 6), (1, 4, 5, 1), (1, 1, 5, 6), (1, 4, 5, 6), (1, 1, 1, 1)]
)
def test_derivatives(
    backend: str, causal: bool, softcap: float, bias_shape: tuple[int, ...]
) -> None:
    mask = rand_bool(1, 2, 5, 6, density=0.6)
    mask[:, :, 2] = False

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None):
        if backend == "autograd":
            return finite(
                *attention_reference(query, key, value, mask, bias, causal=causal, softcap=softcap)
            )
        return finite(
            *flash_dmattn_func(
                query,
                key,
                value,
                mask,
                bias,
                is_causal=causal,
                softcap=softcap,
                return_lse=True,
                backend="reference",
            )
        )

    assert torch.autograd.gradcheck(attention, leaves(*bias_shape))


def test_second_derivatives() -> None:
    def attention(*tensors: Tensor):
        return finite(*attention_reference(*tensors[:3], None, tensors[3], causal=True))

    assert torch.autograd.gradgradcheck(attention, leaves(1, 2, 1, 6))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_one_element_at_a_time(softcap: float) -> None:
    query, key, value, bias = (t.detach() for t in leaves(1, 2, 5, 6))
    mask = rand_bool(1, 4, 5, 6)
    out, lse = attention_reference(
        query, key, value, mask, bias, scale=0.7, causal=True, softcap=softcap
    )
    for h in range(4):
        for i in range(5):
            kept = [j for j in range(6) if mask[0, h, i, j] and j <= i + 1]
            scores = []
            for j in kept:
                score = 0.7 * torch.dot(query[0, i, h], key[0, j, h // 2])
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                scores.append(score + bias[0, h // 2, i, j])
            if not kept:
                assert not out[0, i, h].any()
                assert lse[0, h, i] == -torch.inf
                continue
            weights = torch.stack(scores).exp()
            torch.testing.assert_close(lse[0, h, i], weights.sum().log())
            want = (weights[:, None] * value[0, kept, h // 2]).sum(0) / weights.sum()
            torch.testing.assert_close(out[0, i, h], want)


def test_agrees_with_scaled_dot_product_attention() -> None:
    query, key, value = (t.detach() for t in leaves())
    mask = rand_bool(1, 4, 5, 6, density=0.8)
    mask[..., 0] = True
    out, _ = attention_reference(query, key, value, mask)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (query, key, value)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(out, want.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_results(dtype: torch.dtype) -> None:
    query, key, value = (t.detach().to(dtype) for t in leaves())
    out, lse = attention_reference(query, key, value)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_nan_of_an_empty_row_stays_there() -> None:
    query, key, value = leaves()
    mask = IntervalMask(
        torch.ones(1, 1, 6, dtype=torch.int32), torch.full((1, 1, 6), 5, dtype=torch.int32)
    )
    with torch.no_grad():
        query[:, 0] = torch.nan
    out, _ = attention_reference(query, key, value, mask)
    gradient = torch.full_like(out, torch.nan)
    gradient[:, 1:] = 1
    for derivative in torch.autograd.grad(out, (query, key, value), gradient):
        assert derivative.isfinite().all()


def test_float64_needs_the_reference_backend() -> None:
    query, key, value = (t.detach() for t in leaves())
    with pytest.raises(TypeError, match=r'query has dtype torch.float64.*backend="reference"'):
        flash_dmattn.flash_dmattn_func(query, key, value)
    out = flash_dmattn.flash_dmattn_func(query, key, value, backend="reference")
    torch.testing.assert_close(out, attention_reference(query, key, value)[0])


# The operator that compiled code calls takes fewer dtypes than the formula.
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_compiled_packed_sequences(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    shapes = [(8, 4, 8), (8, 2, 8), (8, 2, 4), (2, 8, 5)]
    given = [randn(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
    # The sequences' gradients of a 16-bit sink are summed in 16 bits.
    given = [*given[:3], given[3].to(bias_dtype), randn(4)]
    tensors = [t.requires_grad_() for t in given]

    def attention(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, bias, sink = tensors
        return attention_reference(
            query, key, value, None, bias, causal=True, sink=sink,
            cu_seqlens_q=bounds, cu_seqlens_k=bounds,
        )  # fmt: skip

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        got = torch.compile(attention, fullgraph=True, backend="aot_eager")(*tensors)
    want = attention(*tensors)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(sum(t.double().sum() for t in got), tensors),
        torch.autograd.grad(sum(t.double().sum() for t in want), tensors),
    )
