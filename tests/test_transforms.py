# SPDX-License-Identifier: BSD-3-Clause
"""torch.func and forward-mode differentiation: right or refused, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from flash_dmattn import (
    IntervalMask,
    attention_reference,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
)
from support import Target, randn

FORWARD_MODE = "does not support forward-mode differentiation.*pass backend='reference'"
VMAP = "does not support torch.vmap.*batch dimension, or pass backend='reference'"
TWICE = "double backward is not supported.*pass backend='reference'"


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
    alone = torch.func.grad(loss, 3)(*inputs)
    if target.backend == "reference":  # torch.func differentiates its formula
        torch.testing.assert_close(alone, want[3])
    else:
        assert torch.equal(alone, want[3])


def test_func_grad_and_autograd_together(kernel_target: Target) -> None:
    """Each differentiates with respect to its own tensors."""
    query, key, value, bias = tensors(kernel_target)
    loss = loss_on(kernel_target)
    leaf = value.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=TWICE):
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
def test_forward_mode_is_refused(transform: object, argument: int, kernel_target: Target) -> None:
    torch._dynamo.reset()
    inputs, loss = list(tensors(kernel_target)), loss_on(kernel_target)

    def of_one(x: Tensor) -> Tensor:
        return loss(*inputs[:argument], x, *inputs[argument + 1 :])

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        transform(of_one, inputs[argument])  # type: ignore[operator]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors_are_refused(requires_grad: bool, kernel_target: Target) -> None:
    query, *rest = tensors(kernel_target)
    query.requires_grad_(requires_grad)
    with forward_ad.dual_level():
        loss_on(kernel_target)(query, *rest)  # no tangent, so none is lost
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(RuntimeError, match=FORWARD_MODE):
            loss_on(kernel_target)(dual, *rest)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.vmap(f)(torch.stack([x, x])),
        lambda f, x: torch.vmap(torch.func.grad(f))(torch.stack([x, x])),
        lambda f, x: torch.func.jacrev(lambda y: f(y) * torch.ones(2, device=y.device))(x),
    ],
    ids=["vmap", "gradients for each sample", "jacrev"],
)
def test_vmap_is_refused(transform: object, kernel_target: Target) -> None:
    query, *rest = tensors(kernel_target)
    loss = loss_on(kernel_target)
    with pytest.raises(RuntimeError, match=VMAP):
        transform(lambda x: loss(x, *rest), query)  # type: ignore[operator]


def test_vmap_over_something_else(target: Target) -> None:
    inputs, loss = tensors(target), loss_on(target)
    got = torch.vmap(lambda x: x + loss(*inputs))(torch.zeros(2, device=target.device))
    torch.testing.assert_close(got, loss(*inputs).expand(2))


def test_double_backward_is_refused(kernel_target: Target) -> None:
    query, *rest = tensors(kernel_target)
    loss = loss_on(kernel_target)
    first = torch.func.grad(loss)
    with pytest.raises(RuntimeError, match=TWICE):
        torch.func.grad(lambda x: first(x, *rest).sum())(query)


def test_vectorized_jacobian(target: Target) -> None:
    """It batches the gradients of outputs by an older mechanism than torch.vmap."""
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


ADVICE: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, 2 * x])),
    "gradients for each sample": lambda f, x: torch.vmap(torch.func.grad(f))(
        torch.stack([x, 2 * x])
    ),
    "jacrev": lambda f, x: torch.func.jacrev(lambda y: f(y) * torch.ones(2))(x),
    "double backward": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x))[1],
    "vectorized hessian": lambda f, x: torch.autograd.functional.hessian(f, x, vectorize=True),
    "compiled jvp": lambda f, x: torch.compile(
        lambda: torch.func.jvp(f, (x,), (torch.ones_like(x),)), backend="eager"
    )()[1],
}


@pytest.mark.parametrize("argument", [0, 3], ids=["query", "bias"])
@pytest.mark.parametrize("name", ADVICE)
def test_what_the_errors_advise_works(name: str, argument: int) -> None:
    """backend="reference" gives the results of the written-out formula."""
    torch._dynamo.reset()
    inputs = [t.double() for t in tensors(Target("cpu", "reference"))]
    place = torch.arange(7)[:, None] + 2 - torch.arange(9)
    mask = (place >= 0) & (place <= 4)

    def formula(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        key, value, bias = (t.repeat_interleave(2, 1) for t in (key, value, bias))
        scores = query @ key.transpose(-1, -2) * 8**-0.5 + bias
        scores = scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1) @ value
        return (out**2).sum() + scores.logsumexp(-1).sum()

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        mask = IntervalMask.sliding_window(4, 0, 7, 9)
        out, lse = flash_dmattn_func(
            query, key, value, mask, bias, is_causal=True, return_lse=True, backend="reference"
        )
        return (out**2).sum() + lse.sum()

    def result(loss: Callable[..., Tensor]) -> object:
        def of_one(x: Tensor) -> Tensor:
            return loss(*inputs[:argument], x, *inputs[argument + 1 :])

        return ADVICE[name](of_one, inputs[argument])

    torch.testing.assert_close(result(attention), result(formula))


def test_double_backward_of_one_tensor_in_all_places() -> None:
    x = randn(1, 5, 2, 4).double().requires_grad_()
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert torch.autograd.gradgradcheck(
        lambda x: flash_dmattn_func(x, x, x, softcap=2.0, return_lse=True, backend="reference"), x
    )
    assert torch.autograd.gradgradcheck(
        lambda x: flash_dmattn_varlen_func(
            x[0], x[0], x[0], bounds, bounds, 3, 3, is_causal=True, backend="reference"
        ),
        x,
    )


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("place", [2, 3], ids=["value", "sink"])
def test_gradients_to_differentiate_of_tensors_that_lse_ignores(place: int, listed: bool) -> None:
    shapes = [(1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), (2,)]
    given = [randn(*shape, seed=n).requires_grad_(n == place) for n, shape in enumerate(shapes)]
    lists = torch.arange(5, dtype=torch.int32).expand(1, 1, 4, 5) if listed else None

    query, key, value, sink = given
    out, lse = flash_dmattn_func(
        query, key, value, sink=sink, return_lse=True, backend="reference", key_indices=lists
    )
    loss = out.square().sum()
    (want,) = torch.autograd.grad(loss, given[place], create_graph=True)
    (found,) = torch.autograd.grad(loss + lse.sum(), given[place], create_graph=True)
    torch.testing.assert_close(found, want)
    (want,) = torch.autograd.grad(want.sum(), given[place], retain_graph=True)
    (found,) = torch.autograd.grad(found.sum(), given[place])
    torch.testing.assert_close(found, want)


def test_gradients_to_differentiate_of_no_sequences() -> None:
    x = randn(0, 2, 8).requires_grad_()
    bounds = torch.zeros(1, dtype=torch.int32)
    out = flash_dmattn_varlen_func(x, x, x, bounds, bounds, 0, 0, backend="reference")
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert gradient.shape == x.shape
