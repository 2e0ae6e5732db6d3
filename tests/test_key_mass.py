# SPDX-License-Identifier: BSD-3-Clause
"""The attention that each key receives, against sums of the formula's probabilities."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import (
    IntervalMask,
    explain,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
    reference,
)
from flash_dmattn.backends import portable
from flash_dmattn.backends.pack import PackBackend
from flash_dmattn.record import AttentionInputs
from support import Target, rand_bool, randn

OPS = torch.ops.flash_dmattn
QUERIES, KEYS = 71, 150

# The other arguments of calls with 2 sequences, 4 heads, 2 KV heads, 71 queries and 150 keys.
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "key mask": lambda: {"attn_mask": rand_bool(2, KEYS, seed=3)},
    "row mask": lambda: {
        "attn_mask": rand_bool(2, 4, QUERIES, KEYS, density=0.2, seed=3),
        "is_causal": True,
    },
    "intervals": lambda: {"attn_mask": IntervalMask.sliding_window(20, 0, QUERIES, KEYS)},
    "key bias": lambda: {"attn_bias": randn(2, 4, 1, KEYS, seed=4), "softcap": 2.0},
    "some dropped": lambda: {
        "attn_bias": randn(2, 2, 1, KEYS, seed=4).masked_fill(rand_bool(KEYS), -torch.inf)
    },
    "row bias": lambda: {"attn_bias": randn(2, 1, QUERIES, KEYS, seed=5), "is_causal": True},
    "pairs dropped": lambda: {
        "attn_bias": randn(1, 4, QUERIES, KEYS, seed=5).masked_fill(
            rand_bool(QUERIES, KEYS), -torch.inf
        ),
    },
    "window": lambda: {
        "attn_bias": randn(2, 2, 1, KEYS, seed=6),
        "is_causal": True,
        "window_size": 30,
    },
    "padded window": lambda: {
        "attn_bias": randn(2, 2, 1, KEYS, seed=6),
        "attn_mask": torch.arange(KEYS) >= torch.tensor([[0], [40]]),
        "is_causal": True,
        "window_size": 30,
    },
    "last and first": lambda: {
        "attn_bias": randn(2, 1, 1, KEYS, seed=6),
        "is_causal": True,
        "window_size": 10,
        "keep_last": 7,
        "keep_first": 2,
    },
    "sink": lambda: {"sink": randn(4, seed=7) + 3, "is_causal": True},
    "far sinks": lambda: {"sink": torch.tensor([-torch.inf, torch.inf, 1e4, -1e4])},
}


def placed(value: Any, target: Target) -> Any:
    return value.to(target.device) if isinstance(value, Tensor | IntervalMask) else value


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def dense_tensors(dtype: torch.dtype, queries: int = QUERIES, keys: int = KEYS) -> list[Tensor]:
    shapes = [(2, queries, 4, 24), (2, keys, 2, 24), (2, keys, 2, 24)]
    return [randn(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def wanted(tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    """Return the float64 sums of the formula's probabilities over the rows."""
    exact = {name: doubled(value) for name, value in options.items()}
    found = flash_dmattn_func(
        *map(doubled, tensors), return_attn_probs=True, backend="reference", **exact
    )
    return found[2].sum(2)


def mass_of(tensors: list[Tensor], target: Target, **options: Any) -> Tensor:
    tensors = [placed(t, target) for t in tensors]
    options = {name: placed(value, target) for name, value in options.items()}
    found = flash_dmattn_func(*tensors, return_key_mass=True, backend=target.backend, **options)
    return found[-1].cpu()


def assert_near(mass: Tensor, want: Tensor) -> None:
    assert mass.dtype == torch.float32
    assert mass.shape == want.shape
    assert not mass.requires_grad
    # With 16-bit inputs only the scores are rounded, as float32 sums.
    error = (mass.double() - want).abs() / (1 + want)
    assert error.max() < 1e-4, f"{error.max().item():.3g}"


