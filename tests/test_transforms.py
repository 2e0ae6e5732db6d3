# SPDX-License-Identifier: BSD-3-Clause
"""torch.func and forward-mode differentiation: right, or refused; never silently wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from flash_dmattn import IntervalMask, attention_reference, flash_dmattn_func
from support import Target, randn

FORWARD_MODE = "does not support forward-mode differentiation.*attention_reference"
VMAP = "does not support torch.vmap.*batch dimension"


def tensors(target: Target) -> tuple[Tensor, ...]:
    shapes = [(2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 2, 1, 9)]
    return tuple(
        randn(*shape, seed=n).to(target.device, target.dtypes[0]) for n, shape in enumerate(shapes)
    )


def loss_on(target: Target) -> Callable[..., Tensor]:
    def loss(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        mask = IntervalMask.sliding_window(4, 0, 7, 9, device=target.device)
        out, lse = flash_dmattn_func(
            query, key, value, mask, bias, is_causal=True, return_lse=True, backend=target.backend
        )
        return (out.float() ** 2).sum() + lse.sum()

    return loss


def test_func_grad_equals_autograd(target: Target) -> None:
    inputs, loss = tensors(target), loss_on(target)
    leaves = [t.clone().requires_grad_() for t in inputs]
    want = torch.autograd.grad(loss(*leaves), leaves)
    everything = tuple(range(4))
    for got in (
        torch.func.grad(loss, everything)(*inputs),
        torch.func.vjp(loss, *inputs)[1](torch.ones((), device=target.device)),
        make_fx(torch.func.grad(loss, everything))(*inputs)(*inputs),
    ):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
    assert torch.equal(torch.func.grad(loss, 3)(*inputs), want[3])


def test_func_grad_and_autograd_together(target: Target) -> None:
    """Each differentiates by its own tensors."""
    query, key, value, bias = tensors(target)
    loss = loss_on(target)
    leaf = value.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.func.grad(loss)(query, key, leaf, bias).sum().backward()
    loss(query, key, leaf, bias).backward()
    (want,) = torch.func.grad(loss, (2,))(query, key, value, bias)
    torch.testing.assert_close(leaf.grad, want)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(f)(x),
        lambda f, x: torch.func.linearize(f, x)[1](x),
        lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,)),
        lambda f, x: torch.compile(lambda: torch.func.jvp(f, (x,), (x,)), backend="eager")(),
    ],
    ids=["jvp", "jacfwd", "hessian", "linearize", "jvp of grad", "compiled jvp"],
)
@pytest.mark.parametrize("argument", [0, 3])
def test_forward_mode_is_refused(transform: object, argument: int, target: Target) -> None:
    torch._dynamo.reset()
    inputs, loss = list(tensors(target)), loss_on(target)

    def of_one(x: Tensor) -> Tensor:
        return loss(*inputs[:argument], x, *inputs[argument + 1 :])

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        transform(of_one, inputs[argument])  # type: ignore[operator]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors_are_refused(requires_grad: bool, target: Target) -> None:
    query, *rest = tensors(target)
    query.requires_grad_(requires_grad)
    with forward_ad.dual_level():
        loss_on(target)(query, *rest)  # no tangent: none is lost
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(RuntimeError, match=FORWARD_MODE):
            loss_on(target)(dual, *rest)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.vmap(f)(torch.stack([x, x])),
        lambda f, x: torch.vmap(torch.func.grad(f))(torch.stack([x, x])),
        lambda f, x: torch.func.jacrev(lambda y: f(y) * torch.ones(2, device=y.device))(x),
    ],
    ids=["vmap", "gradients for each sample", "jacrev"],
)
def test_vmap_is_refused(transform: object, target: Target) -> None:
    query, *rest = tensors(target)
    loss = loss_on(target)
    with pytest.raises(RuntimeError, match=VMAP):
        transform(lambda x: loss(x, *rest), query)  # type: ignore[operator]


def test_vmap_over_something_else(target: Target) -> None:
    inputs, loss = tensors(target), loss_on(target)
    got = torch.vmap(lambda x: x + loss(*inputs))(torch.zeros(2, device=target.device))
    torch.testing.assert_close(got, loss(*inputs).expand(2))


def test_double_backward_is_refused(target: Target) -> None:
    query, *rest = tensors(target)
    loss = loss_on(target)
    first = torch.func.grad(loss)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.func.grad(lambda x: first(x, *rest).sum())(query)


def test_vectorized_jacobian(target: Target) -> None:
    """It batches the gradients of outputs, in an older way than torch.vmap."""
    query, key, value = (t[:1, :3].float() for t in tensors(target)[:3])
    if torch.float32 not in target.dtypes:
        query, key, value = (t.half() for t in (query, key, value))
    got = torch.autograd.functional.jacobian(
        lambda x: flash_dmattn_func(x, key, value, backend=target.backend), query, vectorize=True
    )
    want = torch.autograd.functional.jacobian(
        lambda x: attention_reference(x, key, value)[0], query
    )
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
