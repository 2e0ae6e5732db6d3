# SPDX-License-Identifier: BSD-3-Clause
"""Calls that bypass torch's dispatcher give the operators' results, and bypass it only where it has
nothing to do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.utils._python_dispatch import TorchDispatchMode

from direct import needs_direct_calls
from flash_dmattn import IntervalMask, _core, dispatch_state, dynamic_mask, flash_dmattn_func
from flash_dmattn.backends import pack, select_backend, torch_memory
from flash_dmattn.record import ATTENTION, AttentionInputs
from support import Target, core_without_allocator, rand_bool, randn

BOUNDS = ("start", "end")
MASKS = ("none", "keys", "rows", "intervals")


class Recorder(TorchDispatchMode):
    """Records the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A subclass that takes part in the dispatcher, as DTensor does; pointers do not show it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name().startswith("flash_dmattn::") or func.is_view, func
        unwrapped = (a.inner if isinstance(a, Wrapped) else a for a in args)
        result = func(*unwrapped, **(kwargs or {}))
        return cls(result) if func.is_view else result


def arguments(target: Target, kind: str, *, queries: int = 7) -> dict[str, Any]:
    dtype = target.dtypes[-1]
    shapes = {
        "query": (2, queries, 4, 8),
        "key": (2, 9, 2, 8),
        "value": (2, 9, 2, 8),
        "attn_bias": (2, 2, 1, 9),
    }
    tensors: dict[str, Any] = {
        name: randn(*shape, seed=n).to(target.device, dtype)
        for n, (name, shape) in enumerate(shapes.items())
    }
    if kind in ("keys", "rows"):
        rows = 1 if kind == "keys" else queries
        tensors["attn_mask"] = rand_bool(2, 2, rows, 9).to(target.device)
    elif kind == "intervals":
        tensors["attn_mask"] = IntervalMask.sliding_window(3, 1, queries, 9, device=target.device)
    return {**tensors, "is_causal": True, "return_lse": True, "backend": target.backend}


def equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def operator_is_called(call: Any) -> tuple[Any, bool]:
    with Recorder() as recorder:
        result = call()
    return result, any(name.startswith("flash_dmattn::") for name in recorder.seen)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", MASKS)
def test_equal_the_operator(kind: str, window: int | None, target: Target) -> None:
    if window is not None and kind == "intervals":
        pytest.skip("a window is selected within boolean masks")
    given = arguments(target, kind)
    assert dispatch_state.IS_READABLE
    direct = flash_dmattn_func(**given, window_size=window)
    dispatched, is_called = operator_is_called(
        lambda: flash_dmattn_func(**given, window_size=window)
    )
    assert is_called
    equal(direct, dispatched)
    out = flash_dmattn_func(**{**given, "return_lse": False}, window_size=window)
    assert torch.equal(out, direct[0])


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias", "mask", "start", "end"])
def test_subclasses_are_seen(name: str, pack_target: Target) -> None:
    given = arguments(pack_target, "keys" if name == "mask" else "intervals")
    want = flash_dmattn_func(**given)
    mask = given["attn_mask"]
    if name == "mask":
        given["attn_mask"] = Wrapped(mask)
    elif name in BOUNDS:
        bounds = (getattr(mask, bound) for bound in BOUNDS)
        given["attn_mask"] = IntervalMask(
            *(Wrapped(t) if n == name else t for n, t in zip(BOUNDS, bounds, strict=True))
        )
    else:
        given[name] = Wrapped(given[name])
    equal(flash_dmattn_func(**given), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["attn_bias", "attention_mask"])
def test_selection_sees_subclasses(name: str, causal: bool, pack_target: Target) -> None:
    given = arguments(pack_target, "keys")
    chosen = {"attn_bias": given["attn_bias"], "attention_mask": given["attn_mask"]}
    options = {"window_size": 3, "is_causal": causal, "backend": pack_target.backend}
    want = as_tensors(dynamic_mask(**chosen, **options))
    chosen[name] = Wrapped(chosen[name])
    equal(as_tensors(dynamic_mask(**chosen, **options)), want)


def as_tensors(mask: Tensor | IntervalMask) -> tuple[Tensor, ...]:
    return (mask.start, mask.end) if isinstance(mask, IntervalMask) else (mask,)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias"])
