# SPDX-License-Identifier: BSD-3-Clause
"""Valid calls of the core; tests change one argument of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flash_dmattn import _core

from .core_packs import as_tuple

B, Q, K, H, HK, D = 2, 5, 7, 4, 2, 8
TOTAL_Q, TOTAL_K = 6, 9  # two packed sequences: queries 2 + 4, keys 3 + 6
OPTIONS: dict[str, Any] = {"scale": 0.5, "causal": False, "softcap": 0.0}
SELECTION: dict[str, Any] = {
    "batch": B,
    "heads": H,
    "kv_heads": HK,
    "queries": Q,
    "keys": K,
    "window": 3,
    "causal": True,
    "keep_last": 2,
    "keep_first": 9,
}


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def to_core(value: Any) -> Any:
    return as_tuple(value) if isinstance(value, np.ndarray) else value


class Call:
    """The arguments of a Problem, by their core names; keeps the arrays alive."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = {**OPTIONS, **arguments}

    def problem(self, pack: _core.Pack) -> _core.Problem:
        return _core.Problem(
            pack, **{name: to_core(value) for name, value in self.arguments.items()}
        )


def batch_call(**changes: Any) -> Call:
    tensors = {"query": zeros(B, Q, H, D), "key": zeros(B, K, HK, D), "value": zeros(B, K, HK, D)}
    return Call(**{**tensors, **changes})


def varlen_call(**changes: Any) -> Call:
    arguments = {
        "query": zeros(TOTAL_Q, H, D),
        "key": zeros(TOTAL_K, HK, D),
        "value": zeros(TOTAL_K, HK, D),
        "cu_seqlens_q": int32(0, 2, 6),
        "cu_seqlens_k": int32(0, 3, 9),
        "max_seqlen_q": 4,
        "max_seqlen_k": 6,
    }
    return Call(**{**arguments, **changes})


def paged_call(**changes: Any) -> Call:
    """Pages hold 4 keys: the first sequence needs 1 page, the second 2."""
    pages = {"key": zeros(5, 4, HK, D), "value": zeros(5, 4, HK, D)}
    return varlen_call(**{**pages, "block_table": int32(3, 9, 0, 4).reshape(2, 2), **changes})


def record(problem: _core.Problem, out: np.ndarray, lse: np.ndarray) -> None:
    problem.forward(as_tuple(out), as_tuple(lse), as_tuple(zeros(4096, dtype="uint8")), None)


def refused(call: Any, exception: type[Exception], fragments: tuple[str, ...]) -> None:
    """Make the call and expect the exception with all fragments in its message."""
    with pytest.raises(exception) as caught:
        call()
    for fragment in fragments:
        assert fragment in str(caught.value)
