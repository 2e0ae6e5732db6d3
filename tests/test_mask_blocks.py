# SPDX-License-Identifier: BSD-3-Clause
"""Masks of blocks: calls with BlockMasks and with blocks of several queries, and their plans."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import block_masks, explain, flash_dmattn_func, interface, make_plan, ops
from flash_dmattn.backends import select_backend, torch_memory
from flash_dmattn.backends.pack import PackBackend
from flash_dmattn.plan import plan_of_blocks
from flash_dmattn.record import AttentionInputs, MaskBlocks
from support import Target, assert_accurate, cotangent, randn, simple_problem

flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")

QUERIES, KEYS = 200, 280
SIZES = [(64, 64), (128, 128), (256, 256), (128, 32), (32, 16), (48, 56), (100, 128), (400, 400)]


def mixed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Keep whole squares, dotted ones, and none for some queries."""
    square = (i // 64 + j // 64 + b + h) % 4
    return ((square == 0) | ((square == 1) & ((i + j) % 3 == 0))) & (i % 37 != 5)


def squares(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Keep whole squares, so every block of 128 is full or empty."""
    return (i // 128 + j // 128) % 2 == 0


def sparse(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Keep nothing for the queries of all tiles but the first."""
    return (i < 40) & (i % 2 == 0)


def block_mask_of(
    function: Callable[..., Tensor],
    size: tuple[int, int],
    target: Target,
    *,
    front: tuple[int | None, int | None] = (None, None),
    sizes: tuple[int, int] = (QUERIES, KEYS),
) -> tuple[Any, Tensor]:
    """Return a BlockMask and its boolean form on the CPU."""
    given = flex_attention.create_block_mask(
        function, *front, *sizes, device=target.device, BLOCK_SIZE=size
    )
    return given, flex_attention.create_mask(function, *front, *sizes, device="cpu")


def plans_blocks(target: Target) -> bool:
    x = torch.ones(1, 2, 1, 8, dtype=target.dtypes[0], device=target.device)
    return ops.plans_blocks(x, x, target.backend)


@pytest.fixture
def without_booleans(pack_target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Return a target that plans blocks, where nothing may make booleans of them."""
    if not plans_blocks(pack_target):
        pytest.skip("its pack makes no plans of blocks")

    def fail(_: MaskBlocks) -> Tensor:
        raise AssertionError("a call made a Q x K mask")

    monkeypatch.setattr(MaskBlocks, "to_bool", fail)
    return pack_target


def given_gradients(problem: Any) -> dict[str, Tensor]:
    batch, queries, heads, _ = problem.query.shape
    dout = cotangent(randn(*problem.out_shape, seed=7)).to(problem.query.dtype)
    return {"dout": dout, "dlse": randn(batch, heads, queries, seed=8)}


def compare(given: Any, mask: Tensor, target: Target, problem: Any, **options: Any) -> None:
    """Compare a call with float64 attention under a mask."""
    cotangents = given_gradients(problem)
    got = dataclasses.replace(problem, mask=given).results(target, **cotangents, **options)
    masked = dataclasses.replace(problem, mask=mask)
    assert_accurate(got, masked.truth(**cotangents), masked.eager(**cotangents))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (128, 128), (48, 56)], ids=str)
def test_block_sizes(size: tuple[int, int], causal: bool, without_booleans: Target) -> None:
    target = without_booleans
    problem = simple_problem(
        target.dtypes[0], queries=QUERIES, keys=KEYS, head_dim=64, causal=causal
    )
    compare(*block_mask_of(mixed, size, target), target, problem)


@pytest.mark.parametrize("function", [squares, sparse])
@pytest.mark.parametrize("causal", [False, True])
def test_full_and_empty_blocks(
    function: Callable[..., Tensor], causal: bool, without_booleans: Target
) -> None:
    target = without_booleans
    sizes = 300, 280  # three tiles, or no key would be kept by separate runs of queries
    problem = simple_problem(
        target.dtypes[0], queries=sizes[0], keys=sizes[1], head_dim=64, causal=causal, softcap=3.0
    )
    given, mask = block_mask_of(function, (128, 128), target, sizes=sizes)
    states = (t.to(target.device) for t in (problem.query, problem.key))
    assert isinstance(block_masks.plain_mask(given, *states, as_blocks=True), MaskBlocks)
    compare(given, mask, target, problem)


@pytest.mark.parametrize("front", [(2, None), (None, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_batches_and_heads(
    front: tuple[int | None, int | None], deterministic: bool, without_booleans: Target
) -> None:
    target = without_booleans
    problem = simple_problem(target.dtypes[0], queries=130, keys=290, head_dim=64, causal=True)
    problem.bias = randn(2, 2, 1, 290, dtype=target.dtypes[0])
    given, mask = block_mask_of(mixed, (64, 128), target, front=front, sizes=(130, 290))
    compare(given, mask, target, problem, deterministic=deterministic)


@pytest.mark.parametrize(
    ("size", "heads"), [((64, 64), 2), ((128, 128), 1), ((40, 24), 4), ((2, 16), 2)], ids=str
)
def test_listed_blocks(size: tuple[int, int], heads: int, without_booleans: Target) -> None:
    target = without_booleans
    generator = torch.Generator().manual_seed(heads)
    rows, columns = -(-QUERIES // size[0]), -(-KEYS // size[1])
    shape = (2, heads, rows, 2)
    blocks = torch.randint(-1, columns + 1, shape, generator=generator, dtype=torch.int32)
    kept = torch.zeros(2, heads, rows, columns + 2, dtype=torch.bool)
    kept = kept.scatter(-1, blocks.long() + 1, True)[..., 1:-1]
    mask = kept.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)
    mask = mask[:, :, :QUERIES, :KEYS]
    problem = simple_problem(target.dtypes[0], queries=QUERIES, keys=KEYS, head_dim=64, causal=True)
    options = {"block_indices": blocks.to(target.device), "block_size": size}
    compare(None, mask, target, problem, **options)


def test_more_results(without_booleans: Target) -> None:
    target = without_booleans
    problem = simple_problem(target.dtypes[0], queries=QUERIES, keys=KEYS, head_dim=64)
    states = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    given, mask = block_mask_of(mixed, (64, 64), target, front=(None, 4))
    asked = {"return_key_mass": True, "sink": torch.zeros(4, device=target.device)}
    asked |= {"return_lse": True, "deterministic": True, "backend": target.backend}
    got = flash_dmattn_func(*states, given, **asked)
    want = flash_dmattn_func(*states, mask.to(target.device), **asked)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    compiled = torch.compile(
        lambda query, plan: flash_dmattn_func(query, *states[1:], plan=plan),
        backend="aot_eager",
        fullgraph=True,
    )
    plan = make_plan(*states[:2], given, backend=target.backend)
    with torch.no_grad():
        assert torch.equal(compiled(states[0], plan), flash_dmattn_func(*states, plan=plan))


def test_plans_are_as_those_of_booleans(without_booleans: Target) -> None:
    """The columns of each tile are the same, so the results are equal."""
    target = without_booleans
    sizes = {"batch": 1, "kv_heads": 1, "queries": QUERIES, "keys": KEYS, "head_dim": 64}
    problem = simple_problem(target.dtypes[0], **sizes, causal=True)
    cotangents = given_gradients(problem)
    for size in SIZES:
        given, mask = block_mask_of(mixed, size, target, front=(None, 2))
        results = [
            dataclasses.replace(problem, mask=m).results(target, **cotangents, deterministic=True)
            for m in (given, mask)
        ]
        for name, found in results[0].items():
            assert torch.equal(found, results[1][name]), (size, name)


@pytest.mark.parametrize("causal", [False, True])
def test_plans_stay_in_their_memory(causal: bool, without_booleans: Target) -> None:
    """The bound of a plan's size holds for blocks that cut tiles and granules in any way."""
    target = without_booleans
    backend = select_backend(torch.device(target.device), target.backend)
    assert isinstance(backend, PackBackend)
    x = torch.zeros(1, QUERIES, 2, 16, dtype=target.dtypes[0], device=target.device)
    y = torch.zeros(1, KEYS, 2, 16, dtype=target.dtypes[0], device=target.device)
    for size in [*SIZES, (7, 5), (1, 33), (129, 31), (130, 64), (64, 300), (300, 2)]:
        for function in (mixed, squares, sparse):
            given, _ = block_mask_of(function, size, target, front=(None, 2))
            blocks = block_masks.plain_mask(given, x, y, as_tensor=True, as_blocks=True)
            assert isinstance(blocks, MaskBlocks)
            inputs = AttentionInputs(x, y, y, causal=causal)
            problem = torch_memory._problem(backend.pack, 1, inputs)
            tensors = map(torch_memory.to_core, (blocks.numbers, blocks.contents))
            problem.take_blocks(*tensors, blocks.kept, blocks.partial)
            room = problem.plan_bytes
            plan = torch.full((room + (1 << 16),), 0xA5, dtype=torch.uint8, device=target.device)
            problem.plan(torch_memory.to_core(plan), None)
            assert (plan[room:] == 0xA5).all(), (size, function)


def sparse_blocks(length: int, size: int, per_row: int, *, partial: bool) -> MaskBlocks:
    """Return blocks beside the diagonal."""
    rows = -(-length // size)
    numbers = torch.full((1, 1, rows, rows), -1, dtype=torch.int32)
    for row in range(rows):
        for column in range(max(0, row - per_row + 1), row + 1):
            numbers[0, 0, row, column] = 0
    kept = int((numbers == 0).sum())
    if partial:
        numbers[numbers == 0] = torch.arange(1, kept + 1, dtype=torch.int32)
    contents = torch.ones(kept if partial else 0, size, size, dtype=torch.bool)
    contents[:, ::3] = False
    return MaskBlocks(numbers, contents, length, length, kept, kept if partial else 0)


@pytest.mark.parametrize("partial", [False, True])
def test_plans_take_memory_of_kept_blocks(partial: bool, without_booleans: Target) -> None:
    if without_booleans.device != "cpu":
        pytest.skip("the blocks are on the CPU")
    dtype = without_booleans.dtypes[0]
    sizes = {}
    for length, per_row in [(8192, 1), (8192, 2), (16384, 1)]:
        x = torch.zeros(1, length, 1, 8, dtype=dtype)
        blocks = sparse_blocks(length, 128, per_row, partial=partial)
        plan = plan_of_blocks(blocks, x, x, False, without_booleans.backend)
        # 4 bytes for each tile and 32 keys; columns, words and counts of a tile's kept blocks.
        tiles = length // 128
        of_blocks = blocks.kept * (128 * 4 + (128 * 16 if partial else 0)) + tiles * 1024
        assert plan.columns.numel() <= tiles * length // 8 + of_blocks + 4096
        sizes[length, per_row] = plan.columns.numel() - tiles * length // 8
    assert sizes[16384, 1] <= 2 * sizes[8192, 1]
    assert sizes[8192, 2] <= 2 * sizes[8192, 1]
    assert max(sizes.values()) < 16384 * 16384 // 100


def test_plans_with_their_booleans(pack_target: Target) -> None:
    """Calls that read the elements of a mask have booleans, made once."""
    target = pack_target
    problem = simple_problem(target.dtypes[0], queries=130, keys=140, head_dim=64)
    states = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    given, mask = block_mask_of(mixed, (64, 64), target, front=(2, 4), sizes=(130, 140))
    mask = mask.to(target.device)
    plan = make_plan(*states[:2], given, backend=target.backend)
    assert isinstance(plan._mask, MaskBlocks) == plans_blocks(target)
    bias = randn(1, 1, 130, 140, dtype=target.dtypes[0]).to(target.device)
    for options in ({"attn_bias": bias}, {"return_attn_probs": True}):
        want = flash_dmattn_func(*states, mask, **options, backend=target.backend)
        for named in ({"plan": plan}, {"attn_mask": given, "backend": target.backend}):
            got = flash_dmattn_func(*states, **named, **options)
            torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    kept = plan.attn_mask
    assert kept is plan.attn_mask
    plan.attn_mask = kept  # replaces nothing
    flash_dmattn_func(*states, kept, plan=plan)
    assert torch.equal(plan.attn_mask, mask)
    want = flash_dmattn_func(*states, plan=plan)
    for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert torch.equal(flash_dmattn_func(*states, plan=copied), want)
    with pytest.raises(ValueError, match="attn_mask must be None or the very mask"):
        flash_dmattn_func(*states, mask, plan=plan)
    plan.attn_mask[0, 0, 0, 0] ^= True
    with pytest.raises(ValueError, match="attn_mask was changed in place"):
        flash_dmattn_func(*states, plan=plan)
    plan = make_plan(*states[:2], given, backend=target.backend)
    plan.attn_mask = mask
    with pytest.raises(ValueError, match="attn_mask was replaced"):
        flash_dmattn_func(*states, plan=plan)


def test_explanations(without_booleans: Target) -> None:
    target = without_booleans
    problem = simple_problem(target.dtypes[0], queries=130, keys=140, head_dim=64)
    states = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    given, _ = block_mask_of(mixed, (64, 64), target, sizes=(130, 140))
    blocks = torch.zeros(2, 1, 3, 1, dtype=torch.int32, device=target.device)
    for named in (
        {"attn_mask": given},
        {"plan": make_plan(*states[:2], given)},
        {"block_indices": blocks, "block_size": (64, 64)},
    ):
        told = explain(*states, **named)
        assert told.plan is not None
        assert told.plan["kernel"] == "blocks"
        assert "attn_mask has a row" not in str(told)


def test_calls_that_read_pairs() -> None:
    bias = torch.zeros(1, 1, 4, 4)
    assert interface._reads_pairs(bias, None)
    assert interface._reads_pairs(None, True)
    assert not interface._reads_pairs(bias[:, :, :1], False)
    assert not interface._reads_pairs(bias[0, 0], None)


def _mixed_plan(target: Target) -> tuple[tuple[Tensor, Tensor, Tensor], Any, Tensor, Tensor]:
    """Return dense tensors, a plan with partial blocks, a bias per query, and the output."""
    if not plans_blocks(target):
        pytest.skip("its pack makes no plans of blocks")
    tensors = tuple(
        randn(1, rows, 2, 64, seed=n).to(target.device, torch.bfloat16)
        for n, rows in enumerate((QUERIES, KEYS, KEYS))
    )
    given, kept = block_mask_of(mixed, (64, 64), target)
    plan = make_plan(*tensors[:2], given, backend=target.backend)
    bias = randn(1, 2, QUERIES, KEYS, seed=4).to(target.device)
    want = flash_dmattn_func(*tensors, kept.to(target.device), bias, backend=target.backend)
    return tensors, plan, bias, want


def test_explanations_of_calls_that_read_pairs(pack_target: Target) -> None:
    """A recorded call must not store the booleans that it does not compute."""
    tensors, plan, bias, want = _mixed_plan(pack_target)
    explain(*tensors, plan=plan, attn_bias=bias)
    explain(*tensors, plan=plan, return_attn_probs=True)
    out = flash_dmattn_func(*tensors, attn_bias=bias, plan=plan)
    torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)  # by another kernel


def test_transformed_calls_leave_the_plan_as_it_is(pack_target: Target) -> None:
    tensors, plan, bias, want = _mixed_plan(pack_target)

    def total(query: Tensor) -> Tensor:
        return flash_dmattn_func(query, *tensors[1:], attn_bias=bias, plan=plan).float().sum()

    torch.func.grad(total)(tensors[0])
    out = flash_dmattn_func(*tensors, attn_bias=bias, plan=plan)
    torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)  # by another kernel
    assert plan.attn_mask is plan.attn_mask


def test_refused_calls_make_no_booleans(pack_target: Target) -> None:
    tensors, plan, bias, _ = _mixed_plan(pack_target)
    with pytest.raises(ValueError, match="attn_bias"):
        flash_dmattn_func(*tensors, attn_bias=bias[..., :7], plan=plan)
    assert plan._booleans is None


def test_arguments_are_checked_before_blocks(pack_target: Target) -> None:
    given, _ = block_mask_of(mixed, (64, 64), pack_target)
    query = randn(1, QUERIES, 2, 64).to(pack_target.device)
    with pytest.raises(TypeError, match="key must be"):
        make_plan(query, None, given, backend=pack_target.backend)
    ends = torch.tensor([0, QUERIES], dtype=torch.int32, device=pack_target.device)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    with pytest.raises((TypeError, ValueError)):
        make_plan(query, query, given, backend=pack_target.backend, **packed)


def test_more_than_the_most_keys(pack_target: Target) -> None:
    """They are refused before anything reads them."""
    if not plans_blocks(pack_target):
        pytest.skip("its pack makes no plans of blocks")
    options = {"dtype": torch.bfloat16, "device": pack_target.device}
    query, row = torch.zeros(1, 2, 1, 8, **options), torch.zeros(1, 1, 1, 8, **options)
    keys = 2**31 - 1
    block = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=pack_target.device)
    with pytest.raises(NotImplementedError, match=f"has {keys} keys"):
        flash_dmattn_func(
            query,
            *2 * (row.expand(-1, keys, -1, -1),),
            block_indices=block,
            block_size=(2, keys),
            backend=pack_target.backend,
        )