@pytest.mark.parametrize("window", [None, 3])
def test_negations_are_resolved(name: str, window: int | None, target: Target) -> None:
    """A lazy negation is not visible in the strides."""
    given = arguments(target, "keys")
    negated = {**given, name: torch._neg_view(given[name])}
    assert negated[name].is_neg()
    want = flash_dmattn_func(**{**given, name: -given[name]}, window_size=window)
    equal(flash_dmattn_func(**negated, window_size=window), want)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias"])
@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_recorded(name: str, window: int | None, target: Target) -> None:
    given = arguments(target, "keys")
    given[name] = given[name].requires_grad_()
    out, lse = flash_dmattn_func(**given, window_size=window)
    assert out.requires_grad
    (gradient,) = torch.autograd.grad(out.float().sum() + lse.sum(), given[name])
    assert gradient.shape == given[name].shape
    assert gradient.isfinite().all()
    with torch.no_grad():
        out, _ = flash_dmattn_func(**given, window_size=window)
    assert not out.requires_grad
    mask = dynamic_mask(given["attn_bias"], 3, backend=target.backend)
    assert isinstance(mask, Tensor)
    assert not mask.requires_grad


@pytest.mark.parametrize("kind", ["keys", "rows"])
def test_expanded_masks_of_any_rank(kind: str, target: Target) -> None:
    given = arguments(target, kind)
    rows = 1 if kind == "keys" else 7
    masks = [rand_bool(1, 1, rows, 9).to(target.device).expand(2, 4, 7, 9)]
    if kind == "keys":
        per_key = rand_bool(2, 9).to(target.device)
        masks += [per_key, per_key[:1].expand(2, 9), per_key[:, None].expand(2, 4, 9)]
    for mask in masks:
        copy = mask.contiguous()
        four_dimensions = copy.reshape(2, -1, 7 if mask.dim() == 4 else 1, 9)
        want = flash_dmattn_func(**{**given, "attn_mask": four_dimensions})
        equal(flash_dmattn_func(**{**given, "attn_mask": mask}), want)


@pytest.mark.parametrize("name", ["key", "value", "attn_bias", "mask", "intervals"])
def test_other_devices_are_refused(name: str, target: Target) -> None:
    given = arguments(target, "keys" if name == "mask" else "intervals")
    elsewhere = "attn_mask" if name in ("mask", "intervals") else name
    if name == "intervals":
        bounds = given["attn_mask"]
        given["attn_mask"] = IntervalMask(bounds.start.to("meta"), bounds.end.to("meta"))
    else:
        given[elsewhere] = given[elsewhere].to("meta")
    with pytest.raises(ValueError, match=rf"{elsewhere} must be on query's device .* on meta"):
        flash_dmattn_func(**given)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_bias"])
@pytest.mark.parametrize("window", [None, 3])
def test_float64_is_refused(name: str, window: int | None, pack_target: Target) -> None:
    """The exception is a bias per key without selection, which a pack may read."""
    given = arguments(pack_target, "keys")
    given[name] = given[name].double()
    if name == "attn_bias" and window is None:
        given[name] = given[name].expand(-1, -1, given["query"].shape[1], -1).contiguous()
    with pytest.raises(TypeError, match="float64"):
        flash_dmattn_func(**given, window_size=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 7])
def test_window_size_is_dynamic_mask(
    queries: int, causal: bool, masked: bool, target: Target
) -> None:
    """A single query selects a mask per key instead of intervals."""
    given = arguments(target, "keys" if masked else "none", queries=queries)
    given["attn_bias"][..., :4] = 0.5  # ties
    given["attn_bias"][0, 1, 0, 5] = torch.nan
    given["attn_bias"][1, 0, 0, 6:] = -torch.inf
    given["is_causal"] = causal
    got = flash_dmattn_func(**given, window_size=3)
    mask = dynamic_mask(
        given["attn_bias"],
        3,
        causal,
        given.pop("attn_mask", None),
        query_length=queries,
        num_heads=4,
        num_kv_heads=2,
        backend=target.backend,
    )
    assert isinstance(mask, IntervalMask) is causal
    want = flash_dmattn_func(**given, attn_mask=mask)
    if queries == 1 and causal:
        equal(got, flash_dmattn_func(**given, attn_mask=mask.to_bool(queries)))
        if target.is_pack and target.has_kernels_of_gpu:  # the kernel of key masks
            torch.testing.assert_close(got, want, equal_nan=True)
            return
    equal(got, want)