@pytest.mark.parametrize("kind", KINDS)
def test_mass(kind: str, target: Target) -> None:
    for dtype in (target.dtypes[0], target.dtypes[-1]):
        tensors = dense_tensors(dtype)
        options = KINDS[kind]()
        assert_near(mass_of(tensors, target, **options), wanted(tensors, options))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SCORES_ON_CPU", 8 * KEYS * 9)
    tensors, options = dense_tensors(torch.float32), KINDS[kind]()
    target = Target("cpu", "reference")
    assert_near(mass_of(tensors, target, **options), wanted(tensors, options))


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("kind", ["none", "keys", "window", "sink"])
def test_mass_of_few_queries(kind: str, queries: int, target: Target) -> None:
    tensors = dense_tensors(target.dtypes[-1], queries, 1000)
    bias = randn(2, 2, 1, 1000, seed=6)
    options = {
        "none": {"is_causal": True},
        "keys": {"attn_mask": rand_bool(2, 1000, seed=3), "is_causal": True},
        "window": {"attn_bias": bias, "window_size": 100, "is_causal": True},
        "sink": {"sink": randn(4, seed=7) + 5},
    }[kind]
    assert_near(mass_of(tensors, target, **options), wanted(tensors, options))


@pytest.mark.parametrize("head_dim", [1, 40, 128, 200])
def test_mass_of_head_dims(head_dim: int, target: Target) -> None:
    if head_dim > target.most_head_dim:
        return
    tensors = [
        randn(1, rows, 2, head_dim, seed=n, dtype=target.dtypes[-1])
        for n, rows in enumerate((33, 65, 65))
    ]
    options = {"is_causal": True}
    assert_near(mass_of(tensors, target, **options), wanted(tensors, options))


Q_BOUNDS, K_BOUNDS = [0, 30, 30, 95, 101], [0, 80, 90, 170, 170]


def packed_tensors(dtype: torch.dtype) -> list[Tensor]:
    shapes = [(Q_BOUNDS[-1], 4, 24), (K_BOUNDS[-1], 2, 24), (K_BOUNDS[-1], 2, 24)]
    return [randn(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


PACKED_KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "sink": lambda: {"is_causal": True, "sink": randn(4, seed=7) + 2},
    "key mask": lambda: {"attn_mask": rand_bool(1, 1, K_BOUNDS[-1], seed=3), "is_causal": True},
    "row mask": lambda: {"attn_mask": rand_bool(4, Q_BOUNDS[-1], 80, density=0.2, seed=3)},
    "intervals": lambda: {
        "attn_mask": IntervalMask(
            torch.arange(K_BOUNDS[-1], dtype=torch.int32).unsqueeze(0) % 11,
            torch.arange(K_BOUNDS[-1], dtype=torch.int32).unsqueeze(0) % 11 + 25,
        )
    },
    "key bias": lambda: {"attn_bias": randn(4, 1, K_BOUNDS[-1], seed=4), "softcap": 2.0},
    "row bias": lambda: {"attn_bias": randn(2, Q_BOUNDS[-1], 80, seed=5), "is_causal": True},
    "window": lambda: {
        "attn_bias": randn(2, 1, K_BOUNDS[-1], seed=6),
        "is_causal": True,
        "window_size": 12,
        "keep_last": 3,
    },
}


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_mass(kind: str, target: Target) -> None:
    tensors, options = packed_tensors(target.dtypes[-1]), PACKED_KINDS[kind]()
    bounds = [torch.tensor(b, dtype=torch.int32) for b in (Q_BOUNDS, K_BOUNDS)]
    exact = {name: doubled(value) for name, value in options.items()}
    found = flash_dmattn_varlen_func(
        *map(doubled, tensors), *bounds, 65, 80, return_attn_probs=True, backend="reference",
        **exact,
    )  # fmt: skip
    sums = found[2].sum(2)
    lengths = torch.tensor(K_BOUNDS).diff().tolist()
    want = torch.cat([sums[n, :, :length] for n, length in enumerate(lengths)], 1)
    on_device = [placed(t, target) for t in (*tensors, *bounds)]
    options = {name: placed(value, target) for name, value in options.items()}
    found = flash_dmattn_varlen_func(
        *on_device, 65, 80, return_key_mass=True, return_lse=True, backend=target.backend, **options
    )
    assert len(found) == 3
    assert_near(found[2].cpu(), want)


def listed_options(kind: str) -> dict[str, Any]:
    return {
        "none": {},
        "sink": {"is_causal": True, "sink": randn(4, seed=7) + 2, "softcap": 3.0},
        "key bias": {
            "attn_bias": randn(2, 4, 1, KEYS, seed=4).masked_fill(rand_bool(KEYS), -torch.inf)
        },
        "index bias": {"index_bias": randn(2, 2, QUERIES, 40, seed=5)},
    }[kind]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["none", "sink", "key bias", "index bias"])
