# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's samples of scaled_dot_product_attention, judged by its math backend in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from drawn.calls import Call
from drawn.exact import unit
from drawn.judge import expected
from flash_dmattn import flash_dmattn_func

from .shims.attention import MOST_HEAD_DIM

SDPA = "sdpa"
SDPA_PACKAGES = ("expecttest",)


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
    """Compare a sample's result and gradients; each element has the bound of its terms."""
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
        exact = attend(scaled_dot_product_attention, doubles)
    assert out.shape == exact.shape
    gradient = torch.randn_like(out)
    layout = Layout(*leaves[:3])
    arrange = functools.partial(
        layout.arguments,
        is_causal=options.get("is_causal", False),
        scale=options.get("scale"),
    )
    call = Call(
        **{
            name: x.detach() if isinstance(x, Tensor) else x
            for name, x in arrange(*leaves[:3], leaves[3] if biases else mask).items()
        },
        dout=layout.rows(gradient),
        dlse=gradient.new_zeros(layout.rows(gradient).shape[:3], dtype=torch.float32).mT,
        of=("out",),
    )
    bounds = expected(call).bounds
    empty = exact.isnan()  # queries that keep no key
    compare("out", out[~empty], exact[~empty], layout.of_rows(bounds["out"])[~empty])
    if empty.any():
        return
    arranged = arrange(*doubles[:3], doubles[3] if biases else mask)
    names = ["query", "key", "value", "bias"][: len(leaves)]
    for name, actual, wanted, bound in zip(
        names,
        torch.autograd.grad(out, leaves, gradient),
        torch.autograd.grad(exact, doubles, gradient.double()),
        # An expanded tensor gets the sum of its copies' gradients, and of their errors.
        torch.autograd.grad(
            [arranged[name] for name in names], doubles, [bounds[f"d{name}"] for name in names]
        ),
        strict=True,
    ):
        compare(f"d{name}", actual, wanted, bound + unit(dtype) * wanted.abs())


def compare(name: str, actual: Tensor, exact: Tensor, allowed: Tensor) -> None:
    error = (actual.double() - exact).abs()
    wrong = ~(error <= allowed)  # not ">": a NaN error must count as wrong
    if wrong.any():
        excess = torch.where(wrong, error / allowed, 0)
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the worst at "
            f"{worst} by {error[worst].item():.3g}, allowed {allowed[worst].item():.3g}"
        )


class Layout:
    """The layout of scaled_dot_product_attention's inputs in flash_dmattn.

    Args:
        query: (..., heads, queries, head_dim).
        key: (..., kv_heads, keys, head_dim).
        value: (..., kv_heads, keys, value_dim).
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        self.value_dim = value.shape[-1]
        self.head_dim = max(query.shape[-1], self.value_dim)

    def rows(self, x: Tensor) -> Tensor:
        """Expand to one batch dimension, swap heads and rows, and pad the head dimension."""
        x = x if x.dim() > 2 else x[None]
        x = x.expand(*self.lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
        return pad(x.transpose(1, 2), (0, self.head_dim - x.shape[-1]))

    def of_rows(self, out: Tensor) -> Tensor:
        """Return out in the layout of the inputs."""
        out = out[..., : self.value_dim].transpose(1, 2)
        return out.reshape(*self.lead, *out.shape[1:])

    def arguments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        *,
        is_causal: bool,
        scale: float | None,
    ) -> dict[str, Any]:
        """Return the arguments of a call; PyTorch's causal mask is aligned to the top left."""
        mask = bias = None
        if attn_mask is not None:
            given = attn_mask[(None,) * max(0, 3 - attn_mask.dim())]
            if given.dim() > 3:
                given = given.expand(*self.lead, *given.shape[-3:])
            given = given.reshape(-1, *given.shape[-3:])
            mask, bias = (given, None) if given.dtype == torch.bool else (None, given)
        if is_causal:
            mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()[None, None]
        return {
            "query": self.rows(query),
            "key": self.rows(key),
            "value": self.rows(value),
            "mask": mask,
            "bias": bias,
            "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        }


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
    """Compute scaled_dot_product_attention by flash_dmattn."""
    if dropout_p:
        pytest.skip("dropout")
    layout = Layout(query, key, value)
    if layout.head_dim > MOST_HEAD_DIM:
        pytest.skip(f"head dimension {layout.head_dim}")
    arguments = layout.arguments(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
    return layout.of_rows(flash_dmattn_func(*arguments.values()))
