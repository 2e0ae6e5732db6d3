# SPDX-License-Identifier: BSD-3-Clause
"""DynamicMaskAttention in plain form: with loops, sorts and Q x K tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from flash_dmattn import DynamicMaskAttention
from support import Target

EMBED = 24


def make_module(target: Target, dtype: torch.dtype | None = None, **settings: object):  # type: ignore[no-untyped-def]
    """Return a float32 module with random weights, or a 16-bit one with exact biases.

    In 16 bits, rounding would decide which keys are kept, and it depends on the order of sums.
    There each head's bias comes from one input element, which `make_input` makes distinct for all
    tokens.
    """
    torch.manual_seed(0)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    settings = {**sizes, "window_size": 5, "keep_last": 0, **settings}
    dtype = dtype or target.dtypes[0]
    module = DynamicMaskAttention(EMBED, init_std=0.3, backend=target.backend, **settings)
    if dtype != torch.float32:
        make_biases_exact(module)
    with torch.no_grad():
        module.A.copy_(torch.linspace(1.5, -0.7, len(module.A)))
        if module.o_proj.bias is not None:
            module.o_proj.bias.normal_()
    return module.to(target.device, dtype)


def make_biases_exact(module: DynamicMaskAttention) -> None:
    with torch.no_grad():
        module.dt_proj.weight.zero_()
        for head in range(module.num_kv_heads):
            element = head * module.head_dim
            module.v_proj.weight[element] = torch.arange(EMBED) == head
            module.dt_proj.weight[head, element] = 1


def make_input(module: DynamicMaskAttention, *rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*rows, EMBED, generator=generator)
    for sequence in x.view(-1, *x.shape[-2:]) if x.numel() else ():
        for head in range(module.num_kv_heads):
            sequence[:, head] = torch.randperm(rows[-1], generator=generator) / 8 - 2
    return x.to(module.A)


def plain_forward(
    module: DynamicMaskAttention,
    parameters: dict[str, Tensor],
    x: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the module in the dtype of ``parameters``; mask is bool (B|1, 1, N|1, N)."""
    batch, rows, _ = x.shape
    heads, kv_heads, dim = module.num_heads, module.num_kv_heads, module.head_dim

    def project(name: str, inputs: Tensor) -> Tensor:
        return linear(inputs, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))

    def prepared(name: str, count: int) -> Tensor:
        states = project(f"{name}_proj", x).view(batch, rows, count, dim)
        if f"{name}_norm.weight" in parameters:
            size = (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            states = states / size * parameters[f"{name}_norm.weight"]
        return states if module.rotary_base is None else turned(states, module.rotary_base)

    query, key = prepared("q", heads), prepared("k", kv_heads)
    value = project("v_proj", x)
    bias = parameters["A"] * torch.log1p(torch.exp(project("dt_proj", value)))
    if module.bias_form == "exp":
        bias = torch.exp(bias)
    visible = torch.ones(batch, rows, rows, dtype=torch.bool, device=x.device)
    if mask is not None:
        visible = visible & mask[:, 0]
    if module.is_causal:
        visible = visible.tril()
    window = rows if module.window_size is None else module.window_size
    out = x.new_zeros(batch, rows, heads, dim)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        kept = chosen(bias[..., kv_head].detach(), visible, window)
        scores = query[:, :, head] @ key[:, :, kv_head].transpose(1, 2)
        scores = scores * (dim**-0.5 if module.softmax_scale is None else module.softmax_scale)
        if module.softcap:
            scores = module.softcap * torch.tanh(scores / module.softcap)
        scores = (scores + bias[:, None, :, kv_head]).masked_fill(~kept, -torch.inf)
        empty = ~kept.any(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0)
        if "sink" in parameters:
            sink = parameters["sink"][head].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :rows].masked_fill(empty, 0)
        head_value = value.view(batch, rows, kv_heads, dim)[:, :, kv_head]
        out[:, :, head] = weights @ head_value
    return project("o_proj", out.flatten(2))


def turned(states: Tensor, base: float) -> Tensor:
    """Rotate pairs as complex numbers."""
    half = states.shape[-1] // 2
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    pairs = torch.complex(wide[..., :half], wide[..., half:])
    position = torch.arange(states.shape[1], device=states.device, dtype=wide.dtype)
    rate = torch.tensor([base ** (-i / half) for i in range(half)]).to(wide)
    angle = position[:, None] * rate
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pairs.real, pairs.imag], -1).to(states.dtype)


def chosen(bias: Tensor, visible: Tensor, window: int) -> Tensor:
    """Keep each row's keys of the largest biases (B, N) in bool (B, N, N); ties go to the first."""
    kept = torch.zeros_like(visible)
    for sequence, biases in enumerate(bias.tolist()):
        for row, seen in enumerate(visible[sequence].tolist()):
            keys = [key for key, can_see in enumerate(seen) if can_see]
            keys.sort(key=lambda key: (-biases[key], key))
            kept[sequence, row, keys[:window]] = True
    return kept


def plain_results(
    module: DynamicMaskAttention,
    x: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return out and the gradients of x and of all parameters by `plain_forward`."""
    parameters = {
        name: parameter.detach().to(dtype).requires_grad_()
        for name, parameter in module.named_parameters()
    }
    x = x.detach().to(dtype).requires_grad_()
    out = plain_forward(module, parameters, x, mask)
    return gathered(out, x, parameters, dout)


def module_results(
    module: DynamicMaskAttention, x: Tensor, dout: Tensor, mask: object = None
) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    return gathered(module(x, mask), x, dict(module.named_parameters()), dout)


def gathered(
    out: Tensor, x: Tensor, parameters: dict[str, Tensor], dout: Tensor
) -> dict[str, Tensor]:
    leaves = {"x": x, **parameters}
    gradients = torch.autograd.grad(out, list(leaves.values()), dout.to(out))
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: tensor.detach().cpu() for name, tensor in {"out": out, **named}.items()}
