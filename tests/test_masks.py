# SPDX-License-Identifier: BSD-3-Clause
"""Interval masks: the pairs that each constructor keeps, and the equal boolean form."""

from __future__ import annotations

import doctest
import io
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from flash_dmattn import IntervalMask, dynamic_mask, flash_dmattn_func, masks
from support import Problem, Target, assert_forward_is_accurate, randn, simple_problem

LENGTH = st.integers(0, 12)


@given(
    queries=LENGTH,
    keys=LENGTH,
    left=st.one_of(st.none(), st.integers(0, 14)),
    right=st.one_of(st.none(), st.integers(0, 14)),
)
def test_sliding_window(queries: int, keys: int, left: int | None, right: int | None) -> None:
    kept = IntervalMask.sliding_window(left, right, queries, keys).to_bool(queries)
    assert kept.shape == (1, 1, queries, keys)
    for i in range(queries):
        for j in range(keys):
            position = i + keys - queries
            inside = (left is None or j >= position - left) and (
                right is None or j <= position + right
            )
            assert kept[0, 0, i, j].item() == inside


@given(ids=st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=3))
def test_documents_by_ids(ids: list[list[int]]) -> None:
    kept = IntervalMask.documents(torch.tensor(ids)).to_bool(9)
    for b, row in enumerate(ids):
        for i in range(9):
            for j in range(9):
                between = row[min(i, j) : max(i, j) + 1]
                assert kept[b, 0, i, j].item() == (len(set(between)) == 1)


@given(lengths=st.lists(st.integers(0, 5), max_size=4), padding=st.integers(0, 3))
def test_documents_by_cu_seqlens(lengths: list[int], padding: int) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = sum(lengths) + padding
    kept = IntervalMask.documents(cu_seqlens=bounds, length=total).to_bool(total)
    expected = torch.zeros(total, total, dtype=torch.bool)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        expected[begin:end, begin:end] = True
    assert torch.equal(kept[0, 0], expected)
    if padding == 0:
        assert torch.equal(IntervalMask.documents(cu_seqlens=bounds).to_bool(total), kept)


def test_documents_of_nothing() -> None:
    empty = torch.zeros(2, 0, dtype=torch.int64)
    assert IntervalMask.documents(empty).to_bool(0).shape == (2, 1, 0, 0)


@given(queries=LENGTH, keys=LENGTH, prefix=st.lists(LENGTH, min_size=1, max_size=3))
def test_prefix_lm(queries: int, keys: int, prefix: list[int]) -> None:
    kept = IntervalMask.prefix_lm(torch.tensor(prefix), queries, keys).to_bool(queries)
    for b, length in enumerate(prefix):
        for i in range(queries):
            for j in range(keys):
                assert kept[b, 0, i, j].item() == (j < length or j <= i + keys - queries)


def test_key_padding() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    kept = IntervalMask.from_key_padding(mask, 4).to_bool(4)
    assert torch.equal(kept, mask[:, None, None, :].expand(2, 1, 4, 3))


def test_intersection_broadcasts() -> None:
    padding = IntervalMask.from_key_padding(torch.tensor([[True, True, False]] * 2), 3)
    window = IntervalMask.sliding_window(1, 0, 3, 3)
    both = padding & window
    assert both.start.shape == (2, 1, 3)
    assert torch.equal(both.to_bool(3), padding.to_bool(3) & window.to_bool(3))
    with pytest.raises(TypeError):
        padding & torch.ones(3)  # type: ignore[operator]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_intervals_equal_their_boolean_mask(heads: int, causal: bool, target: Target) -> None:
    generator = torch.Generator().manual_seed(heads)
    start, end = (
        torch.randint(-5, 80, (2, heads, 90), generator=generator, dtype=torch.int32)
        for _ in range(2)
    )
    mask = IntervalMask(torch.minimum(start, end), torch.maximum(start, end))
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=75, keys=90, causal=causal)
        dout = randn(*problem.query.shape, dtype=dtype)
        problem.mask = mask
        by_intervals = problem.results(target, dout=dout)
        problem.mask = mask.to_bool(75)
        tolerance = 16 * torch.finfo(dtype).eps
        for name, value in problem.results(target, dout=dout).items():
            torch.testing.assert_close(
                by_intervals[name], value, atol=tolerance, rtol=tolerance, msg=name
            )


