# SPDX-License-Identifier: BSD-3-Clause
"""The rounding remainder of out, from the forward to the backward pass of a pack that wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flash_dmattn import _core

from .core_calls import (
    HK,
    TOTAL_K,
    B,
    Call,
    D,
    H,
    K,
    Q,
    batch_call,
    refused,
    to_core,
    varlen_call,
    zeros,
)
from .core_packs import Recording, as_tuple, compile_pack, compiler

ROOM = 1024  # upper bound of the out_rest of these calls, in bytes
SIZES = {"batch": (B, Q, H, D), "packed": (6, H, D)}


@pytest.fixture(scope="module")
def wanting_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("no C compiler")
    return compile_pack(tmp_path_factory.mktemp("packs") / "libwanting.so", WANTS_OUT_REST=1)


@pytest.fixture
def wanting(wanting_path: Path) -> tuple[_core.Pack, Recording]:
    recording = Recording(wanting_path)
    recording.set_next()
    return _core.load_pack(str(wanting_path)), recording


def call(form: str, dtype: str = "float16", **changes: Any) -> Call:
    make, tensors = (
        (batch_call, (B, K, HK, D)) if form == "batch" else (varlen_call, (TOTAL_K, HK, D))
    )
    key = zeros(*tensors, dtype=dtype)
    return make(query=zeros(*SIZES[form], dtype=dtype), key=key, value=key.copy(), **changes)


BIASES = {"batch": (B, HK, 1, K), "packed": (HK, 1, TOTAL_K)}
LSE = {"batch": (B, H, Q), "packed": (H, 6)}


@pytest.mark.parametrize("has_lse", [False, True])
@pytest.mark.parametrize("has_plan", [False, True])
@pytest.mark.parametrize("form", SIZES)
def test_out_rest_is_kept(
    form: str, has_plan: bool, has_lse: bool, wanting: tuple[_core.Pack, Recording]
) -> None:
    pack, recording = wanting
    made = call(form, bias=zeros(*BIASES[form]))
    problem = made.problem(pack)
    out, lse = zeros(*SIZES[form], dtype="float16"), zeros(*LSE[form])
    kept = zeros(problem.kept_bytes(has_lse, has_plan), dtype="uint8")
    plan = as_tuple(zeros(4096, dtype="uint8")) if has_plan else None
    given = as_tuple(lse) if has_lse else None
    problem.keep(as_tuple(out), given, plan, as_tuple(kept), None)
    place, shape, strides = recording.forward.out_rest.summary()
    assert place is not None
    assert shape == recording.forward.out.summary()[1]
    assert strides[1:] == (H * D, D, 1)
    begin = place - kept.ctypes.data
    assert begin >= 0
    assert begin % 256 == 0
    assert begin + out.size <= (kept.nbytes if has_lse else kept.nbytes - lse.nbytes)
    if not has_lse:
        assert recording.forward.lse.summary()[0] == kept.ctypes.data + kept.nbytes - lse.nbytes
    dout = zeros(*SIZES[form], dtype="float16")
    results = as_tuple(dout), None, as_tuple(out), given
    problem.backward(*results, {}, plan, None, as_tuple(kept))
    assert recording.backward.out_rest.summary() == (place, shape, strides)
    if has_lse:
        problem.backward(*results, {}, plan, None)
        assert recording.backward.out_rest.absent


@pytest.mark.parametrize("is_longer", [False, True])
def test_out_rest_lies_behind_a_plan_with_more_room(
    is_longer: bool, wanting: tuple[_core.Pack, Recording]
) -> None:
    pack, recording = wanting
    problem = call("batch", bias=zeros(B, 1, 1, K), mask=zeros(B, K, dtype="bool")).problem(pack)
    needed = problem.kept_bytes(True, False)
    kept = zeros(needed + 256 * is_longer, dtype="uint8")
    out, lse = zeros(B, Q, H, D, dtype="float16"), zeros(B, H, Q)
    problem.keep(as_tuple(out), as_tuple(lse), None, as_tuple(kept), None)
    assert recording.plan.data == kept.ctypes.data
    place = recording.forward.out_rest.summary()[0]
    assert place is not None
    assert place - kept.ctypes.data == recording.plan.bytes == len(kept) - 512


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": zeros(B, HK, Q, K)},
        {"bias": zeros(B, HK, 1, K), "dtype": "float32"},
    ],
)
def test_other_calls_keep_no_out_rest(
    changes: dict[str, Any], wanting: tuple[_core.Pack, Recording]
) -> None:
    pack, recording = wanting
    problem = call("batch", **changes).problem(pack)
    out, lse = zeros(B, Q, H, D, dtype=changes.get("dtype", "float16")), zeros(B, H, Q)
    assert problem.kept_bytes(True, True) == 0
    problem.keep(as_tuple(out), as_tuple(lse), None, None, None)
    assert recording.forward.out_rest.absent


def test_packs_that_do_not_want_it(pack: _core.Pack, recording: Recording) -> None:
    problem = call("batch", bias=zeros(B, HK, 1, K)).problem(pack)
    out, lse = zeros(B, Q, H, D, dtype="float16"), zeros(B, H, Q)
    assert problem.kept_bytes(True, False) == 0
    problem.keep(as_tuple(out), as_tuple(lse), None, None, None)
    assert recording.forward.out_rest.absent


@pytest.mark.parametrize(
    ("name", "value", "fragments"),
    [
        ("kept", None, ("kept is None", "512 bytes")),
        ("kept", zeros(511, dtype="uint8"), ("kept has shape (511,)", "at least 512 bytes")),
        (
            "out",
            zeros(B, H, Q, D, dtype="float16").swapaxes(1, 2),
            ("out has strides (160, 8, 40, 1)", "contiguous"),
        ),
    ],
)
def test_keep_refuses(
    name: str, value: Any, fragments: tuple[str, ...], wanting: tuple[_core.Pack, Recording]
) -> None:
    arguments: dict[str, Any] = {
        "out": zeros(B, Q, H, D, dtype="float16"),
        "lse": zeros(B, H, Q),
        "plan": None,
        "kept": zeros(ROOM, dtype="uint8"),
        "workspace": None,
    }
    given = {key: to_core(array) for key, array in {**arguments, name: value}.items()}
    problem = call("batch", bias=zeros(B, HK, 1, K)).problem(wanting[0])
    refused(lambda: problem.keep(**given), ValueError, fragments)
