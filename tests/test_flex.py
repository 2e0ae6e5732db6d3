# SPDX-License-Identifier: BSD-3-Clause
"""The internals of the flex backend: its blocks, and its compiled GPU code on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drawn.problems import draw
from drawn.source import truth_of
from flash_dmattn import IntervalMask, backends, flash_dmattn_func
from flash_dmattn.backends import portable
from flash_dmattn.record import AttentionInputs, SelectionInputs
from support import (
    Problem,
    Target,
    check,
    four_dimensional,
    rand_bool,
    randn,
    simple_problem,
)

unavailable = portable.why_unavailable("flex", "cpu")
pytestmark = pytest.mark.skipif(unavailable is not None, reason=str(unavailable))
if unavailable is None:
    from torch.nn.attention import flex_attention

    from flash_dmattn.backends.flex import backend as flex
    from flash_dmattn.backends.flex import blocks, kernel
    from flash_dmattn.backends.flex.isolation import isolated
    from flash_dmattn.backends.flex.problem import make_problem

BLOCK = 128


def inputs_of(problem: Problem) -> AttentionInputs:
    """Return the backend's inputs; biases and masks must have four dimensions."""
    mask = problem.mask
    intervals = isinstance(mask, IntervalMask)
    return AttentionInputs(
        query=problem.query,
        key=problem.key,
        value=problem.value,
        mask=None if intervals else mask,
        start=mask.start if intervals else None,
        end=mask.end if intervals else None,
        bias=problem.bias,
        scale=0.3,
        causal=problem.causal,
    )


def packed_inputs() -> AttentionInputs:
    """Return three sequences that do not start at block bounds, with a mask for each row."""
    dense = simple_problem(batch=1, queries=400, keys=470)
    query, key, value = (t[0] for t in (dense.query, dense.key, dense.value))
    bounds = ([0, 150, 160, 400], [0, 200, 200, 470])
    return inputs_of(dense)._replace(
        query=query,
        key=key,
        value=value,
        mask=rand_bool(1, 400, 270, density=0.02),
        cu_seqlens_q=torch.tensor(bounds[0], dtype=torch.int32),
        cu_seqlens_k=torch.tensor(bounds[1], dtype=torch.int32),
        max_seqlen_q=240,
        max_seqlen_k=270,
        causal=True,
    )


