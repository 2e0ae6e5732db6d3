# SPDX-License-Identifier: BSD-3-Clause
"""Recorders and other layers between a call and its kernel see registered operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from direct import HAS_DIRECT_CALLS, needs_direct_calls
from flash_dmattn import (
    dispatch_state,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    make_plan,
)
from support import Target, randn

FORWARD = "flash_dmattn::attention_forward"
SELECTIONS = ("flash_dmattn::select_intervals", "flash_dmattn::select_keep")
PLAN = "flash_dmattn::attention_plan"
Call = Callable[..., Tensor]


def tensors(target: Target, seed: int = 0, *, keys: int = 20) -> tuple[Tensor, ...]:
    shapes = [(2, keys, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8), (2, 2, 1, keys)]
    return tuple(
        randn(*shape, seed=seed + n).to(target.device, target.dtypes[0])
        for n, shape in enumerate(shapes)
    )


def calls(target: Target) -> dict[str, tuple[Call, set[str]]]:
    """Return functions of query, key, value and bias, with the operators of each."""
    options: dict[str, Any] = {"backend": target.backend}

    def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, value, None, bias, is_causal=True, **options)

    def window(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        given = (query, key, value, None, bias)
        return flash_dmattn_func(*given, is_causal=True, window_size=5, **options)

    def last(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        given = (query, key, value, None, bias)
        counts = {"window_size": 3, "keep_last": 4, "keep_first": 1}
        return flash_dmattn_func(*given, is_causal=True, **counts, **options)

    def keys(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, value, bias[:, 0] > 0, bias, window_size=5, **options)

    def varlen(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        bounds = torch.tensor([0, 7, 20], dtype=torch.int32, device=query.device)
        packed = (query[0], key[0], value[0], bounds, bounds, 13, 13)
        given = {"is_causal": True, "attn_bias": bias[0], "window_size": 5}
        return flash_dmattn_varlen_func(*packed, **given, **options)

    def planned(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        mask = dynamic_mask(bias, 5, num_heads=4, num_kv_heads=2, **options)
        plan = make_plan(query, key, mask, **options)
        first = flash_dmattn_func(query, key, value, None, bias, plan=plan)
        return flash_dmattn_func(first, key, value, plan=plan)

    return {
        "plain": (plain, {FORWARD}),
        "window": (window, {FORWARD, SELECTIONS[0]}),
        "last": (last, {FORWARD, SELECTIONS[0]}),
        "keys": (keys, {FORWARD, SELECTIONS[1]}),
        "varlen": (varlen, {FORWARD, SELECTIONS[0]}),
        "planned": (planned, {FORWARD, PLAN, SELECTIONS[1]}),
    }


KINDS = ("plain", "window", "last", "keys", "varlen", "planned")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_jit_trace(kind: str, with_gradients: bool, pack_target: Target) -> None:
    """The graph holds operators and also computes other inputs than the traced ones."""
    call, operators = calls(pack_target)[kind]
    inputs = [t.requires_grad_(with_gradients) for t in tensors(pack_target)]
    traced = torch.jit.trace(call, tuple(inputs), check_trace=False)
    found = {node.kind() for node in traced.graph.nodes()}
    assert operators == {kind for kind in found if kind.startswith("flash_dmattn::")}
    for seed in (0, 10):
        inputs = [t.requires_grad_(with_gradients) for t in tensors(pack_target, seed)]
        junk = [torch.full_like(inputs[0], torch.nan) for _ in range(20)]
        del junk  # memory that is not written then holds NaN
        got, want = traced(*inputs), call(*inputs)
        torch.testing.assert_close(got, want)
        if with_gradients:
            for one, other in zip(*(gradients(out, inputs) for out in (got, want)), strict=True):
                torch.testing.assert_close(one, other)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out.float().square().sum(), inputs))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traces_of_another_length(pack_target: Target) -> None:
    """A selection keeps the sizes of the trace, which is a limit of torch.jit.trace."""
    named = calls(pack_target)
    plain, window = (
        torch.jit.trace(named[kind][0], tensors(pack_target), check_trace=False)
        for kind in ("plain", "window")
    )
    inputs = tensors(pack_target, 4, keys=31)
    torch.testing.assert_close(plain(*inputs), named["plain"][0](*inputs))
    with pytest.raises(RuntimeError, match=r"attn_bias has shape \(2, 2, 1, 31\), but"):
        window(*inputs)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_make_fx(kind: str, pre_dispatch: bool, pack_target: Target) -> None:
    call, operators = calls(pack_target)[kind]
    graph = make_fx(call, pre_dispatch=pre_dispatch)(*tensors(pack_target))
    found = {str(node.target).removesuffix(".default") for node in graph.graph.nodes}
    assert {name.replace("::", ".") for name in operators} <= found
    inputs = tensors(pack_target, 10)
    torch.testing.assert_close(graph(*inputs), call(*inputs))


class FunctionRecorder(TorchFunctionMode):
    """Records the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.add(func.name() if isinstance(func, torch._ops.OpOverload) else "")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_function_modes(kind: str, with_gradients: bool, pack_target: Target) -> None:
    call, operators = calls(pack_target)[kind]
    inputs = [t.requires_grad_(with_gradients) for t in tensors(pack_target)]
    with FunctionRecorder() as recorder:
        out = call(*inputs)
    assert operators <= recorder.seen
    torch.testing.assert_close(out, call(*inputs))


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_profilers(kind: str, with_gradients: bool, pack_target: Target) -> None:
    call, operators = calls(pack_target)[kind]
    inputs = [t.requires_grad_(with_gradients) for t in tensors(pack_target)]
    with torch.profiler.profile() as profile:
        out = call(*inputs)
        if with_gradients:
            gradients(out, inputs)
    seen = {event.key for event in profile.key_averages()}
    assert operators <= seen
    assert not with_gradients or "flash_dmattn::attention_backward" in seen


