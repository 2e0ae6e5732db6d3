# SPDX-License-Identifier: BSD-3-Clause
"""Lists of key blocks for queries, and masks of FlexAttention."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import (
    IntervalMask,
    arguments,
    block_masks,
    explain,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
)
from flash_dmattn.backends.pack import PackBackend
from good_arguments import dense, on_device, varlen
from support import (
    LargestStorage,
    Problem,
    Target,
    assert_accurate,
    cotangent,
    randn,
    simple_problem,
)

flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")

QUERIES, KEYS = 17, 23


def drawn_blocks(*front: int, count: int, seed: int = 0) -> Tensor:
    """Return lists with repeated blocks, and numbers from below the first to beyond the last."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-2, count + 2, front, dtype=torch.int32, generator=generator)
    far = torch.rand(front, generator=generator)
    blocks[far < 0.05] = 2**31 - 1
    blocks[far > 0.95] = -(2**31)
    return blocks


def kept_by(blocks: Tensor, size: tuple[int, int], queries: int, keys: int) -> Tensor:
    """Return the mask ``(B, h, queries, keys)`` of blocks, one block at a time."""
    batch, heads = blocks.shape[:2]
    kept = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b, h, row, listed in [
        (b, h, row, blocks[b, h, row].tolist())
        for b in range(batch)
        for h in range(heads)
        for row in range(blocks.shape[2])
    ]:
        for block in listed:
            if 0 <= block * size[1] < keys:
                rows = slice(row * size[0], (row + 1) * size[0])
                kept[b, h, rows, block * size[1] : (block + 1) * size[1]] = True
    return kept


def compare(problem: Problem, mask: Tensor, target: Target, **options: Any) -> None:
    """Compare a call with float64 attention under a mask."""
    shape = problem.query.shape
    dout = cotangent(randn(*problem.out_shape, seed=7)).to(problem.query.dtype)
    dlse = randn(shape[0], shape[2], shape[1], seed=8)
    given = {"dout": dout, "dlse": dlse}
    masked = dataclasses.replace(problem, mask=mask)
    got = problem.results(target, **given, **options)
    assert_accurate(got, masked.truth(**given), masked.eager(**given))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("size", [(1, 4), (1, 1), (4, 8), (3, 5), (32, 32)], ids=str)