def check_blocks(inputs: AttentionInputs) -> None:
    """Compare the lists with the mask function at every row and key."""
    problem = make_problem(inputs)
    call = kernel.make_call(problem, blocks.make_blocks(problem), 0.3, 0.0)
    mask = call.block_mask
    (batch, heads, rows, _), keys = call.query.shape, call.key.shape[2]
    index = (
        torch.arange(size).view(-1, *[1] * (3 - n))
        for n, size in enumerate((batch, heads, rows, keys))
    )
    kept = mask.mask_mod(*index).expand(batch, heads, rows, keys)
    tiles = kept.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    any_kept, all_kept = tiles.any(5).any(3), tiles.all(5).all(3)

    def covered(count: Tensor, numbers: Tensor) -> Tensor:
        listed = torch.arange(numbers.shape[-1]) < count.unsqueeze(-1)
        found = torch.zeros(numbers.shape, dtype=torch.bool)
        return found.scatter(-1, numbers.long(), listed)

    partial = covered(mask.kv_num_blocks, mask.kv_indices)
    full = covered(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    assert not (full & ~all_kept).any()
    assert not (any_kept & ~(partial | full)).any()
    for by_row, count, numbers in (
        (partial, mask.q_num_blocks, mask.q_indices),
        (full, mask.full_q_num_blocks, mask.full_q_indices),
    ):
        assert torch.equal(covered(count, numbers).transpose(-1, -2), by_row)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_blocks_cover_what_is_kept(first: int) -> None:
    for seed in range(first, first + 50):
        call = draw(seed, (torch.float32,), small=True).call
        if call.cu_seqlens_q is not None or call.query.numel() == 0 or call.key.numel() == 0:
            continue
        mask, bias = (
            four_dimensional(tensor) if isinstance(tensor, Tensor) else tensor
            for tensor in (truth_of(call.mask), call.bias)
        )
        check_blocks(inputs_of(Problem(call.query, call.key, call.value, mask, bias, call.causal)))


def test_blocks_of_packed_sequences() -> None:
    check_blocks(packed_inputs())


def test_blocks_that_keep_nothing_are_not_listed() -> None:
    """Listing them costs time but is no error: a window of 128 keys touches at most two blocks."""
    problem = simple_problem(batch=1, queries=1024, keys=1024)
    problem.mask = IntervalMask.sliding_window(127, 0, 1024, 1024)
    made = blocks.make_blocks(make_problem(inputs_of(problem)))
    assert (made.partial | made.full).sum(-1).max() == 2
    problem.mask, problem.causal = None, True
    made = blocks.make_blocks(make_problem(inputs_of(problem)))
    assert made.full.sum() == 8 * 7 // 2
    assert made.partial.sum() == 8


@pytest.fixture
def compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trace and differentiate the code that is compiled for GPUs; count the compilations.

    PyTorch's formula of the operator replaces the last step, the code of kernels.
    """
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        from torch._dynamo.backends.debugging import aot_eager

        compiled.append(1)
        return aot_eager(graph, examples)

    torch._dynamo.reset()
    kernel._compile_for.cache_clear()
    # FlexAttention refuses gradients on a CPU, for which it has no kernels.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None, raising=False)
    monkeypatch.setattr(kernel, "is_fused", lambda device: True)
    monkeypatch.setitem(kernel._COMPILE_OPTIONS, "backend", backend)
    yield compiled
    kernel._compile_for.cache_clear()


def test_what_is_compiled_for_gpus_is_right_for_any_length(compiled_on_a_cpu: list[int]) -> None:
    """The first call's lengths, batch and blocks may be equal while later ones differ."""
    for rows, keys in ((300, 260), (400, 560), (513, 700)):
        problem = simple_problem(batch=3, queries=rows, keys=keys, causal=True, softcap=4.0)
        problem.bias = randn(3, 2, 1, keys)
        problem.mask = rand_bool(1, 4, rows, keys, density=0.4)
        problem.mask[:, :, 5:9] = False
        check(problem, Target("cpu", "flex"))
    # One for out and lse, and one with a backward pass.
    assert len(compiled_on_a_cpu) == 2


def attend(problem: Problem) -> Tensor:
    """Compute the output of a problem without gradients, and compare it with the reference."""
    got, want = (
        flash_dmattn_func(*inputs_of(problem)[:3], problem.mask, problem.bias, backend=name)
        for name in ("flex", "reference")
    )
    torch.testing.assert_close(got, want)
    return got


def test_nothing_is_compiled_anew(compiled_on_a_cpu: list[int]) -> None:
    """After too many recompilations torch.compile would refuse a call.

    A size of 1 needs code of its own: for one block, or for a shared batch or head.
    """
    for rows, keys, heads, batch in ((100, 300, 4, 1), (300, 100, 4, 1), (300, 300, 1, 3)):
        problem = simple_problem(batch=3, queries=rows, keys=keys)
        problem.mask = rand_bool(batch, heads, 1, keys, density=0.4)
        attend(problem)
    assert len(compiled_on_a_cpu) == kernel._compile_for.cache_info().currsize == 3


def test_code_is_for_what_is_attended_and_not_for_how_it_is_stored(
    compiled_on_a_cpu: list[int],
) -> None:
    keys = 60
    for bias in (randn(2, 2, 1, keys), randn(2, 4, 1, keys), randn(2, 4, 1, 3 * keys)[..., ::3]):
        problem = simple_problem(queries=40, keys=keys, bias=bias)
        attend(problem)
        with torch.inference_mode():
            attend(problem)
    # And one for biases of query heads, which get their own keys and values.
    assert len(compiled_on_a_cpu) == 2


def test_compiling_follows_the_options_of_the_caller() -> None:
    with torch._dynamo.config.patch(verbose=True):
        assert isolated(lambda: torch._dynamo.config.verbose, torch.device("cpu"))


def test_what_is_compiled_for_gpus_works_below_autograd(compiled_on_a_cpu: list[int]) -> None:
    """Compiled code calls an operator like this."""
    tensors = [t.requires_grad_() for t in inputs_of(simple_problem())[:3]]

    def attend(*tensors: Tensor) -> Tensor:
        return flash_dmattn_func(*tensors, is_causal=True, backend="flex")

    want = torch.autograd.grad(attend(*tensors).sum(), tensors)
    whole = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(whole(*tensors).sum(), tensors)
    assert len(compiled_on_a_cpu) == 2
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_selection_is_that_of_the_pack() -> None:
    bias = randn(2, 3, 1, 200)
    made = [
        backends.select_backend(bias.device, name).select_intervals(
            SelectionInputs(bias, None, None, None, 2, 3, 3, 200, 200, 9, True)
        )
        for name in ("flex", "cpu")
    ]
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runs on cuda and cpu tensors, but query is on xpu" in str(flex.why_unavailable("xpu"))
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    reason = str(flex.why_unavailable(None))
    assert "torch 2.6 or newer, and this is torch 2.4.1+cpu; pip install 'torch>=2.6'" in reason
    monkeypatch.undo()
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: None)
    assert "torch.compile needs Triton on a GPU" in str(flex.why_unavailable("cuda"))
    assert flex.why_unavailable("cpu") is None