def test_mass_of_lists(kind: str, heads: int, deterministic: bool, target: Target) -> None:
    tensors, options = dense_tensors(target.dtypes[-1]), listed_options(kind)
    generator = torch.Generator().manual_seed(8)
    shape = (2, heads, QUERIES, 40)
    # Some are out of range, some are repeated.
    lists = torch.randint(-5, KEYS + 9, shape, generator=generator, dtype=torch.int32)
    mass = mass_of(tensors, target, key_indices=lists, deterministic=deterministic, **options)
    # The mass is the gradient of a bias of each key and head under this gradient of lse.
    exact = {name: doubled(value) for name, value in options.items()}
    bias = exact.pop("attn_bias", torch.zeros(2, 4, 1, KEYS, dtype=torch.float64)).requires_grad_()
    _, lse = flash_dmattn_func(
        *map(doubled, tensors),
        attn_bias=bias,
        key_indices=lists,
        return_lse=True,
        backend="reference",
        **exact,
    )
    share = torch.ones_like(lse)
    if "sink" in exact:
        share = torch.sigmoid(lse.detach() - exact["sink"].unsqueeze(-1))
    share = share.masked_fill(lse == -torch.inf, 0)
    (want,) = torch.autograd.grad(lse, bias, share)
    assert_near(mass, want.squeeze(2))


def test_mass_of_packed_lists(target: Target) -> None:
    tensors = packed_tensors(target.dtypes[-1])
    bounds = [torch.tensor(b, dtype=torch.int32) for b in (Q_BOUNDS, K_BOUNDS)]
    generator = torch.Generator().manual_seed(8)
    lists = torch.stack([torch.randperm(80, generator=generator)[:20] for _ in range(Q_BOUNDS[-1])])
    kept = torch.zeros(Q_BOUNDS[-1], 80, dtype=torch.bool).scatter_(1, lists, True)
    exact = [*map(doubled, tensors), *bounds]
    want = flash_dmattn_varlen_func(
        *exact, 65, 80, attn_mask=kept.unsqueeze(0), return_key_mass=True, backend="reference"
    )[1]
    on_device = [placed(t, target) for t in (*tensors, *bounds)]
    _, mass = flash_dmattn_varlen_func(
        *on_device,
        65,
        80,
        key_indices=placed(lists.to(torch.int32).unsqueeze(0), target),
        return_key_mass=True,
        backend=target.backend,
    )
    assert_near(mass.cpu(), want.double())


@pytest.mark.parametrize("form", ["mask", "rows", "bias", "row bias", "intervals"])
def test_what_is_dropped_reaches_nothing(form: str, target: Target) -> None:
    dtype = target.dtypes[-1]
    query, key, value = dense_tensors(dtype)
    kept = rand_bool(KEYS, seed=9)
    rows = rand_bool(QUERIES, seed=10)
    query[:, ~rows] = torch.nan
    key[:, ~kept] = torch.nan
    value[:, ~kept] = torch.inf
    pairs = rows[:, None] & kept
    if form in ("mask", "bias", "intervals"):  # these drop no rows
        query = query.nan_to_num(0)
        pairs = kept.expand(QUERIES, KEYS)
    options: dict[str, Any] = {
        "mask": {"attn_mask": kept.expand(2, KEYS)},
        "rows": {"attn_mask": pairs[None, None]},
        "bias": {"attn_bias": torch.zeros(1, 2, 1, KEYS).masked_fill(~kept, -torch.inf)},
        "row bias": {"attn_bias": torch.zeros(1, 1, QUERIES, KEYS).masked_fill(~pairs, -torch.inf)},
        "intervals": {
            "attn_mask": IntervalMask(
                torch.zeros(1, 1, KEYS, dtype=torch.int32),
                (kept * QUERIES).to(torch.int32)[None, None],
            )
        },
    }[form]
    mass = mass_of([query, key, value], target, **options)
    clean = [t.nan_to_num(0, 0, 0) for t in (query, key, value)]
    assert_near(mass, wanted(clean, {"attn_mask": pairs[None, None]}))
    assert not mass[..., ~kept].any()