@pytest.mark.parametrize("kind", KINDS)
def test_saved_tensors_hooks_and_anomaly_mode(kind: str, pack_target: Target) -> None:
    call, _ = calls(pack_target)[kind]
    inputs = [t.requires_grad_() for t in tensors(pack_target)]
    want = gradients(call(*inputs), inputs)
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with (
        torch.autograd.detect_anomaly(check_nan=True),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        out = call(*inputs)
    assert tuple(out.shape) in packed
    for one, other in zip(gradients(out, inputs), want, strict=True):
        torch.testing.assert_close(one, other)


@contextlib.contextmanager
def functionalization() -> Iterator[None]:
    torch._enable_functionalization(reapply_views=False)
    try:
        yield
    finally:
        torch._disable_functionalization()


def included_key() -> contextlib.AbstractContextManager[Any]:
    """Include an unused dispatch key; torch 2.11's guard for one key leaves a part behind."""
    keys = torch._C._dispatch_tls_local_include_set().add(torch._C.DispatchKey.Meta)
    return torch._C._ForceDispatchKeyGuard(keys, torch._C._dispatch_tls_local_exclude_set())


# Other states of torch. (Tracing and modes are above; fake tensors, subclasses and the older vmap
# in test_direct_calls.py; torch.func in test_transforms.py.)
STATES = {
    "Python dispatcher": enable_python_dispatcher,
    "functionalization": functionalization,
    "forward mode": forward_ad.dual_level,
    "an included key": included_key,
    "emit_itt": lambda: torch.autograd.profiler.emit_itt(),
    "profiler": lambda: torch.autograd.profiler.profile(),
}
IDLE_STATES = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "a default device": lambda: torch.device("cpu"),
}


@needs_direct_calls
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_states_that_need_the_dispatcher(state: Any) -> None:
    x = torch.zeros(2)
    assert dispatch_state.IS_READABLE
    try:
        entered = state()
        with entered:
            assert not dispatch_state.is_idle((x,))
    except (RuntimeError, ImportError) as error:
        pytest.skip(str(error))
    assert dispatch_state.is_idle((x,))


@needs_direct_calls
@pytest.mark.parametrize("state", IDLE_STATES.values(), ids=IDLE_STATES)
def test_states_that_do_not(state: Any) -> None:
    x = torch.zeros(2)
    with state():
        assert dispatch_state.is_idle((x,))


def test_a_mode_inside_of_a_default_device() -> None:
    x = torch.zeros(2)
    with torch.device("cpu"), FunctionRecorder(), torch.device("cpu"):
        assert not dispatch_state.is_idle((x,))


def test_other_devices_have_the_dispatcher() -> None:
    """Vendors of other devices may register kernels for our operators."""
    assert not dispatch_state.is_idle((torch.zeros(2, device="meta"),))


@pytest.mark.parametrize("key", ["CPU", "AutogradCPU", "AutocastCPU"])
def test_kernels_of_others_are_called(key: str) -> None:
    query, key_, value, _ = tensors(Target("cpu", "cpu"))
    results = (torch.full_like(query, 7.0), torch.zeros(2, 4, 20), torch.zeros(0).byte())
    autocast = torch.autocast("cpu") if key.startswith("Autocast") else contextlib.nullcontext()
    want = flash_dmattn_func(query, key_, value)
    with torch.library._scoped_library("flash_dmattn", "IMPL") as library:
        library.impl("attention_forward", lambda *_: results, key)
        assert not dispatch_state.is_idle((query,))
        with autocast:
            assert (flash_dmattn_func(query, key_, value) == 7.0).all()
    assert dispatch_state.is_idle((query,)) == HAS_DIRECT_CALLS
    assert torch.equal(flash_dmattn_func(query, key_, value), want)


def test_nothing_is_recorded_below_autograd(pack_target: Target) -> None:
    """Dispatch modes and kernels run there, on tensors that may require a gradient."""
    query, key, value, _ = (t.requires_grad_() for t in tensors(pack_target))
    with torch._C._AutoDispatchBelowAutograd():
        out = flash_dmattn_func(query, key, value, backend=pack_target.backend)
        assert not out.requires_grad
    assert flash_dmattn_func(query, key, value, backend=pack_target.backend).requires_grad


def test_results_need_no_filled_memory(pack_target: Target) -> None:
    """The core's scratch memory is never filled; each number is written before it is read."""
    call, _ = calls(pack_target)["window"]
    inputs = tensors(pack_target)
    want = call(*inputs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        torch.testing.assert_close(call(*inputs), want)
    finally:
        torch.use_deterministic_algorithms(False)


class Attention(torch.nn.Module):
    """An exported module."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_dmattn_func(query, key, value)


def test_symbolic_tracing_is_explained() -> None:
    with pytest.raises(TypeError, match=r"query must .* a torch\.fx\.Proxy: .* torch\.fx\.wrap"):
        torch.fx.symbolic_trace(Attention())


@pytest.mark.filterwarnings("ignore")
def test_onnx_export_names_the_operator() -> None:
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match=FORWARD):
        torch.onnx.export(Attention(), tensors(Target("cpu", "cpu"))[:3], "unused", dynamo=False)
