# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of scores that cancel, in float32: over keys, over rows, and in a row of one key.

The score gradients of a row sum to the gradient of its lse. A parameter that moves many biases gets
such sums. Rounding that does not cancel would dominate them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_dmattn import _core
from flash_dmattn.backends.torch_memory import to_core
from flash_dmattn.loader import pack_for
from support import Problem, Target, randn

SEEDS = 12


def bias_gradients(problem: Problem, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bias gradient of the backend, of float64, and of plain PyTorch."""
    dout = randn(*problem.query.shape, seed=9) * problem.query.shape[-1] ** -0.5
    got, truth = problem.results(target, dout=dout), problem.truth(dout=dout)
    eager = problem.eager(dout=dout)
    return got["dbias"].double(), truth["dbias"], eager["dbias"].double()


def root_mean_square(errors: list[Tensor]) -> float:
    return torch.cat([error.flatten() for error in errors]).square().mean().sqrt().item()


def make_problem(seed: int, bias: Tensor, keys: int) -> Problem:
    # Means differ from 0, as in activations: the part that all keys share must cancel.
    query, key, value = (
        randn(1, keys, heads, 32, seed=3 * seed + n) + offset
        for n, (heads, offset) in enumerate([(4, 0.0), (2, 0.5), (2, 0.5)])
    )
    return Problem(query, key, value, bias=bias, causal=True)


@pytest.mark.parametrize("keys", [17, 300])
@pytest.mark.parametrize("shape", ["key", "query", "one"])
def test_sums_of_a_bias_gradient(shape: str, keys: int, target: Target) -> None:
    if torch.float32 not in target.dtypes or target.backend == "triton":
        pytest.skip("for what is meant to be as exact as plain PyTorch in float32")
    sizes = {"key": (1, 2, 1, keys), "query": (1, 4, keys, keys), "one": (1, 1, 1, 1)}[shape]
    names = ("each", "row", "weighted")
    errors: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in names}
    for seed in range(SEEDS):
        problem = make_problem(seed, randn(*sizes, seed=seed + 100), keys)
        weight = randn(*sizes, seed=seed + 200).abs().double()
        got, truth, eager = bias_gradients(problem, target)
        for result, place in ((got, 0), (eager, 1)):
            error = result - truth
            errors["each"][place].append(error)
            errors["row"][place].append(error.sum(-1))
            errors["weighted"][place].append((error * weight).sum().reshape(1))
    for name, (ours, plain) in errors.items():
        # One number for each seed makes both RMS values random, so the bound is wider.
        bound = 2.0 if len(torch.cat([e.flatten() for e in ours])) > SEEDS else 3.0
        assert root_mean_square(ours) <= bound * root_mean_square(plain), name


@pytest.mark.parametrize("keys", [17, 300])
def test_a_row_of_one_key_has_no_gradient_of_scores(keys: int, target: Target) -> None:
    """p is 1 there, and dp - delta is exactly 0, without the rounding of either."""
    if torch.float32 not in target.dtypes or target.backend == "triton":
        pytest.skip("for what is meant to be as exact as plain PyTorch in float32")
    bias = torch.zeros(1, 2, 1, keys)
    bias[..., keys // 3] = 1000.0
    problem = make_problem(0, bias, keys)
    problem.causal = False
    got, truth, _ = bias_gradients(problem, target)
    assert not truth.any()
    assert not got.any()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_cpu_pack_sums_a_bias_of_keys_over_the_batch_in_float64(
    heads: int, threads: int
) -> None:
    """All terms have one sign; float32 sums of so many would lose digits that short sums have."""
    target = Target("cpu", "cpu")
    if target.has_kernels_of_gpu:
        pytest.skip("the kernels of GPUs sum in float32")
    query, key, value = (0.2 * randn(4096, 4, 2, 8, seed=seed) + 0.3 for seed in range(3))
    value[:, 0] += 2.0
    problem = Problem(query, key, value, bias=torch.zeros(1, heads, 1, 4))
    dout = torch.ones_like(query)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = problem.results(target, dout=dout)["dbias"]
    finally:
        torch.set_num_threads(before)
    truth = problem.truth(dout=dout)["dbias"]
    assert (got - truth).abs().max() <= 4 * 2**-24 * truth.abs().max()


def test_bounds_that_change_after_they_were_checked(pack_target: Target) -> None:
    """Selection writes only inside of its results for any cu_seqlens: a GPU's are not checked."""
    device, keys, guard = pack_target.device, 24, 64
    for bounds in ([0, -5, 24], [0, 99, 24], [7, 3, 24], [2**30, -(2**30), 2**31 - 1], [0, 3, 900]):
        for rows in (1, keys):
            cu_seqlens = torch.tensor([0, 12, keys], dtype=torch.int32, device=device)
            shape = (1, 2, 1, keys) if rows == 1 else (1, 2, keys, 12)
            bias = randn(*shape[1:]).to(device, pack_target.dtypes[-1])
            selection = _core.Selection(
                pack_for(device),
                to_core(bias),
                cu_seqlens_q=to_core(cu_seqlens),
                cu_seqlens_k=to_core(cu_seqlens),
                batch=2,
                heads=2,
                kv_heads=2,
                queries=12,
                keys=12,
                window=3,
                causal=True,
            )
            cu_seqlens.copy_(torch.tensor(bounds, dtype=torch.int32))
            size = bias.numel()
            dtype = torch.int32 if rows == 1 else torch.bool
            buffers = [
                torch.full((size + 2 * guard,), 1, dtype=dtype, device=device) for _ in range(2)
            ]
            views = [buffer[guard : guard + size].view(bias.shape) for buffer in buffers]
            workspace = torch.empty(selection.workspace_bytes, dtype=torch.uint8, device=device)
            if rows == 1:
                views = [view.squeeze(1) for view in views]
                selection.intervals(*map(to_core, (*views, workspace)))
            else:
                selection.keep(to_core(views[0]), to_core(workspace))
            for buffer in buffers:
                assert (buffer[:guard] == 1).all()
                assert (buffer[guard + size :] == 1).all()