def test_mass_of_what_one_head_drops_and_another_keeps(target: Target) -> None:
    query, key, value = dense_tensors(target.dtypes[-1])
    key[:, 5] = torch.nan
    bias = torch.zeros(1, 4, 1, KEYS)
    bias[:, 1:, :, 5] = -torch.inf
    mass = mass_of([query, key, value], target, attn_bias=bias)
    clean = key.clone()
    clean[:, 5] = 0
    want = wanted([query, clean, value], {"attn_bias": bias})
    assert_near(mass[:, 1:], want[:, 1:])
    assert mass[:, 0].isnan().all()


def test_rows_without_keys_add_nothing(target: Target) -> None:
    tensors = dense_tensors(target.dtypes[-1], 40, 10)  # the first 30 rows see no key
    options = {"is_causal": True}
    mass = mass_of(tensors, target, **options)
    assert_near(mass, wanted(tensors, options))
    assert torch.allclose(mass.sum(-1), torch.tensor(10.0))


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_mass_of_sizes_of_zero(sizes: tuple[int, int, int], target: Target) -> None:
    batch, queries, keys = sizes
    query = torch.zeros(batch, queries, 4, 8, dtype=target.dtypes[-1])
    key = torch.zeros(batch, keys, 2, 8, dtype=target.dtypes[-1])
    for options in (
        {},
        {"attn_mask": torch.ones(batch, keys, dtype=torch.bool)},
        {"attn_bias": torch.zeros(1, 2, queries, keys)},
    ):
        mass = mass_of([query, key, key], target, **options)
        assert mass.shape == (batch, 4, keys)
        assert not mass.any()


def test_large_biases(target: Target) -> None:
    tensors = dense_tensors(target.dtypes[0])
    options = {"attn_bias": randn(1, 2, 1, KEYS, seed=4) - 3000}
    mass = mass_of(tensors, target, **options)
    want = wanted(tensors, options)
    # For scores near -3000 times log2(e), float32 has steps of 2**-11.
    assert ((mass - want).abs() / (1 + want)).max() < 1e-3


def test_a_bias_of_float64() -> None:
    tensors = dense_tensors(torch.float32)
    options = {"attn_bias": 1e6 - 40.0 * torch.arange(KEYS, dtype=torch.float64)[None, None, None]}
    options["is_causal"] = True
    assert_near(mass_of(tensors, Target("cpu", "cpu"), **options), wanted(tensors, options))


def test_threads_divide_the_rows(pack_target: Target) -> None:
    """Each part of a head's rows has its own sums."""
    tensors = [
        randn(1, rows, 1, 16, seed=n, dtype=pack_target.dtypes[-1])
        for n, rows in enumerate((700, 900, 900))
    ]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            mass = mass_of(tensors, pack_target, is_causal=True)
            assert_near(mass, wanted(tensors, {"is_causal": True}))
    finally:
        torch.set_num_threads(before)


def test_equal_bits(target: Target) -> None:
    tensors, options = dense_tensors(target.dtypes[-1]), KINDS["window"]()
    one, other = (mass_of(tensors, target, deterministic=True, **options) for _ in range(2))
    assert torch.equal(one, other)


