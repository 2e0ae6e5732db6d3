# SPDX-License-Identifier: BSD-3-Clause
"""Invalid values for each kind of argument, to replace a valid one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_dmattn import IntervalMask

# Differs from valid values only by type: calls must never compute with it or print it whole.
SECRET = 8675309
_ROWS = torch.zeros(2, 3, dtype=torch.int32)


def _anything() -> dict[str, Any]:
    """Return values that are neither a tensor nor a number, a flag or a name."""
    return {
        "list": [SECRET] * 1000,
        "tuple": (1, 2),
        "dict": {"a": SECRET},
        "set": {1},
        "object": object(),
        "class": Tensor,
        "function": abs,
        "module": np,
        "bytes": b"x" * 2000,
        "complex": 1j,
        "array": np.full((40, 40), SECRET),
        "array of objects": np.array([object(), None]),
        "intervals": IntervalMask(_ROWS, _ROWS),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8),
    }


_NOTHING_ELSE = _anything()
_NUMBERS = {
    "int": 3,
    "negative": -1,
    "float": 1.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "bool": True,
    "text": "x" * 3000,
    "digits": "3",
    "huge": 10**6000,
}
_NOT_NUMBERS = {
    **_NOTHING_ELSE,
    "text": "x" * 3000,
    "digits": "3",
    "bool": True,
    "bools": torch.ones(2, dtype=torch.bool),
    "tensor": torch.full((2, 3), SECRET),
    "meta": torch.ones((), device="meta"),
    "huge": 10**6000,
}


def for_tensor(good: Tensor | None) -> dict[str, Any]:
    """Return invalid values for a tensor; None and an `IntervalMask` are tried elsewhere."""
    wrong = {**_NOTHING_ELSE, **_NUMBERS}
    del wrong["intervals"]
    if good is None:
        return wrong
    other = torch.int64 if good.dtype != torch.int64 else torch.float32
    return {
        **wrong,
        "array of the same": np.full(tuple(good.shape), SECRET),
        "of complex": torch.zeros(good.shape, dtype=torch.complex64),
        "of another dtype": torch.zeros(good.shape, dtype=torch.float8_e4m3fn),
        "of integers or floats": torch.zeros(good.shape, dtype=other).to(torch.complex128),
        "meta": torch.empty(good.shape, dtype=good.dtype, device="meta"),
        "of no dimensions": good.new_zeros(()),
        "of five dimensions": good.new_zeros(1, 1, 1, 1, 1),
        "of nine dimensions": good.new_zeros((1,) * 9),
        "of other sizes": good.new_zeros([size + 3 for size in good.shape]),
        "sparse of the same": good.to_sparse(),
        "one more dimension": good.unsqueeze(0).unsqueeze(0).unsqueeze(0),
    }


def for_integer(_: object) -> dict[str, Any]:
    return {
        **_NOT_NUMBERS,
        "float": 1.5,
        "whole float": 2.0,
        "nan": float("nan"),
        "array number": np.float64(3.0),
        "beyond int64": 2**63,
        "far below": -(2**70),
        "negative": -1,
    }


def for_number(_: object) -> dict[str, Any]:
    return {**_NOT_NUMBERS, "nan": float("nan"), "infinity": float("inf")}


def for_flag(_: object) -> dict[str, Any]:
    wrong = {**_NOT_NUMBERS, "two": 2, "float": 1.5, "nan": float("nan")}
    del wrong["bool"]
    return wrong


def for_name(_: object) -> dict[str, Any]:
    return {**_NOTHING_ELSE, **_NUMBERS, "tensor": torch.full((2, 3), SECRET), "near": "refrence"}


def for_object(_: object) -> dict[str, Any]:
    return {**_NOTHING_ELSE, **_NUMBERS, "tensor": torch.full((2, 3), SECRET)}


KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "tensor": for_tensor,
    "integer": for_integer,
    "number": for_number,
    "flag": for_flag,
    "name": for_name,
    "object": for_object,
}