@pytest.mark.parametrize("place", [0, 1, 62, 63])
@pytest.mark.parametrize("late", [False, True])
def test_one_key_of_64_is_kept_by_other_rows(late: bool, place: int, target: Target) -> None:
    """A summary of several keys' bounds must include each key, also the first and the last."""
    queries, keys = 256, 160
    start = torch.full((1, 1, keys), queries - 8 if late else 0, dtype=torch.int32)
    end = torch.full((1, 1, keys), queries if late else 8, dtype=torch.int32)
    start[..., place::64], end[..., place::64] = 0, queries
    tensors = (
        randn(1, rows, 2, 16, seed=seed).to(target.dtypes[-1])
        for seed, rows in enumerate((queries, keys, keys))
    )
    assert_forward_is_accurate(Problem(*tensors, mask=IntervalMask(start, end)), target)


@pytest.mark.parametrize("heads", [1, 4])
def test_bounds_as_far_out_as_integers_go(heads: int, target: Target) -> None:
    """Their distances from late rows exceed int32."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    generator = torch.Generator().manual_seed(heads)
    start = torch.randint(-5, 300, (2, heads, 90), generator=generator, dtype=torch.int32)
    end = torch.randint(-5, 300, (2, heads, 90), generator=generator, dtype=torch.int32)
    start[..., ::3], end[..., 1::4], end[..., 2::5] = least, most, least
    for dtype in target.dtypes:
        problem = simple_problem(dtype, queries=290, keys=90)
        problem.bias = randn(2, 4, 1, 90, dtype=dtype)
        dout = randn(*problem.query.shape, dtype=dtype)
        problem.mask = IntervalMask(start, end)
        got = problem.results(target, dout=dout)
        problem.mask = IntervalMask(start.clamp(0, 290), end.clamp(0, 290))
        for name, value in problem.results(target, dout=dout).items():
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    "one, other, message",
    [
        ((2, 1, 5), (3, 1, 5), r"shapes that differ .*got \(2, 1, 5\) and \(3, 1, 5\)"),
        ((1, 2, 5), (1, 4, 5), r"shapes that differ .*got \(1, 2, 5\) and \(1, 4, 5\)"),
        ((1, 1, 5), (1, 1, 1), r"shapes that differ .*got \(1, 1, 5\) and \(1, 1, 1\)"),
        ((1, 5), (1, 1, 5), r"shapes that differ .*got \(1, 5\) and \(1, 1, 5\)"),
    ],
)
def test_intersection_of_masks_that_do_not_fit(
    one: tuple[int, ...], other: tuple[int, ...], message: str
) -> None:
    masks = [IntervalMask(*[torch.zeros(s, dtype=torch.int32)] * 2) for s in (one, other)]
    for first, second in (masks, masks[::-1]):
        with pytest.raises(ValueError, match="& of IntervalMasks needs shapes"):
            first & second
    with pytest.raises(ValueError, match=message):
        masks[0] & masks[1]


def test_unions_and_complements_name_boolean_masks() -> None:
    mask = IntervalMask.sliding_window(1, 0, 3, 5)
    union = r"^\| of an IntervalMask cannot be .*; a\.to_bool\(query_length\) \| b\.to_bool"
    for one, other in ((mask, mask), (mask, torch.ones(3, 5) > 0), (torch.ones(3, 5) > 0, mask)):
        with pytest.raises(TypeError, match=union):
            one | other  # type: ignore[operator]
    complement = r"^~ of an IntervalMask .*; ~mask\.to_bool\(query_length\)"
    with pytest.raises(TypeError, match=complement):
        operator.invert(mask)


def test_intersection_across_devices_or_query_lengths() -> None:
    mask = IntervalMask.sliding_window(1, 0, 3, 5)
    with pytest.raises(ValueError, match="one device, got cpu and meta"):
        mask & mask.to("meta")
    with pytest.raises(ValueError, match="made for one query_length, got 3 and 4"):
        mask & IntervalMask.sliding_window(1, 0, 4, 5)


def test_a_device_of_a_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    mask = IntervalMask.sliding_window(1, 0, 3, 5)
    with pytest.raises(ValueError, match="device is 'cuda:7', but must be one of the 2 cuda"):
        mask.to("cuda:7")
    with pytest.raises(ValueError, match="device is 'cuda:2', but must be one of the 2 cuda"):
        IntervalMask.sliding_window(1, 0, 3, 5, device=torch.device("cuda", 2))


def test_varlen_mask_has_no_boolean_form_by_itself() -> None:
    mask = IntervalMask(*[torch.zeros(1, 5, dtype=torch.int32)] * 2)
    with pytest.raises(ValueError, match=r"to_bool cannot convert a varlen .*\(1, 5\).*sequence"):
        mask.to_bool(5)


def test_query_length_is_remembered_and_checked(target: Target) -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    lengths = {
        "window": IntervalMask.sliding_window(1, 0, 6, 6),
        "padding": IntervalMask.from_key_padding(ids == 0, 6),
        "documents": IntervalMask.documents(ids),
        "cu_seqlens": IntervalMask.documents(cu_seqlens=torch.tensor([0, 2, 6])),
        "prefix": IntervalMask.prefix_lm(torch.tensor([1, 2]), 6, 6),
        "selection": dynamic_mask(torch.randn(2, 6), 2, True),
    }
    x = randn(2, 6, 1, 8).to(target.device, target.dtypes[0])
    for name, made in lengths.items():
        unknown = IntervalMask(made.start, made.end)
        for mask in (made, made & unknown, unknown & made, pytree.tree_map(torch.clone, made)):
            moved = mask.to(target.device)
            assert moved.query_length == 6, name
            flash_dmattn_func(x, x, x, moved, backend=target.backend)
            with pytest.raises(ValueError, match=r"attn_mask: .*query_length=6 cannot mask 1 q"):
                flash_dmattn_func(x[:, -1:], x, x, moved, backend=target.backend)
        assert unknown.query_length is None
        flash_dmattn_func(x[:, -1:], x, x, unknown.to(target.device), backend=target.backend)
        with pytest.raises(ValueError, match=r"query_length: .*query_length=6 cannot mask 5"):
            made.to_bool(5)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = dynamic_mask(torch.randn(1, 1, 6), 2, True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    assert packed.query_length is None


def test_moves_and_shows_itself(target: Target) -> None:
    mask = IntervalMask.sliding_window(1, 1, 3, 3).to(target.device)
    assert mask.device.type == target.device
    assert mask.start.is_contiguous()
    assert "shape=(1, 1, 3), query_length=3" in repr(mask)


def test_can_be_saved() -> None:
    mask, file = IntervalMask.sliding_window(1, 1, 3, 3), io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded.start, mask.start)
    assert loaded.query_length == 3


def test_is_a_tree_of_two_tensors() -> None:
    mask = IntervalMask.sliding_window(1, 1, 3, 3)
    doubled = pytree.tree_map(lambda t: t * 2, mask)
    assert isinstance(doubled, IntervalMask)
    assert torch.equal(doubled.end, mask.end * 2)


INT32 = torch.zeros(1, 1, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: IntervalMask([1], INT32), TypeError, r"start must be a torch.Tensor, got list"),
        (
            lambda: IntervalMask(INT32, INT32.long()),
            TypeError,
            r"end must .*int32, got torch.int64",
        ),
        (
            lambda: IntervalMask(INT32[0, 0], INT32),
            ValueError,
            r"start must have shape .*got \(3,\)",
        ),
        (
            lambda: IntervalMask(INT32, INT32[..., :2]),
            ValueError,
            r"same shape, got .*3\) and .*2\)",
        ),
        (
            lambda: IntervalMask(INT32, INT32.to("meta")),
            ValueError,
            r"one device, got cpu and meta",
        ),
        (
            lambda: IntervalMask.from_key_padding(torch.ones(1, 3), 3),
            TypeError,
            r"mask must .*torch.bool, got torch.float32",
        ),
        (
            lambda: IntervalMask.from_key_padding([True], 3),
            TypeError,
            r"mask must be a boolean torch.Tensor, got list",
        ),
        (
            lambda: IntervalMask.from_key_padding(torch.ones(3, dtype=torch.bool), 3),
            ValueError,
            r"mask must have shape \(B, K\), got \(3,\)",
        ),
        (
            lambda: IntervalMask.from_key_padding(torch.ones(1, 3, dtype=torch.bool), -1),
            ValueError,
            r"query_length must be at least 0, got -1",
        ),
        (
            lambda: IntervalMask.sliding_window(-1, 0, 3, 3),
            ValueError,
            r"left must be at least 0, or None for no limit, got -1",
        ),
        (
            lambda: IntervalMask.sliding_window(0, 0, 3, -3),
            ValueError,
            r"key_length must be at least 0, got -3",
        ),
        (
            lambda: IntervalMask.documents(),
            ValueError,
            r"exactly one of document_ids and cu_seqlens",
        ),
        (
            lambda: IntervalMask.documents(torch.ones(1, 3)),
            TypeError,
            r"document_ids must hold integers, got torch.float32",
        ),
        (
            lambda: IntervalMask.documents(cu_seqlens=torch.ones(1, 3, dtype=torch.int32)),
            ValueError,
            r"cu_seqlens must have shape \(documents \+ 1,\), got \(1, 3\)",
        ),
        (
            lambda: IntervalMask.prefix_lm([1], 3, 3),
            TypeError,
            r"prefix_lengths must be a torch.Tensor of integers, got list",
        ),
    ],
)
def test_wrong_arguments(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


@given(data=st.data(), delay=st.integers(0, 9))
def test_delayed_eviction(data: st.DataObject, delay: int) -> None:
    length = data.draw(LENGTH)
    flags = data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))
    keep = torch.tensor(flags, dtype=torch.bool).reshape(1, 2, length)
    kept = IntervalMask.delayed_eviction(keep, delay).to_bool(length)
    for head in range(2):
        for i in range(length):
            for j in range(length):
                stays = bool(keep[0, head, j]) or i < j + delay
                assert kept[0, head, i, j].item() == (j <= i and stays)


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    """Return parents in an order that may place children first."""
    count = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    names = draw(st.permutations(range(count)))
    renamed = [0] * count
    for node, parent in enumerate(parents):
        renamed[names[node]] = -1 if parent < 0 else names[parent]
    return renamed


def _sees(parents: list[int]) -> torch.Tensor:
    """Return bool (N, N): whether node j is node i or one of its ancestors."""
    sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        above = node
        while above >= 0:
            sees[node, above] = True
            above = parents[above]
    return sees


@given(parents=forests(), prefix=st.integers(0, 3))
def test_tree(parents: list[int], prefix: int) -> None:
    count = len(parents)
    # A second row, a chain, detects mixed rows.
    chain = list(range(-1, count - 1))
    rows = torch.tensor([parents, chain], dtype=torch.int64).reshape(2, count)
    mask, order = IntervalMask.tree(rows, prefix_length=prefix)
    kept = mask.to_bool(count)
    assert kept.shape == (2, 1, count, prefix + count)
    assert kept[..., :prefix].all()
    for row in range(2):
        nodes = order[row]
        assert sorted(nodes.tolist()) == list(range(count))
        expected = _sees(rows[row].tolist())[nodes][:, nodes]
        assert torch.equal(kept[row, 0, :, prefix:], expected)
        children: dict[int, list[int]] = {}
        for node in nodes.tolist():
            children.setdefault(int(rows[row, node]), []).append(node)
        assert all(siblings == sorted(siblings) for siblings in children.values())


def test_tree_of_a_long_chain_takes_no_loop_over_nodes() -> None:
    length = 20000
    parents = torch.arange(-1, length - 1)[None]
    mask, order = IntervalMask.tree(parents)
    assert torch.equal(order[0], torch.arange(length))
    assert torch.equal(mask.start[0, 0], torch.arange(length, dtype=torch.int32))
    assert (mask.end == length).all()


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ([[-1, 0], [1, 0]], "row 1 node 0 is, or has, an ancestor of itself"),
        ([[0]], "row 0 node 0 is, or has, an ancestor of itself"),
        ([[-1, 2]], "parents must be nodes from 0 to 1, or -1 for a root, got 2"),
        ([[-2, 0]], "parents must be nodes from 0 to 1, or -1 for a root, got -2"),
    ],
)
def test_what_is_no_tree(parents: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        IntervalMask.tree(torch.tensor(parents))


def test_docstrings_of_masks_are_right() -> None:
    found = doctest.testmod(masks, extraglobs={"torch": torch})
    assert found.attempted >= 7
    assert not found.failed