@pytest.fixture
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch):
    """Fill the memory of torch.empty with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 7, 9), (2, 0, 9), (2, 7, 0), (2, 0, 0)])
def test_sizes_of_zero(batch: int, queries: int, keys: int, kind: str, target: Target) -> None:
    """All memory is written: rows without keys are 0, and their lse is -inf."""
    given = arguments(target, "none")
    given["query"] = given["query"][:batch, :queries]
    given["key"], given["value"] = (given[n][:batch, :keys] for n in ("key", "value"))
    given["attn_bias"] = given["attn_bias"][:batch, :, :, :keys]
    if kind in ("keys", "rows"):
        rows = 1 if kind == "keys" else queries
        given["attn_mask"] = rand_bool(batch, 2, rows, keys).to(target.device)
    elif kind == "intervals":
        given["attn_mask"] = IntervalMask.sliding_window(3, 1, queries, keys, device=target.device)
    for window in (None, 3) if kind != "intervals" else (None,):
        for causal in (False, True):
            given["is_causal"] = causal
            out, lse = flash_dmattn_func(**given, window_size=window)
            assert out.shape == given["query"].shape
            assert lse.shape == (batch, 4, queries)
            if keys == 0:
                assert not out.any()
                assert lse.isneginf().all()


@needs_direct_calls
def test_the_older_vmap_is_seen(target: Target) -> None:
    states = []

    def look(x: Tensor) -> Tensor:
        states.append(dispatch_state.is_idle((x,)))
        return x

    x = torch.zeros(2, 3, device=target.device)
    _vmap(look)(x)
    assert states == [False]
    assert dispatch_state.is_idle((x,))


@needs_direct_calls
@pytest.mark.parametrize("is_older_torch", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_an_allocator_that_refuses(
    kind: str, is_older_torch: bool, pack_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch then allocates the memory and raises its own errors; an older torch has no allocator
    that the core can call.
    """
    given = arguments(pack_target, kind)
    window = None if kind == "intervals" else 3
    want = flash_dmattn_func(**given, window_size=window)
    if is_older_torch:
        monkeypatch.setattr(torch_memory, "CORE_READS_TENSORS", False)
    with core_without_allocator() as refused:
        equal(flash_dmattn_func(**given, window_size=window), want)
    # Other selections are a part of the call.
    assert refused.call_count == (2 if kind == "rows" else 1)


def test_the_core_does_nothing_without_an_allocator(pack_target: Target) -> None:
    """Tensors as tuples, as with an older torch, have no allocator."""
    given = arguments(pack_target, "keys")
    backend = select_backend(torch.device(pack_target.device), pack_target.backend)
    assert isinstance(backend, pack.PackBackend)
    names = ("query", "key", "value", "attn_mask")
    tensors = (*(as_tuple(given[name]) for name in names), *(None,) * 8)
    settings = (0, 0, 0.3, False, 0.0, False, 0, -1, 0, 0, False)
    call = _core.Call((*tensors, *settings))  # type: ignore[arg-type]
    assert call.attend(backend.pack, 1, pack._ALLOCATOR, False) is None
    assert call.keep(backend.pack, 1, pack._ALLOCATOR, False) is None
    assert call.fields == (*tensors, *settings)
    keep = torch.ones(2, 2, 1, 9, dtype=torch.bool, device=pack_target.device)
    chosen = (as_tuple(given["attn_bias"]), None, None, None, 2, 4, 2, 7, 9, 0, False, 0, 0)
    results = (as_tuple(keep),)
    assert not _core.select(backend.pack, 1, results, chosen)  # type: ignore[arg-type]
    assert keep.all()


@pytest.mark.parametrize("size", [0, 1, 3])
def test_results_are_contiguous(size: int, pack_target: Target) -> None:
    """Results are contiguous for any strides of the arguments. A size of 0 or 1 makes any stride
    count as contiguous, and torch.empty_like would copy such strides.
    """
    shapes = {
        "query": (size, size, 2, 8),
        "key": (size, size, 1, 8),
        "value": (size, size, 1, 8),
        "attn_bias": (size, 2, 1, size),
        "sink": (2,),
    }
    leaves = {}
    for name, shape in shapes.items():
        backwards = randn(*reversed(shape), dtype=pack_target.dtypes[0])
        axes = reversed(range(len(shape)))
        leaves[name] = backwards.to(pack_target.device).permute(*axes).requires_grad_()
    out, lse = flash_dmattn_func(**leaves, return_lse=True)
    gradients = torch.autograd.grad(out.sum() + lse.sum(), tuple(leaves.values()))
    for result in (out, lse, *gradients):
        assert result.stride() == torch.empty(result.shape).stride()


