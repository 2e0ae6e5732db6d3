# SPDX-License-Identifier: BSD-3-Clause
"""The structs that a pack receives, for every form of the arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flash_dmattn import _core

from .core_calls import (
    HK,
    OPTIONS,
    SELECTION,
    TOTAL_K,
    TOTAL_Q,
    B,
    Call,
    D,
    H,
    K,
    Q,
    batch_call,
    paged_call,
    record,
    to_core,
    varlen_call,
    zeros,
)
from .core_packs import CPU, CUDA, Recording, as_tuple, compile_pack, compiler


def test_batch_problem(pack: _core.Pack, recording: Recording) -> None:
    query = zeros(B, H, Q, 2 * D).transpose(0, 2, 1, 3)[..., ::2]
    key, value = zeros(B, K, HK, D)[:, ::-1], np.broadcast_to(zeros(B, 1, HK, D), (B, K, HK, D))
    out, lse = zeros(B, Q, H, D), zeros(B, Q, H).transpose(0, 2, 1)
    call = batch_call(query=query, key=key, value=value, causal=True, softcap=3.0, threads=6)
    record(call.problem(pack), out, lse)

    problem = recording.problem
    sizes = (problem.batch, problem.heads, problem.kv_heads, problem.head_dim)
    assert sizes == (B, H, HK, D)
    assert (problem.queries, problem.keys) == (Q, K)
    assert (problem.scale, problem.softcap, problem.flags) == (0.5, 3.0, 1)
    assert (problem.context.threads, problem.context.stream) == (6, None)
    qd = 2 * D
    assert problem.q.summary() == (query.ctypes.data, (B, Q, H, D), (H * Q * qd, qd, Q * qd, 2))
    assert problem.k.summary() == (key.ctypes.data, key.shape, (K * HK * D, -HK * D, D, 1))
    assert problem.v.summary() == (value.ctypes.data, value.shape, (HK * D, 0, D, 1))
    for name in ["mask", "start", "end", "bias", "cu_seqlens_q", "cu_seqlens_k", "block_table"]:
        assert getattr(problem, name).absent, name
    forward = recording.forward
    assert forward.out.summary() == (out.ctypes.data, out.shape, (Q * H * D, H * D, D, 1))
    assert forward.lse.summary() == (lse.ctypes.data, (B, H, Q, 1), (Q * H, 1, H, 0))
    assert (recording.workspace.data, recording.workspace.bytes) == (None, 0)
    assert recording.plan.bytes == 4096


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(
    ("array", "shape", "strides"),
    [
        (zeros(B, H, Q, K), (B, H, Q, K), (H * Q * K, Q * K, K, 1)),
        (zeros(1, HK, 1, K), (1, HK, 1, K), None),
        (zeros(B, 1, Q, 1), (B, 1, Q, 1), None),
        (zeros(B, HK, K), (B, HK, 1, K), (HK * K, K, 0, 1)),
        (zeros(1, 1, K), (1, 1, 1, K), None),
        (zeros(B, K), (B, 1, 1, K), (K, 0, 0, 1)),
        (np.broadcast_to(zeros(B, 1, 1, K), (B, H, Q, K)), (B, H, Q, K), (K, 0, 0, 1)),
        (zeros(B, H, Q, K)[..., ::-1], (B, H, Q, K), (H * Q * K, Q * K, K, -1)),
    ],
)
def test_score_forms(
    pack: _core.Pack, recording: Recording, name: str, array: np.ndarray, shape: Any, strides: Any
) -> None:
    if name == "mask":
        elements = np.lib.stride_tricks.as_strided
        flat = zeros(B * H * Q * K, dtype="bool")
        step = tuple(stride // array.itemsize for stride in array.strides)
        start = flat[K - 1 :] if min(step) < 0 else flat
        array = elements(start, array.shape, step)
    record(batch_call(**{name: array}).problem(pack), zeros(B, Q, H, D), zeros(B, H, Q))
    recorded = getattr(recording.problem, name)
    assert recorded.summary()[:2] == (array.ctypes.data, shape)
    assert strides is None or tuple(recorded.stride) == strides


def test_interval_forms(pack: _core.Pack, recording: Recording) -> None:
    start, end = zeros(B, HK, K, dtype="int32"), zeros(B, HK, 2 * K, dtype="int32")[..., ::2]
    record(batch_call(start=start, end=end).problem(pack), zeros(B, Q, H, D), zeros(B, H, Q))
    problem = recording.problem
    assert problem.start.summary() == (start.ctypes.data, (B, HK, 1, K), (HK * K, K, 0, 1))
    assert problem.end.summary() == (end.ctypes.data, (B, HK, 1, K), (4 * K, 2 * K, 0, 2))


def test_varlen_problem(pack: _core.Pack, recording: Recording) -> None:
    mask, bias = zeros(1, TOTAL_Q, 6, dtype="bool"), zeros(HK, 1, TOTAL_K)
    call = varlen_call(mask=mask, bias=bias, deterministic=True)
    out, lse = zeros(TOTAL_Q, H, D), zeros(H, TOTAL_Q)
    record(call.problem(pack), out, lse)
    problem = recording.problem
    assert (problem.batch, problem.queries, problem.keys, problem.flags) == (2, 4, 6, 2)
    assert tuple(problem.q.shape) == (1, TOTAL_Q, H, D)
    assert tuple(problem.k.shape) == tuple(problem.v.shape) == (1, TOTAL_K, HK, D)
    assert problem.mask.summary() == (mask.ctypes.data, (1, 1, TOTAL_Q, 6), (0, 36, 6, 1))
    assert problem.bias.summary() == (bias.ctypes.data, (1, HK, 1, TOTAL_K), (0, 9, 9, 1))
    assert tuple(problem.cu_seqlens_q.shape) == (3, 1, 1, 1)
    assert problem.cu_seqlens_k.data == call.arguments["cu_seqlens_k"].ctypes.data
    assert recording.forward.lse.summary() == (lse.ctypes.data, (1, H, 6, 1), (0, 6, 1, 0))

    start = zeros(H, TOTAL_K, dtype="int32")
    record(varlen_call(start=start, end=start).problem(pack), out, lse)
    assert tuple(recording.problem.start.shape) == (1, H, 1, TOTAL_K)


def test_paged_problem(pack: _core.Pack, recording: Recording) -> None:
    problem = paged_call().problem(pack)
    record(problem, zeros(TOTAL_Q, H, D), zeros(H, TOTAL_Q))
    assert tuple(recording.problem.k.shape) == (5, 4, HK, D)
    assert tuple(recording.problem.block_table.shape) == (2, 2, 1, 1)
    arrays = [as_tuple(zeros(TOTAL_Q, H, D))] * 2 + [as_tuple(zeros(H, TOTAL_Q))]
    with pytest.raises(NotImplementedError, match="block_table"):
        problem.backward(arrays[0], None, arrays[1], arrays[2], {}, None, None)


def test_backward(pack: _core.Pack, recording: Recording) -> None:
    recording.set_next(workspace_bytes=10)
    sink, dsink = zeros(H), zeros(2 * H)[::2]
    problem = batch_call(bias=zeros(B, HK, K), sink=sink).problem(pack)
    sizes = problem.plan_workspace_bytes, problem.forward_workspace_bytes
    assert (*sizes, problem.backward_workspace_bytes) == (10, 20, 30)
    out, lse, dbias = zeros(B, Q, H, D), zeros(B, H, Q), zeros(B, HK, 1, K)
    dout = np.broadcast_to(zeros(1, 1, 1, 1), out.shape)
    dq, workspace = zeros(B, Q, H, D), zeros(32, dtype="uint8")
    dout_, out_, lse_, dq_, dbias_ = map(as_tuple, (dout, out, lse, dq, dbias))
    gradients = {"query": dq_, "bias": dbias_, "sink": as_tuple(dsink)}
    problem.backward(dout_, lse_, out_, lse_, gradients, None, as_tuple(workspace))
    args = recording.backward
    assert args.dout.summary() == (dout.ctypes.data, out.shape, (0, 0, 0, 0))
    assert args.dq.data == dq.ctypes.data
    assert args.dbias.summary()[:2] == (dbias.ctypes.data, (B, HK, 1, K))
    assert recording.problem.sink.summary()[:2] == (sink.ctypes.data, (H, 1, 1, 1))
    assert args.dsink.summary() == (dsink.ctypes.data, (H, 1, 1, 1), (2, 0, 0, 0))
    assert args.dk.absent
    assert args.dv.absent
    assert not args.dlse.absent
    assert (recording.workspace.data, recording.workspace.bytes) == (workspace.ctypes.data, 32)


@pytest.mark.parametrize(("b", "q", "k"), [(0, Q, K), (B, 0, K), (B, Q, 0), (0, 0, 0)])
def test_zero_sizes(pack: _core.Pack, recording: Recording, b: int, q: int, k: int) -> None:
    call = batch_call(
        query=zeros(b, q, H, D),
        key=zeros(b, k, HK, D),
        value=(0, "float32", (b, k, HK, D), (k * HK * D, HK * D, D, 1), CPU, 0)
        if b * k == 0
        else zeros(b, k, HK, D),
        mask=zeros(b, 1, q, k, dtype="bool"),
    )
    record(call.problem(pack), zeros(b, q, H, D), zeros(b, H, q))
    problem = recording.problem
    assert (problem.batch, problem.queries, problem.keys) == (b, q, k)
    for tensor in (problem.q, problem.k, problem.v, problem.mask):
        assert (tensor.data is None) == (0 in tuple(tensor.shape))


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_gpu_pack(tmp_path: Path) -> None:
    """The core reads nothing on a GPU: neither sequence lengths nor page numbers."""
    path = compile_pack(tmp_path / "libgpu.so", DEVICE_TYPE=CUDA)
    gpu, recording = _core.load_pack(str(path)), Recording(path)
    assert (gpu.device_type, gpu.cuda_version, gpu.arch) == (CUDA, 13000, 90)

    def tensor(*shape: int, dtype: str = "float32", index: int = 3) -> tuple[Any, ...]:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        return (4096, dtype, shape, strides, CUDA, index)

    arguments = {
        "query": tensor(TOTAL_Q, H, D),
        "key": tensor(TOTAL_K, HK, D),
        "value": tensor(TOTAL_K, HK, D),
        "cu_seqlens_q": tensor(3, dtype="int32"),
        "cu_seqlens_k": tensor(3, dtype="int32"),
        "max_seqlen_q": 4,
        "max_seqlen_k": 6,
        "stream": 0x1234,
    }
    problem = Call(**arguments).problem(gpu)
    problem.forward(tensor(TOTAL_Q, H, D), tensor(H, TOTAL_Q), None, None)
    assert (recording.problem.context.device, recording.problem.context.stream) == (3, 0x1234)
    with pytest.raises(ValueError, match="key is on cuda:2, but must be on cuda:3"):
        Call(**{**arguments, "key": tensor(TOTAL_K, HK, D, index=2)}).problem(gpu)
    with pytest.raises(ValueError, match="query is on cpu, but kernel pack recording computes on"):
        varlen_call().problem(gpu)


def test_torch_tensors(pack: _core.Pack, recording: Recording) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no DLPack C exchange API")

    class Subclass(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    query = torch.zeros(B, H, Q, D, dtype=torch.float16).transpose(1, 2)
    key = torch.nn.Parameter(torch.zeros(B, K + 1, HK, D, dtype=torch.float16))[:, 1:]
    value = torch.zeros(B, K, HK, D, dtype=torch.float16).as_subclass(Subclass)
    out, lse = torch.empty(B, Q, H, D, dtype=torch.float16), torch.empty(B, H, Q)
    mask = torch.ones(B, 1, 1, K, dtype=torch.bool).expand(B, H, Q, K)
    problem = _core.Problem(pack, query, key, value, mask=mask, **OPTIONS)
    problem.forward(out, lse, torch.zeros(4096, dtype=torch.uint8), None)
    recorded, forward = recording.problem, recording.forward
    pairs = [(query, recorded.q), (key, recorded.k), (value, recorded.v), (out, forward.out)]
    for tensor, seen in [*pairs, (mask, recorded.mask)]:
        assert seen.summary() == (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
    assert (recorded.q.dtype, recorded.mask.dtype, forward.lse.dtype) == (1, 3, 0)
    with pytest.raises(ValueError, match=r"query cannot be read through DLPack: .*meta"):
        _core.Problem(pack, query.to("meta"), key, value, **OPTIONS)
    with pytest.raises(TypeError, match=r"query is of type int, but must be a torch\.Tensor"):
        _core.Problem(pack, 3, key, value, **OPTIONS)


@pytest.mark.parametrize(
    ("bias", "mask", "keep"),
    [
        ((B, HK, 1, K), None, (B, HK, 1, K)),
        ((1, 1, 1, K), (B, H, 1, 1), (B, H, 1, K)),
        ((B, HK, 1, K), (1, H, Q, K), (B, H, Q, K)),
        ((B, H, Q, K), (B, HK, 1, 1), (B, H, Q, K)),
        ((1, K), (B, K), (B, 1, 1, K)),
    ],
)
def test_selection(pack: _core.Pack, recording: Recording, bias: Any, mask: Any, keep: Any) -> None:
    bias_array, keep_array = zeros(*bias), zeros(*keep, dtype="bool")
    mask_array = None if mask is None else zeros(*mask, dtype="bool")
    made = _core.Selection(
        pack, as_tuple(bias_array), mask=to_core(mask_array), threads=2, **SELECTION
    )
    made.keep(as_tuple(keep_array), None)
    recorded = recording.selection
    assert (recorded.batch, recorded.heads, recorded.kv_heads) == (B, H, HK)
    assert (recorded.queries, recorded.keys, recorded.window, recorded.flags) == (Q, K, 3, 1)
    assert (recorded.keep_last, recorded.keep_first) == (2, K)
    assert recorded.bias.data == bias_array.ctypes.data
    assert recorded.keep.summary()[:2] == (keep_array.ctypes.data, keep)
    assert recorded.mask.absent == (mask is None)
    assert recorded.start.absent
    assert recorded.end.absent

    if keep[2] == 1:
        start, end = zeros(keep[0], keep[1], K, dtype="int32"), zeros(*keep[:2], K, dtype="int32")
        made.intervals(as_tuple(start), as_tuple(end), None)
        recorded = recording.selection
        assert recorded.start.summary()[:2] == (start.ctypes.data, keep)
        assert recorded.end.data == end.ctypes.data
        assert recorded.keep.absent
