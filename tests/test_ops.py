# SPDX-License-Identifier: BSD-3-Clause
"""The operators under opcheck, torch.compile and checkpointing, and autograd's requirements."""

from __future__ import annotations

import io
import shutil

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn import (
    IntervalMask,
    attention_reference,
    dispatch_state,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
)
from support import Target, rand_bool, randn

OPS = torch.ops.flash_dmattn


def tensors(target: Target, *, keys: int = 9, requires_grad: bool = True) -> list[Tensor]:
    shapes = [(2, 7, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8), (2, 2, 1, keys)]
    return [
        randn(*shape, seed=n).to(target.device, target.dtypes[0]).requires_grad_(requires_grad)
        for n, shape in enumerate(shapes)
    ]


def forward_arguments(target: Target, kind: str) -> tuple[object, ...]:
    query, key, value, bias = tensors(target)
    mask = start = end = cu_q = cu_k = None
    longest_q = longest_k = 0
    if kind == "keys":
        mask = rand_bool(2, 1, 1, 9).to(target.device)
    elif kind == "rows":
        mask = rand_bool(2, 4, 7, 9).to(target.device)
    elif kind == "intervals":
        intervals = IntervalMask.sliding_window(2, 1, 7, 9)
        start, end = intervals.start.to(target.device), intervals.end.to(target.device)
    elif kind == "varlen":
        query, key, value = (t.detach().flatten(0, 1).requires_grad_() for t in (query, key, value))
        bias = bias.detach().transpose(0, 1).reshape(2, 1, 18).requires_grad_()
        cu_q, cu_k = (
            torch.tensor(b, dtype=torch.int32, device=target.device)
            for b in ([0, 4, 14], [0, 10, 18])
        )
        longest_q, longest_k = 10, 10
    settings = (longest_q, longest_k, 0.3, True, 0.0, True, 0, -1, 0, 0, False, target.backend)
    sink = randn(4, seed=5).to(target.device).requires_grad_()
    return (query, key, value, mask, start, end, bias, cu_q, cu_k, None, None, sink, *settings)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals", "varlen"])
