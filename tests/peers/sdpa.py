# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's sample inputs of scaled_dot_product_attention, judged by its math in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from flash_dmattn import flash_dmattn_func

from .shims.attention import MOST_HEAD_DIM

SDPA = "sdpa"
SDPA_PACKAGES = ("expecttest",)
# What is allowed beside three times the error of PyTorch in the same dtype, relative to the result.
SLACK = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def samples(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a name and a check for each sample."""
    from torch.testing._internal.common_methods_invocations import op_db

    name = "nn.functional.scaled_dot_product_attention"
    operator = next(info for info in op_db if info.name == name)
    dtypes = (torch.float16, torch.bfloat16)
    for dtype in dtypes if device == "cuda" else (torch.float32, torch.bfloat16):
        drawn = operator.sample_inputs(device, dtype, requires_grad=True)
        for number, sample in enumerate(drawn):
            check_sample = functools.partial(check, sample, dtype)
            yield f"{SDPA}::{str(dtype).removeprefix('torch.')}_{number}", check_sample


def check(sample: Any, dtype: torch.dtype) -> None:
    """Compare one sample's result and gradients."""
    inputs = [sample.input, *sample.args]
    options = dict(sample.kwargs)
    if len(inputs) > 3:
        options["attn_mask"] = inputs.pop(3)
    mask = options.pop("attn_mask", None)
    biases = [mask] if mask is not None and mask.is_floating_point() else []
    leaves = [x.detach().clone().requires_grad_() for x in inputs + biases]
    doubles = [x.detach().double().requires_grad_() for x in leaves]

    def attend(attention: Callable[..., Tensor], tensors: list[Tensor]) -> Tensor:
        return attention(*tensors[:3], attn_mask=tensors[3] if biases else mask, **options)

    out = attend(attention_of_flash_dmattn, leaves)
    with sdpa_kernel(SDPBackend.MATH):
        expected = attend(scaled_dot_product_attention, doubles)
        same_dtype = attend(scaled_dot_product_attention, leaves)
    assert out.shape == expected.shape
    empty = expected.isnan()  # of queries that keep no key
    compare("out", out[~empty], expected[~empty], same_dtype[~empty], dtype)
    if empty.any():
        return
    gradient = torch.randn_like(out)
    for name, *gradients in zip(
        ("dq", "dk", "dv", "dmask"),
        torch.autograd.grad(out, leaves, gradient),
        torch.autograd.grad(expected, doubles, gradient.double()),
        torch.autograd.grad(same_dtype, leaves, gradient),
        strict=False,
    ):
        compare(name, *gradients, dtype)


def compare(
    name: str, actual: Tensor, expected: Tensor, same_dtype: Tensor, dtype: torch.dtype
) -> None:
    if not actual.numel():
        return
    error = (actual.double() - expected).abs().max().item()
    usual = (same_dtype.double() - expected).abs().max().item()
    allowed = 3 * usual + SLACK[dtype] * (1 + expected.abs().max().item())
    assert error <= allowed, f"{name} is off by {error}, allowed {allowed}"


def attention_of_flash_dmattn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute what scaled_dot_product_attention does; its causal mask starts at the top left."""
    if dropout_p:
        pytest.skip("dropout")
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    most = max(head_dim, value_dim)
    if most > MOST_HEAD_DIM:
        pytest.skip(f"head dimension {most}")

    def laid_out(x: Tensor) -> Tensor:
        x = x if x.dim() > 2 else x[None]
        x = x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
        return pad(x.transpose(1, 2), (0, most - x.shape[-1]))

    mask = bias = None
    if attn_mask is not None:
        given = attn_mask[(None,) * max(0, 3 - attn_mask.dim())]
        if given.dim() > 3:
            given = given.expand(*lead, *given.shape[-3:])
        given = given.reshape(-1, *given.shape[-3:])
        mask, bias = (given, None) if given.dtype == torch.bool else (None, given)
    if is_causal:
        square = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = square.tril()[None, None]
    out = flash_dmattn_func(
        laid_out(query),
        laid_out(key),
        laid_out(value),
        mask,
        bias,
        head_dim**-0.5 if scale is None else scale,
    )
    out = out[..., :value_dim].transpose(1, 2)
    shape = (*lead, *query.shape[-3:-1], value_dim)
    return out.reshape(shape)
