# SPDX-License-Identifier: BSD-3-Clause
"""Kernel packs for tests of the core: one that records its calls, and broken ones."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).with_name("recording_pack.c")
HEADERS = Path(__file__).resolve().parents[2] / "cpp"
CPU, CUDA = 1, 2


def compiler() -> str | None:
    """Return the system's C compiler, or None."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_pack(path: Path, **macros: str | int) -> Path:
    """Compile recording_pack.c with the macros into a shared library."""
    command = [compiler() or "cc", "-std=c11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [f"-D{name}={value}" for name, value in macros.items()]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    subprocess.run([*command, f"-I{HEADERS}", "-o", str(path), str(SOURCE)], check=True)
    return path


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]

    def summary(self) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
        return self.data, tuple(self.shape), tuple(self.stride)

    @property
    def absent(self) -> bool:
        """Absence as pack.h defines it: no data and no dimension of 0."""
        return self.data is None and 0 not in tuple(self.shape)


class Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class Context(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    ]


def _tensors(*names: str) -> list[tuple[str, Any]]:
    return [(name, Tensor) for name in names]


class ProblemStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("context", Context),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *[
            (name, ctypes.c_int64)
            for name in ("batch", "heads", "kv_heads", "head_dim", "queries", "keys")
        ],
        *_tensors("q", "k", "v", "mask", "start", "end", "bias"),
        *_tensors("cu_seqlens_q", "cu_seqlens_k", "block_table", "sink"),
        ("max_kept", ctypes.c_int64),
        *_tensors("indices", "index_bias"),
    ]


class ForwardStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("splits", ctypes.c_int32),
        *_tensors("out", "lse", "out_rest"),
    ]


class BackwardStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *_tensors("out", "lse", "dout", "dlse", "dq", "dk", "dv", "dbias", "dsink", "out_rest"),
    ]


class SelectionStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("context", Context),
        *[
            (name, ctypes.c_int64)
            for name in ("batch", "heads", "kv_heads", "queries", "keys", "window")
        ],
        *_tensors("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "start", "end", "keep"),
        ("keep_last", ctypes.c_int64),
        ("keep_first", ctypes.c_int64),
    ]


class MaskBlocksStruct(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *_tensors("numbers", "contents"),
        ("kept", ctypes.c_int64),
        ("partial", ctypes.c_int64),
    ]


class Recording:
    """The last call of a recording pack, and its next actions."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Any:
        types: dict[str, Any] = {
            "problem": ProblemStruct,
            "forward": ForwardStruct,
            "backward": BackwardStruct,
            "selection": SelectionStruct,
            "mask_blocks": MaskBlocksStruct,
            "plan": Buffer,
            "workspace": Buffer,
        }
        return types[name].in_dll(self._library, f"recorded_{name}")

    def set_next(
        self,
        status: int = 0,
        message: bytes = b"",
        workspace_bytes: int = 0,
        meeting: int = 0,
        plan_bytes: int = 1,
    ) -> None:
        ctypes.c_int32.in_dll(self._library, "next_status").value = status
        (ctypes.c_char * 64).in_dll(self._library, "next_message").value = message
        ctypes.c_int64.in_dll(self._library, "next_workspace_bytes").value = workspace_bytes
        ctypes.c_int64.in_dll(self._library, "next_plan_bytes").value = plan_bytes
        ctypes.c_int32.in_dll(self._library, "meeting_size").value = meeting


def as_tuple(array: np.ndarray, device: tuple[int, int] = (CPU, 0)) -> tuple[Any, ...]:
    """Return an array in the core's tuple form; the caller keeps the array alive."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return (array.ctypes.data, array.dtype.name, array.shape, strides, *device)