@needs_direct_calls
def test_gradients_are_of_tensors_of_a_call(pack_target: Target) -> None:
    backend = select_backend(torch.device(pack_target.device), pack_target.backend)
    assert isinstance(backend, pack.PackBackend)
    x = randn(1, 1, 1, 8, dtype=pack_target.dtypes[0]).to(pack_target.device)
    inputs = AttentionInputs(x, x, x)
    saved, call = backend.keep(backend.call(inputs), need_lse=True)
    assert call.fields == (*(None,) * ATTENTION.tensor_count, *inputs[ATTENTION.tensor_count :])
    given = backend.pack, 1, pack._ALLOCATOR
    for of_call in (call, backend.call(inputs)):
        flags = (True, False, False, False, False, False)
        query, key, *more = of_call.differentiate(*given, saved, x, None, flags)
        assert query.shape == x.shape
        assert (key, *more) == (None,) * 5
        with pytest.raises(ValueError, match="gradient of bias is wanted, but the call has no"):
            of_call.differentiate(*given, saved, x, None, (True,) * 4)
        with pytest.raises(TypeError, match="must be a tuple of 12 tensors of a record, out, lse"):
            of_call.differentiate(*given, saved[1:], x, None, flags)


def test_a_call_that_is_kept_keeps_no_tensors(pack_target: Target) -> None:
    given = arguments(pack_target, "keys")
    leaf, seen = given["query"].requires_grad_(), []
    given["query"] = leaf * 1
    seen.append(weakref.ref(given["query"]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        out, _ = flash_dmattn_func(**given)
    given.clear()
    assert [ref() for ref in seen] == [None]
    out.float().sum().backward()
    assert leaf.grad is not None


UNPACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "copies": torch.clone,
    "subclasses": lambda t: Wrapped(t),
    "negations": lambda t: torch._neg_view(-t) if t.is_floating_point() else t,
    "other strides": lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.dim() > 1 else t,
}


@pytest.mark.parametrize("unpack", UNPACKED.values(), ids=UNPACKED)
@pytest.mark.parametrize("kind", [*MASKS, "window"])
def test_saved_tensors_that_come_back_as_others(
    kind: str, unpack: Callable[[Tensor], Tensor], pack_target: Target
) -> None:
    given = {**arguments(pack_target, kind), "deterministic": True, "return_lse": False}
    given["window_size"] = 3 if kind == "window" else None
    leaves = tuple(given[n].requires_grad_() for n in ("query", "key", "value", "attn_bias"))
    out = flash_dmattn_func(**given)
    want = torch.autograd.grad(out, leaves, torch.ones_like(out))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        out = flash_dmattn_func(**given)
        got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    equal(got, want)


def test_parameters_whose_memory_has_moved(target: Target) -> None:
    """`module.to` moves the memory without autograd's notice."""
    given = {**arguments(target, "keys"), "deterministic": True}
    leaves = tuple(given[n].requires_grad_() for n in ("query", "key", "value", "attn_bias"))
    grads = []
    for moves in (False, True):
        out, _ = flash_dmattn_func(**given)
        kept = [leaf.data for leaf in leaves]
        if moves:
            for leaf, old in zip(leaves, kept, strict=True):
                leaf.data = old.clone()
                old.fill_(torch.nan)
        grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    equal(*grads)


def as_tuple(tensor: Tensor) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_memory, "CORE_READS_TENSORS", False)
        described: tuple[Any, ...] = torch_memory.to_core(tensor)
    return described


@pytest.mark.parametrize("way", ["direct", "refused", "recorded"])
@pytest.mark.parametrize("kind", [*MASKS, "window"])
def test_an_lse_that_nobody_asks_for(
    kind: str, way: str, pack_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An lse that is not returned is kept behind the plan, where the gradients find it."""
    given = {**arguments(pack_target, kind), "deterministic": True}
    given["window_size"] = 3 if kind == "window" else None
    names = ("query", "key", "value", "attn_bias")
    leaves = tuple(given[name].requires_grad_() for name in names)
    with_lse, _ = flash_dmattn_func(**given)
    want = torch.autograd.grad(with_lse, leaves, torch.ones_like(with_lse))
    out = flash_dmattn_func(**{**given, "return_lse": False})
    if way == "refused":
        monkeypatch.setattr(_core.Call, "differentiate", lambda *_: None)
    with torch.profiler.profile() if way == "recorded" else contextlib.nullcontext():
        got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    equal((out, *got), (with_lse, *want))