def test_blocks(target: Target, size: tuple[int, int], heads: int) -> None:
    rows, count = -(-QUERIES // size[0]), -(-KEYS // size[1])
    blocks = drawn_blocks(2, heads, rows, 3, count=count, seed=heads)
    mask = kept_by(blocks, size, QUERIES, KEYS)
    for causal in (False, True):
        problem = simple_problem(target.dtypes[0], causal=causal, value_dim=8, softcap=3.0)
        problem.bias = randn(2, 2, 1, KEYS, dtype=target.dtypes[0])
        compare(problem, mask, target, block_indices=blocks.to(target.device), block_size=size)


def test_blocks_and_a_bias_of_each_query(target: Target) -> None:
    blocks = drawn_blocks(2, 1, QUERIES, 2, count=6)
    problem = simple_problem(target.dtypes[0], bias=randn(1, 4, QUERIES, KEYS))
    problem.bias = problem.bias.to(target.dtypes[0])
    mask = kept_by(blocks, (1, 4), QUERIES, KEYS)
    compare(problem, mask, target, block_indices=blocks.to(target.device), block_size=(1, 4))


def test_more_results_of_blocks(target: Target) -> None:
    problem = simple_problem(target.dtypes[0])
    states = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    for size in ((1, 4), (4, 4)):
        blocks = drawn_blocks(2, 2, -(-QUERIES // size[0]), 3, count=6)
        mask = kept_by(blocks, size, QUERIES, KEYS).to(target.device)
        named = {"block_indices": blocks.to(target.device), "block_size": size}
        asked = {"return_key_mass": True, "sink": torch.zeros(4, device=target.device)}
        asked |= {"return_lse": True, "backend": target.backend}
        got = flash_dmattn_func(*states, **named, **asked)
        want = flash_dmattn_func(*states, mask, **asked)
        probabilities = flash_dmattn_func(
            *states, **named, return_attn_probs=True, backend=target.backend
        )[2]
        assert not probabilities[~mask.repeat_interleave(2, 1)].any()
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


def test_packed_blocks(target: Target) -> None:
    arguments = on_device(target, varlen(target))
    blocks = drawn_blocks(2, 10, 2, count=4)
    given = {"block_indices": blocks.to(target.device), "block_size": (1, 2), "is_causal": True}
    got = flash_dmattn_varlen_func(**arguments, **given)
    for begin, end in ((0, 4), (4, 10)):
        own = {n: arguments[n][begin:end][None] for n in ("query", "key", "value")}
        mask = kept_by(blocks[None, :, begin:end], (1, 2), end - begin, end - begin)
        want = flash_dmattn_func(
            **own, attn_mask=mask.to(target.device), is_causal=True, backend=target.backend
        )
        torch.testing.assert_close(got[begin:end], want[0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("longest", [5, 6, 10])  # there are 10 keys in all
def test_blocks_of_the_only_packed_query(target: Target, longest: int) -> None:
    arguments = on_device(target, varlen(target))
    arguments["query"] = arguments["query"][:1]
    bounds = torch.tensor([[0, 0, 1, 1], [0, 3, 8, 10]], dtype=torch.int32, device=target.device)
    arguments |= {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1], "max_seqlen_k": longest}
    own = {n: arguments[n][None] for n in ("query", "key", "value")}
    blocks = torch.tensor([[[1, 0]], [[7, 1]], [[-1, 0]], [[2, 2]]], dtype=torch.int32)
    for heads in (1, 2, 4):
        mask = kept_by(blocks[None, :heads], (1, 2), 1, 5)
        whole = torch.nn.functional.pad(mask, (3, 2)).to(target.device)
        want = flash_dmattn_func(**own, attn_mask=whole, backend=target.backend)
        arguments["block_indices"] = blocks[:heads].to(target.device)
        for asked in (False, True):
            got = flash_dmattn_varlen_func(**arguments, block_size=(1, 2), return_attn_probs=asked)
            out = got[0] if asked else got
            torch.testing.assert_close(out, want[0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_no_block_lists_reaches_nothing(deterministic: bool, target: Target) -> None:
    problem = simple_problem(target.dtypes[0])
    for size in ((1, 4), (4, 4)):
        blocks = torch.tensor([0, 3, -1], dtype=torch.int32, device=target.device)
        blocks = blocks.expand(2, 1, -(-QUERIES // size[0]), 3)
        results = []
        for poison in (0.0, torch.nan):
            leaves = problem.leaves(target.device, None)
            for name in ("key", "value"):
                leaves[name].data[:, 4:12] = poison
                leaves[name].data[:, 16:] = poison
            out = flash_dmattn_func(
                **leaves,
                block_indices=blocks,
                block_size=size,
                deterministic=deterministic,
                backend=target.backend,
            )
            gradients = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
            results.append([out, *gradients])
        for clean, poisoned in zip(*results, strict=True):
            # Sums in any order differ by rounding.
            tolerance = 0.0 if deterministic else 1e-2
            torch.testing.assert_close(poisoned, clean, atol=tolerance, rtol=tolerance)


def test_blocks_of_one_query_are_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    forward = PackBackend.list_forward

    def noted(self: PackBackend, inputs: Any, out_rest: Any) -> Any:
        lengths.append(inputs.indices.shape[-1])
        return forward(self, inputs, out_rest)

    monkeypatch.setattr(PackBackend, "list_forward", noted)
    problem = simple_problem()
    blocks = drawn_blocks(2, 1, QUERIES, 3, count=6)
    flash_dmattn_func(
        problem.query, problem.key, problem.value, block_indices=blocks, block_size=(1, 4)
    )
    assert lengths == [12]


@pytest.mark.parametrize("size", [(1, 4), (4, 4)], ids=str)
def test_blocks_are_compiled_exported_and_explained(size: tuple[int, int], tmp_path: Path) -> None:
    torch.compiler.reset()
    problem = simple_problem()
    blocks = drawn_blocks(2, 1, -(-QUERIES // size[0]), 3, count=6)

    class Model(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor) -> Any:
            return flash_dmattn_func(
                query, key, value, block_indices=blocks, block_size=size, is_causal=True
            )

    given = problem.query, problem.key, problem.value, blocks
    want = Model()(*given)
    for dynamic in (False, True):
        compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager", dynamic=dynamic)
        torch.testing.assert_close(compiled(*given), want)
    torch.export.save(torch.export.export(Model(), given), tmp_path / "model.pt2")
    got = torch.export.load(tmp_path / "model.pt2").module()(*given)
    assert torch.equal(got, want)
    told = explain(*given[:3], block_indices=blocks, block_size=size)
    assert told.backend == "cpu"
    assert told.forward is not None
    assert (told.forward["kernel"] == "list_forward of cpu") == (size[0] == 1)


def test_opcheck_of_blocks() -> None:
    blocks = drawn_blocks(2, 1, 5, 3, count=6)
    operators = torch.ops.flash_dmattn
    torch.library.opcheck(operators.block_keys.default, (blocks, 4, 23))
    torch.library.opcheck(operators.block_keep.default, (blocks, 4, 4, 17, 23))


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"block_size": None}, ValueError, "block_size must be given too"),
    ({"block_indices": None}, ValueError, "block_indices must be given too"),
    ({"block_size": 4}, TypeError, r"block_size must be \(queries of a block, .*got 4"),
    ({"block_size": (1, 0)}, ValueError, "block_size must be"),
    ({"block_size": (1.0, 4)}, TypeError, "block_size must be"),
    ({"block_size": (2, 4)}, ValueError, r"block_indices must have shape .*3, any k\), got"),
    ({"block_indices": torch.zeros(2, 1, 5, 3)}, TypeError, "block_indices .*int32, got"),
    ({"query": randn(5, 4, 8)}, ValueError, r"query must have shape \(B, rows, heads, D\), got"),
    ({"block_indices": torch.zeros(5, dtype=torch.int32)}, ValueError, r"block_indices must have"),
    ({"block_indices": [1]}, TypeError, "block_indices must be a torch.Tensor"),
    (
        {"block_indices": torch.zeros(2, 3, 5, 3, dtype=torch.int32)},
        ValueError,
        r"\{4\|2\|1\}, 5, any k\), got \(2, 3, 5, 3\)",
    ),
    ({"attn_mask": torch.ones(2, 7) > 0}, ValueError, "cannot be combined with attn_mask"),
    ({"window_size": 3}, ValueError, "cannot be combined with window_size"),
    ({"keep_last": 3}, ValueError, "block_indices cannot be combined with keep_last"),
    ({"keep_first": torch.ones(2)}, TypeError, "keep_first must be an integer, got"),
    ({"return_attn_probs": "yes"}, TypeError, "return_attn_probs must be True, False or None"),
    (
        {"key_indices": torch.zeros(2, 1, 5, 3, dtype=torch.int32)},
        ValueError,
        "cannot be combined with key_indices",
    ),
    ({"index_bias": torch.zeros(2, 1, 5, 3)}, ValueError, "cannot be combined with index_bias"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), REFUSED)
def test_refused_blocks(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = dense(Target("cpu", "cpu"))
    arguments |= {"block_indices": torch.zeros(2, 1, 5, 3, dtype=torch.int32)}
    arguments |= {"block_size": (1, 4), **wrong}
    with pytest.raises(error, match=text):
        flash_dmattn_func(**arguments)


@pytest.mark.parametrize("rows", [1, 2**33])
def test_a_block_of_more_than_there_is_costs_what_there_is(rows: int) -> None:
    """At full size, the block's mask would take 400 GB."""
    given = dense(Target("cpu", "cpu"))
    count = given["query"].shape[1] if rows == 1 else 1
    blocks = torch.tensor([1, 0, -1], dtype=torch.int32).expand(len(given["query"]), 1, count, 3)
    out = flash_dmattn_func(**given, block_indices=blocks, block_size=(rows, 2**33))
    torch.testing.assert_close(out, flash_dmattn_func(**given))


def test_packed_blocks_of_several_queries_are_refused() -> None:
    blocks = torch.zeros(1, 5, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_size must be \(1, keys of a block\).*got 2 quer"):
        flash_dmattn_varlen_func(
            **varlen(Target("cpu", "cpu")), block_indices=blocks, block_size=(2, 2)
        )


# --- FlexAttention's masks

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DOCUMENTS = torch.randint(0, 4, (2, 200), generator=torch.Generator().manual_seed(1)).sort(1).values


def of_documents(device: str) -> Mod:
    ids = DOCUMENTS.to(device)
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)


MODS: dict[str, Callable[[str], Mod]] = {
    "causal": lambda _: lambda b, h, i, j: i >= j,
    "window": lambda _: lambda b, h, i, j: (i >= j) & (i - j < 30),
    "documents": of_documents,
    "nothing": lambda _: lambda b, h, i, j: i < 0,
    "dilated": lambda _: lambda b, h, i, j: (i - j) % 3 == 0,
    "heads": lambda _: lambda b, h, i, j: (i + j + h) % 4 < 2,
}
RUNS = ("causal", "window", "documents", "nothing")


def block_mask_of(
    name: str,
    target: Target,
    *,
    queries: int = 200,
    keys: int = 200,
    size: tuple[int, int] = (64, 32),
) -> tuple[Any, Tensor]:
    """Return a BlockMask and its boolean form."""
    function = MODS[name](target.device)
    heads = 4 if name == "heads" else None
    sizes = (2 if name == "documents" else None, heads, queries, keys)
    mask = flex_attention.create_block_mask(function, *sizes, device=target.device, BLOCK_SIZE=size)
    return mask, flex_attention.create_mask(function, *sizes, device=target.device).cpu()


@pytest.mark.parametrize("name", MODS)
def test_block_masks(target: Target, name: str) -> None:
    problem = simple_problem(target.dtypes[0], queries=200, keys=200)
    given, mask = block_mask_of(name, target)
    shape = problem.query.shape
    cotangents = {
        "dout": cotangent(randn(*shape, seed=7)).to(problem.query.dtype),
        "dlse": randn(2, 4, 200, seed=8),
    }
    masked = dataclasses.replace(problem, mask=mask)
    passed = dataclasses.replace(problem, mask=given)
    got = passed.results(target, **cotangents)
    assert_accurate(got, masked.truth(**cotangents), masked.eager(**cotangents))


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("sizes", [(200, 200), (130, 70)], ids=str)
def test_what_block_masks_become(name: str, sizes: tuple[int, int]) -> None:
    target = Target("cpu", "cpu")
    for size in (16, (64, 32), 128):
        size = (size, size) if isinstance(size, int) else size
        given, mask = block_mask_of(name, target, queries=sizes[0], keys=sizes[1], size=size)
        query, key = randn(2, sizes[0], 4, 8), randn(2, sizes[1], 2, 8)
        found = block_masks.mask_of_blocks(given, query, key)
        assert isinstance(found, IntervalMask) == (name in RUNS)
        as_bool = found.to_bool(sizes[0]) if isinstance(found, IntervalMask) else found
        assert torch.equal(as_bool, mask)
        assert torch.equal(block_masks.mask_of_blocks(given, query, key, as_tensor=True), mask)


def test_parts_of_block_masks_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("cpu", "cpu")
    query, key = randn(2, 200, 4, 8), randn(2, 200, 2, 8)
    monkeypatch.setattr(block_masks, "_ELEMENTS_AT_ONCE", 10_000)
    for name in MODS:
        given, mask = block_mask_of(name, target)
        found = block_masks.mask_of_blocks(given, query, key)
        as_bool = found.to_bool(200) if isinstance(found, IntervalMask) else found
        assert torch.equal(as_bool, mask)


def test_intervals_of_block_masks_take_memory_of_blocks() -> None:
    target, size = Target("cpu", "cpu"), (64, 64)
    given, mask = block_mask_of("window", target, queries=4096, keys=4096, size=size)
    query = randn(1, 4096, 4, 8)
    with LargestStorage() as largest:
        found = block_masks.mask_of_blocks(given, query, query)
    assert isinstance(found, IntervalMask)
    assert torch.equal(found.to_bool(4096), mask)
    assert largest.bytes < mask.numel() // 2


def test_full_and_unlisted_blocks_are_not_evaluated() -> None:
    """The mask_mod contradicts them; FlexAttention does not evaluate it there either."""
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    partial, full = (torch.tensor([[[[n, 0], [n, 0]]]], dtype=torch.int32) for n in (0, 1))
    calls = []

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        calls.append(1)
        return (i + j) % 2 == 0

    given = flex_attention.BlockMask.from_kv_blocks(
        counts, partial, counts, full, BLOCK_SIZE=(8, 8), mask_mod=mask_mod, seq_lengths=(16, 24)
    )
    found = block_masks.mask_of_blocks(given, randn(1, 16, 2, 8), randn(1, 24, 2, 8))
    want = torch.zeros(1, 1, 16, 24, dtype=torch.bool)
    want[..., 8:16] = True
    row, key = torch.arange(16)[:, None], torch.arange(8)
    want[..., :8] = (row + key) % 2 == 0
    assert isinstance(found, Tensor)
    assert torch.equal(found, want)
    assert len(calls) == 1


def test_plans_of_block_masks(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], queries=200, keys=200)
    states = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    for name in ("window", "dilated"):
        given, _ = block_mask_of(name, target)
        with torch.inference_mode():
            plan = make_plan(*states[:2], given, backend=target.backend)
        assert isinstance(plan.attn_mask, IntervalMask) == (name == "window")
        want = flash_dmattn_func(*states, given, backend=target.backend)
        leaf = states[1].clone().requires_grad_()
        for mask in (None, given, plan.attn_mask):
            got = flash_dmattn_func(states[0], leaf, states[2], mask, plan=plan)
            assert torch.equal(got, want)
        got.float().sum().backward()
        assert leaf.grad is not None
        for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
            assert torch.equal(flash_dmattn_func(*states, plan=copied), want)
        other, _ = block_mask_of(name, target)
        with pytest.raises(ValueError, match="attn_mask must be None or the very mask"):
            flash_dmattn_func(*states, other, plan=plan)


def test_block_masks_and_windows(target: Target) -> None:
    problem = simple_problem(target.dtypes[0], queries=200, keys=200)
    states = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    given, mask = block_mask_of("window", target)
    bias = randn(2, 1, 1, 200, dtype=target.dtypes[0]).to(target.device)
    options = {"attn_bias": bias, "window_size": 8, "is_causal": True, "backend": target.backend}
    got = flash_dmattn_func(*states, given, **options)
    assert torch.equal(got, flash_dmattn_func(*states, mask.to(target.device), **options))


@pytest.mark.parametrize("as_argument", [False, True])
def test_block_masks_compile_whole(target: Target, as_argument: bool) -> None:
    torch.compiler.reset()
    problem = simple_problem(target.dtypes[0], queries=200, keys=200)
    states = [t.to(target.device) for t in (problem.query, problem.key, problem.value)]
    given, mask = block_mask_of("dilated", target)

    def run(query: Tensor, *block_mask: Any) -> Any:
        own = block_mask[0] if block_mask else given
        return flash_dmattn_func(query, *states[1:], own, backend=target.backend)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    want = flash_dmattn_func(*states, mask.to(target.device), backend=target.backend)
    got = compiled(states[0], *[given] * as_argument)
    torch.testing.assert_close(got, want)


def test_block_masks_are_exported_and_explained(tmp_path: Path) -> None:
    problem = simple_problem(queries=200, keys=200)
    states = problem.query, problem.key, problem.value
    for name in ("window", "dilated"):
        given, _ = block_mask_of(name, Target("cpu", "cpu"))

        class Model(torch.nn.Module):
            def __init__(self, mask: Any) -> None:
                super().__init__()
                self.mask = mask

            def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
                return flash_dmattn_func(query, key, value, self.mask)

        model = Model(given)
        # Without decomposition, torch 2.11 cannot save a graph with torch.vmap.
        exported = torch.export.export(model, states).run_decompositions({})
        torch.export.save(exported, tmp_path / "model.pt2")
        got = torch.export.load(tmp_path / "model.pt2").module()(*states)
        torch.testing.assert_close(got, model(*states))
        told = [str(explain(*states, given)), str(explain(*states, attn_mask=given))]
        assert told[0] == told[1]
        assert ("attn_mask has a row for each query" in told[0]) == (name == "dilated")


def test_wrong_block_masks() -> None:
    target = Target("cpu", "cpu")
    given, _ = block_mask_of("causal", target)
    with pytest.raises(ValueError, match=r"query must have shape \(B, rows, heads, D\)"):
        flash_dmattn_func(randn(4), randn(4), randn(4), given)
    x = randn(2, 190, 4, 8)
    with pytest.raises(ValueError, match=r"BlockMask of shape \(1, 1, 200, 200\), but must have"):
        flash_dmattn_func(x, x, x, given)
    given, _ = block_mask_of("heads", target)
    x = randn(2, 200, 8, 8)
    with pytest.raises(ValueError, match=r"BlockMask of shape \(1, 4, 200, 200\), .*8\|1"):
        make_plan(x, x, given)
    with pytest.raises(TypeError, match="attn_mask must be a boolean"):
        flash_dmattn_varlen_func(**varlen(target), attn_mask=given)
    x = randn(2, 200, 4, 8)
    indices = torch.zeros(2, 1, 200, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="key_indices cannot be combined with attn_mask"):
        flash_dmattn_func(x, x, x, given, key_indices=indices)


def test_equal_to_flex_attention() -> None:
    given, _ = block_mask_of("documents", Target("cpu", "cpu"))
    problem = simple_problem(queries=200, keys=200, kv_heads=4, group=1)
    states = problem.query, problem.key, problem.value
    theirs = flex_attention.flex_attention(*(t.transpose(1, 2) for t in states), block_mask=given)
    torch.testing.assert_close(flash_dmattn_func(*states, given), theirs.transpose(1, 2))


def test_a_block_mask_is_known_without_its_module() -> None:
    script = (
        "import sys, torch, flash_dmattn\n"
        "x = torch.randn(1, 6, 2, 8)\n"
        "flash_dmattn.flash_dmattn_func(x, x, x, torch.ones(1, 6, dtype=torch.bool))\n"
        "assert 'torch.nn.attention.flex_attention' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not arguments.is_block_mask(torch.ones(2, dtype=torch.bool))
    assert not arguments.is_block_mask(IntervalMask.sliding_window(1, 0, 4, 4))
