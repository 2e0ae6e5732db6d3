# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the `state_dict` of a state or a cache before it is loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..record import KeyCounts
from .chunks import check_like
from .rows import Rows, slots

_SETTINGS = ("window_size", "keep_last", "keep_first", "rollback", "start")
# Fields that are absent in states of version 2.0.0a1.
_DEFAULT_SETTINGS = {"keep_last": 0, "keep_first": 0}


def check_names(state: Any, needed: Collection[str], allowed: Collection[str] = ()) -> None:
    """Raise unless this is a dictionary with these fields.

    Raises:
        TypeError: it is not a dictionary.
        ValueError: a field is missing or unknown.
    """
    if not isinstance(state, dict):
        checks.refuse_type("state", "a dictionary of state_dict()", state)
    for name in needed:
        if name not in state:
            raise ValueError(f"state must have the field {name!r}, got {_listed(state)}")
    for name in state:
        if name not in needed and name not in allowed:
            known = _listed([*needed, *allowed])
            raise ValueError(f"state must have no other fields than {known}, got {name!r}")


def check_setting(state: dict[str, Any], name: str, expected: object, holder: str) -> None:
    """Raise ValueError unless a state has the same value of a setting."""
    loaded = state[name]
    if type(loaded) is not type(expected) or loaded != expected:
        raise ValueError(
            f"state must have {name}={expected}, as this {holder}, got {checks.described(loaded)}"
        )


def state_of(
    settings: dict[str, int], kept: Rows | None, recent: Rows | None, counter: Tensor | None
) -> dict[str, Any]:
    """Return the dictionary that `read_state` reads, in separate memory."""
    state: dict[str, Any] = dict(settings)
    for prefix, rows in (("kept", kept), ("recent", recent)):
        if rows is not None:
            fields = rows._asdict().items()
            state |= {f"{prefix}.{name}": tensor.detach().clone() for name, tensor in fields}
    return state if counter is None else {**state, "counter": counter.clone()}


def with_default_settings(state: Any) -> Any:
    """Return a state with the settings that states of earlier versions lack."""
    return {**_DEFAULT_SETTINGS, **state} if isinstance(state, dict) else state


def read_state(
    state: Any, counts: KeyCounts, rollback: int
) -> tuple[int, Rows | None, Rows | None, Tensor | None]:
    """Return start, rows, last rows and counter of a `KeptKeys`, in separate memory.

    Args:
        state: of `KeptKeys.state_dict`.
        counts, rollback: of the state that loads it.

    Raises:
        TypeError, ValueError: as `KeptKeys.load_state_dict`.
    """
    rows = {name: tuple(f"{name}.{field}" for field in Rows._fields) for name in ("kept", "recent")}
    every = (*rows["kept"], *rows["recent"], "counter")
    state = with_default_settings(state)
    check_names(state, _SETTINGS, every)
    for name, expected in zip(_SETTINGS, (*counts, rollback), strict=False):
        check_setting(state, name, expected, "KeptKeys")
    start = checks.index("start of state", state["start"], 0)
    if not any(name in state for name in every):
        return start, None, None, None
    held = every if rollback else (*rows["kept"], "counter")
    check_names(state, (*_SETTINGS, *held))
    # Later steps write into these, also outside of inference mode.
    with torch.inference_mode(False):
        tensors = {name: checks.tensor(f"{name} of state", state[name]).clone() for name in held}
    kept = Rows(*(tensors[name] for name in rows["kept"]))
    _check_rows("kept", kept, None)
    if kept.size != slots(kept, counts):
        raise ValueError(
            f"kept.key of state must have {slots(kept, counts)} rows, window_size="
            f"{counts.window} for each head of the bias, keep_last={counts.keep_last} and "
            f"keep_first={counts.keep_first}, got shape {tuple(kept.key.shape)}"
        )
    recent = None
    if rollback:
        recent = Rows(*(tensors[name] for name in rows["recent"]))
        _check_rows("recent", recent, kept)
        if recent.size != rollback:
            raise ValueError(
                f"recent.key of state must have rollback={rollback} rows, got shape "
                f"{tuple(recent.key.shape)}"
            )
    counter = tensors["counter"]
    if counter.dtype != torch.int64 or counter.shape != (3,):
        raise ValueError(
            f"counter of state must be int64 of shape (3,), got {checks.described(counter)}"
        )
    return start, kept, recent, counter


def _check_rows(prefix: str, rows: Rows, like: Rows | None) -> None:
    """Raise ValueError unless the tensors are rows, and fit those of ``like``."""
    if rows.key.dim() != 4:
        raise ValueError(
            f"{prefix}.key of state must have shape (B, rows, Hk, D), got {tuple(rows.key.shape)}"
        )
    batch, count, kv_heads, _ = rows.key.shape
    heads = rows.bias.shape[1] if rows.bias.dim() == 4 else 0
    sets = 1 if heads == 1 else kv_heads
    wanted = (rows.key.shape, rows.key.shape, (batch, heads, 1, count), (batch, sets, count))
    for name, tensor, shape in zip(Rows._fields, rows, wanted, strict=True):
        loaded_shape = tuple(tensor.shape)
        if loaded_shape != tuple(shape) or (name == "bias" and (heads == 0 or heads % sets)):
            form = "(B, {H|Hk|1}, 1, rows)" if name == "bias" else tuple(shape)
            raise ValueError(f"{prefix}.{name} of state must have shape {form}, got {loaded_shape}")
        is_position = name == "position"
        if tensor.dtype not in ((torch.int64,) if is_position else checks.FLOATS):
            kind = "int64" if is_position else "of 16 to 64 floating-point bits"
            raise TypeError(f"{prefix}.{name} of state must be {kind}, got {tensor.dtype}")
    if like is not None:
        check_like(like, rows, "state")


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(str, names)) or "none"