def test_results_in_order(target: Target) -> None:
    query, key, value = (placed(t, target) for t in dense_tensors(target.dtypes[-1]))

    def call(**options: Any) -> tuple[Tensor, ...]:
        return flash_dmattn_func(query, key, value, backend=target.backend, **options)

    out, mass = call(return_key_mass=True)
    assert mass.shape == (2, 4, KEYS)
    plain_out, plain_lse = call(return_lse=True)
    assert torch.equal(out, plain_out)
    found = call(return_key_mass=True, return_lse=True)
    assert len(found) == 3
    assert torch.equal(found[1], plain_lse)
    assert torch.equal(found[2], mass)
    found = call(return_key_mass=True, return_attn_probs=True)
    assert len(found) == 4
    assert found[2].shape == (2, 4, QUERIES, KEYS)
    assert torch.equal(found[3], mass)
    lists = torch.zeros(2, 1, QUERIES, 3, dtype=torch.int32, device=target.device)
    assert len(call(key_indices=lists, return_key_mass=True)) == 2
    assert len(call(key_indices=lists, return_key_mass=True, return_lse=True)) == 3


def test_gradients_are_those_without_it(target: Target) -> None:
    bias = randn(2, 2, 1, KEYS, seed=6)
    options = {"is_causal": True, "window_size": 30, "backend": target.backend}

    def gradients(**more: Any) -> tuple[Tensor, ...]:
        leaves = [
            placed(t, target).detach().requires_grad_()
            for t in (*dense_tensors(target.dtypes[-1]), bias)
        ]
        found = flash_dmattn_func(
            *leaves[:3], attn_bias=leaves[3], return_lse=True, deterministic=True, **options, **more
        )
        assert not any(t.requires_grad for t in found[2:])
        return torch.autograd.grad(found[0].float().sum() + found[1].sum(), leaves)

    for got, want in zip(gradients(return_key_mass=True), gradients(), strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_no_grad_and_checkpointing(target: Target) -> None:
    tensors = [placed(t, target) for t in dense_tensors(target.dtypes[-1])]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return flash_dmattn_func(*tensors, return_key_mass=True, backend=target.backend)

    with torch.no_grad():
        want = call(*tensors)[1]
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, mass = checkpoint(call, *leaves, use_reentrant=False)
    assert torch.equal(mass, want)
    out.sum().backward()
    plain = [t.clone().requires_grad_() for t in tensors]
    flash_dmattn_func(*plain, backend=target.backend).sum().backward()
    for got, other in zip(leaves, plain, strict=True):
        assert torch.allclose(got.grad, other.grad)


def test_mass_under_autocast(target: Target) -> None:
    tensors = [placed(t, target) for t in dense_tensors(torch.float32)]
    with torch.autocast(target.device, torch.bfloat16):
        _, mass = flash_dmattn_func(*tensors, return_key_mass=True, backend=target.backend)
    rounded = [t.bfloat16().cpu() for t in tensors]
    assert_near(mass.cpu(), wanted(rounded, {}))


def operator_arguments(target: Target, kind: str) -> tuple[Any, ...]:
    query, key, value = (placed(t, target) for t in dense_tensors(target.dtypes[-1]))
    mask = start = end = bias = cu_q = cu_k = None
    longest = (0, 0)
    if kind == "rows":
        mask = placed(rand_bool(1, 1, QUERIES, KEYS), target)
        bias = placed(randn(2, 4, 1, KEYS, seed=4), target)
    elif kind == "intervals":
        intervals = IntervalMask.sliding_window(20, 0, QUERIES, KEYS).to(target.device)
        start, end = intervals.start, intervals.end
    elif kind == "varlen":
        query, key, value = (placed(t, target) for t in packed_tensors(target.dtypes[-1]))
        cu_q, cu_k = (
            torch.tensor(b, dtype=torch.int32, device=target.device) for b in (Q_BOUNDS, K_BOUNDS)
        )
        longest = (65, 80)
    tensors = (query, key, value, mask, start, end, bias, cu_q, cu_k, None, None, None)
    settings = (*longest, 0.3, True, 0.0, True, 0, -1, 0, 0, False, target.backend)
    return (*tensors, *settings)


@pytest.mark.parametrize("kind", ["none", "rows", "intervals", "varlen"])
def test_opcheck_of_the_mass(kind: str, target: Target) -> None:
    arguments = operator_arguments(target, kind)
    _, lse, _ = OPS.attention_forward(*arguments, False)
    torch.library.opcheck(OPS.key_mass.default, (lse, *arguments))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_the_mass_of_lists(packed: bool, target: Target) -> None:
    arguments = operator_arguments(target, "varlen" if packed else "none")
    query, rows = arguments[0], arguments[0].shape[0 if packed else 1]
    shape = (1, rows, 5) if packed else (query.shape[0], 1, rows, 5)
    lists = torch.arange(5, dtype=torch.int32, device=target.device).expand(shape).contiguous()
    listed = (*arguments[:3], lists, None, None, None, *arguments[7:10], *arguments[12:14])
    listed = (*listed, 0.3, True, 0.0, True, target.backend)
    importlib.import_module("flash_dmattn.key_lists.ops")
    _, lse, _ = OPS.key_list_forward(*listed, False)
    torch.library.opcheck(OPS.key_list_mass.default, (lse, *listed))


@pytest.mark.parametrize("kind", ["window", "row mask", "sink", "packed", "lists"])
def test_mass_compiles_whole(kind: str, target: Target) -> None:
    packed = kind == "packed"
    make = packed_tensors if packed else dense_tensors
    tensors = [placed(t, target).requires_grad_() for t in make(target.dtypes[-1])]
    options: dict[str, Any] = {} if kind in ("packed", "lists") else KINDS[kind]()
    options = {name: placed(value, target) for name, value in options.items()}
    if kind == "lists":
        lists = torch.arange(9, dtype=torch.int32, device=target.device)
        options["key_indices"] = lists.expand(2, 1, QUERIES, 9).contiguous()
    bounds = [placed(torch.tensor(b, dtype=torch.int32), target) for b in (Q_BOUNDS, K_BOUNDS)]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        more = {"return_key_mass": True, "backend": target.backend, **options}
        if packed:
            return flash_dmattn_varlen_func(*tensors, *bounds, 65, 80, **more)
        return flash_dmattn_func(*tensors, **more)

    torch.compiler.reset()
    out, mass = torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors)
    want_out, want = call(*tensors)
    assert torch.allclose(mass, want, atol=1e-5)
    assert not mass.requires_grad
    (got,) = torch.autograd.grad(out.sum(), tensors[:1])
    (gradient,) = torch.autograd.grad(want_out.sum(), tensors[:1])
    assert torch.allclose(got, gradient, atol=1e-2)


