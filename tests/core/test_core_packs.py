# SPDX-License-Identifier: BSD-3-Clause
"""Loading packs, and reporting their failures."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from flash_dmattn import _core
from support import plan_bytes

from .core_calls import HK, B, D, H, K, Q, batch_call, varlen_call, zeros
from .core_packs import CPU, Recording, as_tuple, compile_pack, compiler


def test_pack_attributes(pack: _core.Pack, recording_path: Path) -> None:
    assert pack.path == str(recording_path)
    assert (pack.name, pack.version, pack.compiler, pack.features) == (
        "recording",
        "1.2.3",
        "a compiler",
        "none",
    )
    assert (pack.abi_version, pack.device_type, pack.cuda_version, pack.arch) == (
        _core.PACK_ABI_VERSION,
        CPU,
        0,
        0,
    )
    assert (pack.max_head_dim, pack.dtypes) == (256, ["float32", "float16"])
    assert list(pack.plan_layouts) == ["none", "keys", "intervals", "rows"]
    assert pack.plan_layouts["intervals"] == (64, 16, 12, 2, 3, 32, 4)
    assert "recording" in repr(pack)


def test_plan_bytes_of_problems(pack: _core.Pack) -> None:
    """They are those of the formula of pack.h."""
    start = zeros(1, HK, K, dtype="int32")
    cases = [
        (batch_call(), ("none", 0, K, K, Q, 1)),
        (batch_call(mask=zeros(B, K, dtype="bool")), ("keys", B, K, K, Q, 1)),
        (batch_call(mask=zeros(1, H, Q, K, dtype="bool")), ("rows", H, K, K, Q, 1)),
        (batch_call(start=start, end=start), ("intervals", HK, K, K, Q, 1)),
        (batch_call(start=start, end=start, max_kept=2), ("intervals", HK, K, K, Q, 1, 2)),
        (batch_call(start=start, end=start, max_kept=2**62), ("intervals", HK, K, K, Q, 1, 2**62)),
        (varlen_call(mask=zeros(H, 1, 9, dtype="bool")), ("keys", H, 9, 6, 6, 2)),
        (varlen_call(mask=zeros(1, 6, 6, dtype="bool")), ("rows", 1, 9, 6, 6, 2)),
    ]
    for call, sizes in cases:
        assert call.problem(pack).plan_bytes == plan_bytes(pack, *sizes)
    with pytest.raises(ValueError, match="max_kept is -1"):
        batch_call(max_kept=-1).problem(pack)


def test_calls_that_read_no_plan(pack: _core.Pack, recording: Recording) -> None:
    """A pack declares that a call needs no plan; the core then requires none and allocates none."""
    problem = batch_call(mask=zeros(B, K, dtype="bool")).problem(pack)
    out, lse = zeros(B, Q, H, D), zeros(B, Q, H).transpose(0, 2, 1)
    results = as_tuple(out), as_tuple(lse)
    with pytest.raises(ValueError, match="plan is None"):
        problem.forward(*results, None, None)
    with_plan = problem.attend_bytes(True, False)
    assert with_plan >= problem.plan_bytes > 0
    recording.set_next(plan_bytes=0)
    problem.forward(*results, None, None)
    assert (recording.plan.data, recording.plan.bytes) == (None, 0)
    assert problem.attend_bytes(True, False) == with_plan - -(-problem.plan_bytes // 256) * 256


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("macros", "reason"),
    [
        ({"ENTRY_NAME": "something_else"}, "no symbol flash_dmattn_pack"),
        ({"ABI_VERSION": 77}, f"ABI version 77, but .* needs ABI version {_core.PACK_ABI_VERSION}"),
        ({"STRUCT_SIZE": 16}, "table has 16 bytes"),
        ({"NO_TABLE": 1}, "returned no table"),
        ({"NO_FORWARD": 1}, "lacks an entry point"),
        ({"PACK_NAME": "0"}, "lacks its name"),
    ],
)
def test_load_pack_refuses(tmp_path: Path, macros: dict[str, Any], reason: str) -> None:
    path = compile_pack(tmp_path / "libbroken.so", **macros)
    with pytest.raises(_core.PackError, match=reason) as caught:
        _core.load_pack(str(path))
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_load_pack_refuses_what_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(_core.PackError, match=r"missing\.so: dlopen failed: "):
        _core.load_pack(str(tmp_path / "missing.so"))
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(_core.PackError, match=r"text\.so: dlopen failed: "):
        _core.load_pack(str(text))


@pytest.mark.parametrize(
    ("status", "exception", "meaning"),
    [
        (1, ValueError, "invalid argument"),
        (2, NotImplementedError, "unsupported"),
        (3, ValueError, "too small"),
        (4, MemoryError, "out of memory"),
        (5, RuntimeError, "device error"),
        (6, RuntimeError, "internal error"),
        (99, RuntimeError, "unknown status"),
    ],
)
def test_status(
    pack: _core.Pack, recording: Recording, status: int, exception: type[Exception], meaning: str
) -> None:
    problem = batch_call().problem(pack)
    recording.set_next(status=status, message=b"because of this")
    with pytest.raises(exception, match=f"recording.*{meaning}.*{status}.*because of this"):
        problem.plan(None, None)


def test_threads_are_inside_a_pack_together(pack: _core.Pack, recording: Recording) -> None:
    """Calls return only once all are inside the pack: a held GIL would block them forever."""
    count = 3
    problem = batch_call().problem(pack)
    out, lse = zeros(B, Q, H, D), zeros(B, H, Q)
    recording.set_next(meeting=count)
    failures: list[Exception] = []

    def call() -> None:
        try:
            problem.forward(as_tuple(out), as_tuple(lse), None, None)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording.set_next()
    assert not failures


def test_packs_without_kernels_for_gates(pack: _core.Pack) -> None:
    assert not pack.forgets
    with pytest.raises(NotImplementedError, match="pack recording has no kernels for forget gates"):
        _core.Forgetting(pack, as_tuple(zeros(2, 3, 7)), None, None, -1.0)


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_packs_without_float32_name_the_backend_that_has_it(tmp_path: Path) -> None:
    pack = _core.load_pack(str(compile_pack(tmp_path / "libhalf.so", DTYPES="(1 << FDM_FLOAT16)")))
    with pytest.raises(TypeError, match=r"query has dtype float32, .* backend='triton', .* TF32"):
        batch_call().problem(pack)