def test_opcheck_of_forward(kind: str, keeps: bool, target: Target) -> None:
    torch.library.opcheck(OPS.attention_forward.default, (*forward_arguments(target, kind), keeps))


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals", "varlen"])
def test_gradients_of_a_call_that_kept_nothing(kind: str, planned: bool, target: Target) -> None:
    gradients = []
    for keeps in (True, False):
        arguments = list(forward_arguments(target, kind))
        if planned:
            plain = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
            arguments[10] = OPS.attention_plan(*plain)
        out, _, kept = OPS.attention_forward(*arguments, keeps)
        assert keeps or kept.numel() == 0
        leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
        gradients.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_a_program_exported_without_them(target: Target) -> None:
    class Model(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            return flash_dmattn_func(query, key, value, attn_mask=mask, backend=target.backend)

    given = [t.detach() for t in tensors(target)[:3]]
    mask = rand_bool(2, 1, 1, 9).to(target.device)
    program = torch.export.export(Model(), (*given, mask)).module()
    gradients = []
    for call in (Model(), program):
        leaves = [t.clone().requires_grad_() for t in given]
        gradients.append(torch.autograd.grad(call(*leaves, mask).sum(), leaves))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_views_taken_before_their_base_was_written(target: Target) -> None:
    """While Dynamo traces them, they do not require a gradient."""
    mask = rand_bool(1, 1, 1, 9).to(target.device)

    def call(x: Tensor) -> Tensor:
        all_inputs = torch.empty(3, 1, 9, 2, 8, dtype=x.dtype, device=x.device)
        query, key, value = all_inputs[0], all_inputs[1], all_inputs[2]
        all_inputs.copy_(x)
        return flash_dmattn_func(query, key, value, attn_mask=mask, backend=target.backend)

    torch.compiler.reset()
    x = randn(3, 1, 9, 2, 8).to(target.device, target.dtypes[0]).requires_grad_()
    compiled = torch.compile(call, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    (want,) = torch.autograd.grad(call(x).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals", "varlen"])
def test_opcheck_of_plans(kind: str, target: Target) -> None:
    inputs = [a.detach() if isinstance(a, Tensor) else a for a in forward_arguments(target, kind)]
    torch.library.opcheck(OPS.attention_plan.default, tuple(inputs))
    plan = OPS.attention_plan(*inputs)
    inputs = [*inputs[:10], plan, *inputs[11:]]
    torch.library.opcheck(OPS.attention_forward.default, (*inputs, True))
    out, lse, made = OPS.attention_forward(*inputs, True)
    # It holds only the rounding remainder of out, and no plan.
    low = 0 if out.dtype == torch.float32 else -(-out.nbytes // 256) * 256
    assert made.numel() <= low
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    torch.library.opcheck(
        OPS.attention_backward.default,
        (*cotangents, out, lse, made, *inputs, *(inputs[6] is not None,) * 5),
    )


def test_opcheck_of_a_plan_in_pages_of_its_own(pack_target: Target) -> None:
    query, key, value = (randn(1, 1200, 1, 8, seed=n).to(pack_target.device) for n in range(3))
    query, key, value = (t.to(pack_target.dtypes[0]) for t in (query, key, value))
    mask = rand_bool(1, 1, 1200, 1200).to(pack_target.device)
    settings = (0, 0, 0.3, True, 0.0, True, 0, -1, 0, 0, False, pack_target.backend)
    arguments = (query, key, value, mask, *(None,) * 8, *settings, True)
    assert OPS.attention_forward(*arguments)[2].numel() > 1 << 17
    torch.library.opcheck(OPS.attention_forward.default, arguments)


@pytest.mark.parametrize(
    "wanted",
    [(True,) * 5, (False, False, False, True, False), (True, False, True, False, True)],
)
def test_opcheck_of_backward(wanted: tuple[bool, ...], target: Target) -> None:
    inputs = [a.detach() if isinstance(a, Tensor) else a for a in forward_arguments(target, "rows")]
    out, lse, plan = OPS.attention_forward(*inputs, True)
    torch.library.opcheck(
        OPS.attention_backward.default,
        (torch.randn_like(out), torch.randn_like(lse), out, lse, plan, *inputs, *wanted),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck_of_selection(causal: bool, target: Target) -> None:
    bias = tensors(target)[3].detach()
    mask = rand_bool(2, 1, 1, 9).to(target.device)
    arguments = (bias, mask, None, None, 2, 4, 2, 7, 9, 3, causal, 2, 1, target.backend)
    op = OPS.select_intervals if causal else OPS.select_keep
    torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals", "varlen"])
def test_plan_has_the_bytes_that_its_formula_says(kind: str, pack_target: Target) -> None:
    from flash_dmattn.backends import select_backend, torch_memory
    from flash_dmattn.record import AttentionInputs

    inputs = AttentionInputs(*forward_arguments(pack_target, kind)[:-1])
    backend = select_backend(inputs.query.device, pack_target.backend)
    problem = torch_memory._problem(backend.pack, 1, inputs)
    assert backend.plan_bytes(inputs) == problem.plan_bytes


def attention(query, key, value, bias, kind, backend):
    mask, window, places = None, None, {}
    if kind == "mask":
        mask = torch.arange(key.shape[1], device=key.device) % 3 != 1
        mask = mask.expand(query.shape[0], 1, query.shape[1], -1)
    elif kind == "intervals":
        mask = IntervalMask.sliding_window(3, 0, query.shape[1], key.shape[1], device=query.device)
    elif kind == "window":
        window = 4
    elif kind == "last":
        window, places = 3, {"keep_last": 2, "keep_first": 1}
    return flash_dmattn_func(
        query,
        key,
        value,
        mask,
        bias,
        is_causal=True,
        window_size=window,
        **places,
        return_lse=True,
        backend=backend,
    )


def packed_attention(query, key, value, bias, kind, backend):
    bounds = (
        torch.arange(3, device=query.device, dtype=torch.int32) * t.shape[1] for t in (query, key)
    )
    return flash_dmattn_varlen_func(
        *(t.flatten(0, 1) for t in (query, key, value)),
        *bounds,
        query.shape[1],
        key.shape[1],
        is_causal=True,
        attn_bias=bias.transpose(0, 1).reshape(bias.shape[1], 1, -1),
        window_size=4,
        keep_last=2 if kind == "packed last" else 0,
        return_lse=True,
        backend=backend,
    )


def gradients(function, inputs: list[Tensor], *settings: object) -> list[Tensor]:
    out, lse = function(*inputs, *settings)
    loss = (out.float() ** 2).sum() + lse.exp().sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "kind", ["none", "mask", "intervals", "window", "last", "packed", "packed last"]
)
def test_compiles_whole(kind: str, dynamic: bool, target: Target) -> None:
    torch._dynamo.reset()
    function = packed_attention if "packed" in kind else attention
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for keys in (9, 12) if dynamic else (9,):
        inputs = tensors(target, keys=keys)
        got = gradients(compiled, inputs, kind, target.backend)
        want = gradients(function, inputs, kind, target.backend)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_compiles_with_inductor(pack_target: Target) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True)
    inputs = tensors(pack_target)
    got = gradients(compiled, inputs, "window", pack_target.backend)
    want = gradients(attention, inputs, "window", pack_target.backend)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_interval_masks_enter_and_leave_compiled_code(target: Target) -> None:
    torch._dynamo.reset()

    def select(bias: Tensor) -> IntervalMask:
        return dynamic_mask(bias, 3, True, backend=target.backend)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask) -> Tensor:
        return flash_dmattn_func(query, key, value, mask, backend=target.backend)

    query, key, value, bias = tensors(target, requires_grad=False)
    compile_whole = {"fullgraph": True, "backend": "aot_eager"}
    key, value, bias = key[:, :7], value[:, :7], bias[..., :7]
    mask = torch.compile(select, **compile_whole)(bias)
    assert isinstance(mask, IntervalMask)
    assert torch.equal(mask.end, select(bias).end)
    got = torch.compile(attend, **compile_whole)(query, key, value, mask)
    torch.testing.assert_close(got, attend(query, key, value, mask))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_check_the_query_length(dynamic: bool, target: Target) -> None:
    torch._dynamo.reset()
    query, key, value, _ = tensors(target, requires_grad=False)

    def attend(query: Tensor, mask: IntervalMask) -> Tensor:
        return flash_dmattn_func(query, key, value, mask, backend=target.backend)

    def narrowed(query: Tensor, mask: IntervalMask) -> tuple[Tensor, IntervalMask]:
        both = mask & IntervalMask.sliding_window(2, 1, query.shape[1], 9, device=query.device)
        return attend(query, both), both

    options = {"backend": "aot_eager", "dynamic": dynamic}
    compiled = torch.compile(narrowed, fullgraph=True, **options)
    for rows in (7, 5, 4):
        mask = IntervalMask.sliding_window(3, 0, rows, 9, device=target.device)
        got, both = compiled(query[:, :rows], mask)
        torch.testing.assert_close(got, narrowed(query[:, :rows], mask)[0])
        assert both.query_length == rows
        with pytest.raises(ValueError, match=f"attn_mask: .*query_length={rows} cannot mask 3 q"):
            torch.compile(attend, **options)(query[:, :3], mask)


@pytest.mark.parametrize("kind", ["window", "last"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, kind: str, target: Target) -> None:
    inputs = tensors(target)

    def loss(*arguments: Tensor) -> Tensor:
        out, lse = attention(*arguments, kind, target.backend)
        return out.float().sum() + lse.sum()

    want = torch.autograd.grad(loss(*inputs), inputs)
    checkpoint(loss, *inputs, use_reentrant=use_reentrant).backward()
    for tensor, gradient in zip(inputs, want, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_double_backward_is_refused(kernel_target: Target) -> None:
    target, inputs = kernel_target, tensors(kernel_target)
    out, _ = attention(*inputs, "none", target.backend)
    (first,) = torch.autograd.grad((out.float() ** 2).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.autograd.grad(first.sum(), inputs[0])


def test_plan_has_no_gradient(target: Target) -> None:
    out, lse, plan = OPS.attention_forward(*forward_arguments(target, "rows"), True)
    assert out.requires_grad
    assert lse.requires_grad
    assert not plan.requires_grad


def test_calls_without_gradients_avoid_the_dispatcher(target: Target) -> None:
    """They give the same results, and a dispatch mode still sees the operator."""
    inputs = tensors(target, requires_grad=False)

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.append(func.name())
            if func is OPS.attention_forward.default:
                *_, keeps = args
                assert not keeps
            return func(*args, **(kwargs or {}))

    direct = attention(*inputs, "none", target.backend)
    with Recorder() as recorder:
        dispatched = attention(*inputs, "none", target.backend)
    assert "flash_dmattn::attention_forward" in recorder.seen
    assert dispatch_state.IS_READABLE
    for one, other in zip(direct, dispatched, strict=True):
        assert torch.equal(one, other)


def test_fake_tensors_take_the_fake_kernel(target: Target) -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        inputs = [mode.from_tensor(t) for t in tensors(target)]
        out, lse = attention(*inputs, "none", target.backend)
        assert out.shape == inputs[0].shape
        assert lse.shape == (2, 4, 7)
        assert lse.dtype == torch.float32
    out.sum()  # outside of the mode, on a tensor without data


@pytest.mark.parametrize("counts", [{}, {"window_size": 2, "keep_last": 3, "keep_first": 1}])
def test_exports(counts: dict[str, int], target: Target) -> None:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            return flash_dmattn.flash_dmattn_func(
                query, key, value, None, bias, is_causal=True, backend=target.backend, **counts
            )

    inputs = tuple(tensors(target, requires_grad=False))
    program = torch.export.export(Module(), inputs)
    torch.testing.assert_close(program.module()(*inputs), Module()(*inputs))


@pytest.mark.parametrize("query_length", [7, None])
def test_exports_with_intervals_as_input(query_length: int | None, target: Target) -> None:
    class Module(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: IntervalMask) -> Tensor:
            return flash_dmattn_func(query, key, value, mask, backend=target.backend)

    window = IntervalMask.sliding_window(3, 0, 7, 9, device=target.device)
    mask = IntervalMask(window.start, window.end, query_length=query_length)
    inputs = (*tensors(target, requires_grad=False)[:3], mask)
    file = io.BytesIO()
    torch.export.save(torch.export.export(Module(), inputs), file)
    file.seek(0)
    program = torch.export.load(file)
    torch.testing.assert_close(program.module()(*inputs), Module()(*inputs))


class ReadsLengths(torch.nn.Module):
    """Calls that read the lengths of packed sequences where they are not given."""

    def forward(self, tokens: Tensor, pages: Tensor, table: Tensor, bounds: Tensor) -> list[Tensor]:
        out, lse = attention_reference(
            tokens, tokens, tokens, cu_seqlens_q=bounds, cu_seqlens_k=bounds
        )
        bias = tokens[:, :, 0].t().unsqueeze(1)
        selected = dynamic_mask(bias, 2, True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        documents = IntervalMask.documents(cu_seqlens=bounds)
        paged = flash_dmattn_varlen_func(
            tokens, pages, pages, bounds, bounds, 6, 6, is_causal=True, block_table=table,
            window_size=0, keep_last=2,
        )  # fmt: skip
        assert isinstance(selected, IntervalMask)
        assert isinstance(paged, Tensor)
        return [out, lse, selected.start, selected.end, documents.start, documents.end, paged]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_read_lengths(strict: bool) -> None:
    tensors = randn(6, 2, 8), randn(3, 4, 2, 8), torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    first, second = (torch.tensor([0, n, 6], dtype=torch.int32) for n in (2, 5))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        program = torch.export.export(ReadsLengths(), (*tensors, first), strict=strict)
    want = ReadsLengths()(*tensors, second)
    torch.testing.assert_close(program.module()(*tensors, second), want)