def test_torch_func() -> None:
    query, key, value = dense_tensors(torch.float32)

    def loss(query: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        out, mass = flash_dmattn_func(query, key, value, return_key_mass=True, backend=backend)
        return out.sum() + mass.sum(), mass

    want = mass_of([query, key, value], Target("cpu", "reference"))
    leaf = query.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(flash_dmattn_func(leaf, key, value).sum(), leaf)
    for backend in ("cpu", "reference"):
        found, mass = torch.func.grad(loss, has_aux=True)(query, backend)
        assert torch.allclose(found, gradient, atol=1e-5)
        assert torch.allclose(mass, want, atol=1e-5)
    _, mapped = torch.vmap(
        lambda q: flash_dmattn_func(
            q, key, value, is_causal=True, return_key_mass=True, backend="reference"
        )
    )(torch.stack([query, 2 * query]))
    for one, scale in zip(mapped, (1, 2), strict=True):
        target = Target("cpu", "reference")
        alone = mass_of([scale * query, key, value], target, is_causal=True)
        assert torch.allclose(one, alone, atol=1e-5)
    lists = torch.arange(5, dtype=torch.int32).expand(2, 1, QUERIES, 5)
    _, mapped = torch.vmap(
        lambda q: flash_dmattn_func(
            q, key, value, key_indices=lists, return_key_mass=True, backend="reference"
        )
    )(torch.stack([query, 2 * query]))
    want = mass_of([query, key, value], Target("cpu", "reference"), key_indices=lists)
    assert torch.allclose(mapped[0], want, atol=1e-5)


def test_a_given_plan(target: Target) -> None:
    query, key, value = (placed(t, target) for t in dense_tensors(target.dtypes[-1]))
    mask = placed(rand_bool(2, 4, QUERIES, KEYS, density=0.2, seed=3), target)
    plan = make_plan(query, key, mask, is_causal=True, backend=target.backend)
    _, mass = flash_dmattn_func(query, key, value, plan=plan, return_key_mass=True)
    want = mass_of([query, key, value], target, attn_mask=mask, is_causal=True)
    assert torch.equal(mass.cpu(), want)


def test_a_pack_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton too, PyTorch operations compute it."""
    tensors = dense_tensors(torch.bfloat16)
    _, lse = flash_dmattn_func(*tensors, return_lse=True)
    inputs = AttentionInputs(*tensors, scale=24**-0.5, causal=True)
    pack = types.SimpleNamespace(device_type=1, plan_layouts={}, key_mass_biases="none")
    backend = PackBackend(pack)
    want = wanted(tensors, {"is_causal": True})
    asked = []

    class Triton:
        def key_mass(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
            asked.append(inputs)
            return reference.key_mass(inputs)

    monkeypatch.setattr(portable, "why_unavailable", lambda name, device_type: "it is not here")
    assert backend.key_mass_kernel(inputs) == "PyTorch operations"
    assert_near(backend.key_mass(inputs, lse), want)
    monkeypatch.setattr(portable, "why_unavailable", lambda name, device_type: None)
    monkeypatch.setattr(portable, "load", lambda name, device_type, default: Triton())
    assert not asked
    assert_near(backend.key_mass(inputs._replace(given_plan=lse), lse), want)
    assert [inputs.given_plan for inputs in asked] == [None]
    assert backend.key_mass_kernel(inputs) == "key_mass_kernel of Triton"
    # Triton's kernel does not read float64.
    exact = inputs._replace(bias=torch.full((1, 1, 1, KEYS), 1e9, dtype=torch.float64))
    assert backend.key_mass_kernel(exact) == "PyTorch operations"
    assert_near(backend.key_mass(exact, lse), want)
    assert len(asked) == 1


@pytest.mark.parametrize("value", [2, "yes", torch.ones(1)])
def test_mass_of_wrong_types(value: object) -> None:
    tensors, lists = dense_tensors(torch.float32), torch.zeros(2, 1, QUERIES, 3, dtype=torch.int32)
    for options in ({}, {"key_indices": lists}):
        with pytest.raises(TypeError, match="return_key_mass"):
            flash_dmattn_func(*tensors, return_key_mass=value, **options)


@pytest.mark.parametrize("listed", [False, True])
def test_pages_are_refused(listed: bool) -> None:
    query, pages = torch.randn(4, 2, 8), torch.randn(3, 16, 2, 8)
    bounds = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 40], dtype=torch.int32)
    options: dict[str, Any] = {"block_table": torch.tensor([[2, 0, 1]], dtype=torch.int32)}
    if listed:
        options["key_indices"] = torch.zeros(1, 4, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="return_key_mass must be False with block_table"):
        flash_dmattn_varlen_func(
            query, pages, pages, *bounds, 4, 40, return_key_mass=True, **options
        )


def test_explained(target: Target) -> None:
    query, key, value = (placed(t, target) for t in dense_tensors(target.dtypes[-1]))
    told = explain(query, key, value, return_key_mass=True, backend=target.backend)
    assert told.key_mass is not None
    assert f"key mass:  {told.key_mass['kernel']}" in str(told)
    assert explain(query, key, value, backend=target.backend).key_mass is None
    lists = torch.zeros(2, 1, QUERIES, 3, dtype=torch.int32, device=target.device)
    listed = {"key_indices": lists, "backend": target.backend}
    assert explain(query, key, value, return_key_mass=True, **listed).key_mass is not None
    assert explain(query, key, value, **listed).key_mass is None


def test_bound_to_a_backend() -> None:
    tensors = dense_tensors(torch.float32)
    attend = flash_dmattn.flash_dmattn_func_auto("cpu", return_key_mass=True)
    _, mass = attend(*tensors)
    assert torch.equal(mass, mass_of(tensors, Target("cpu", "cpu")))
