# SPDX-License-Identifier: BSD-3-Clause
"""The contestants by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .cases import Case, Inputs
from .contestants import (
    Contestant,
    FlashAttention4,
    FlashDmattn,
    Flex,
    Sdpa,
    SdpaAugmented,
    SelectingFlashDmattn,
    compact,
    dense,
)
from .earlier import Earlier
from .pairs import CuEquivariance, PairFlashDmattn, PairFlex, PairSdpa, TriFast

KEYS_OF_THE_MASK = "keys of the mask"
TOP_KEYS_OF_EACH_QUERY = "top-w keys of each query"
TOP_KEYS_OF_ALL_QUERIES = "top-w keys of all queries"
ALL_KEYS = "all keys"
ONLY_KEPT_KEYS = "only w keys, not causal"


@dataclass(frozen=True)
class Entrant:
    """A contestant, its mask, and the cases that it supports."""

    make: Callable[[Case, Inputs], Contestant]
    about: str
    mask: str = TOP_KEYS_OF_EACH_QUERY
    role: Literal["ours", "baseline", "information"] = "baseline"
    alone: bool = False  # not timed in turns: the large masks of several do not fit the memory
    compiled: bool = False  # runs last: compiling may take longer than everything else
    per_query: bool = True  # supports a per-query bias
    dense: bool = False  # supports cases without a window
    decode: bool = False  # supports a single query
    pair: bool = False  # runs on cases with a pair bias, and on no others
    square: bool = False  # needs as many batch elements as keys


def _ours(form: str, about: str, mask: str = TOP_KEYS_OF_EACH_QUERY, **fields: bool) -> Entrant:
    return Entrant(partial(FlashDmattn, form=form), about, mask, "ours", **fields)


def _dense(make: Callable[[Case, Inputs], Contestant], about: str) -> Entrant:
    return Entrant(make, about, ALL_KEYS, dense=True, decode=True)


def _compact(make: Callable[[Case, Inputs], Contestant], about: str) -> Entrant:
    return Entrant(partial(compact, make=make), about, ONLY_KEPT_KEYS, "information", decode=True)


def _sdpa(about: str, layout: str = "grouped", backend: str | None = None) -> Entrant:
    make = partial(Sdpa, layout=layout, backend=backend)
    return Entrant(make, about, alone=True, dense=True, decode=True)


def _pair(make: Callable[[Case, Inputs], Contestant], about: str, **fields: Any) -> Entrant:
    return Entrant(make, about, KEYS_OF_THE_MASK, pair=True, **fields)


_FLASH, _CUDNN, _SDPA = (
    partial(dense, backend=backend) for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", None)
)

ENTRANTS: dict[str, Entrant] = {
    "intervals": _ours("selected", "flash_dmattn, two integers for each key", per_query=False),
    "window_size": Entrant(
        SelectingFlashDmattn, "flash_dmattn, which selects in the call", role="ours"
    ),
    "key_mask": _ours(
        "keys",
        "flash_dmattn, one selection for all queries",
        TOP_KEYS_OF_ALL_QUERIES,
        per_query=False,
        decode=True,
    ),
    "boolean": _ours("boolean", "flash_dmattn, a Q x K boolean mask"),
    "no_mask": _ours("none", "flash_dmattn without mask and bias", ALL_KEYS, dense=True),
    "triton": Entrant(
        partial(FlashDmattn, backend="triton"),
        "flash_dmattn's Triton kernels",
        role="ours",
        alone=True,
        compiled=True,
    ),
    "dense_flash": _dense(_FLASH, "FlashAttention of torch, no mask"),
    "dense_cudnn": _dense(_CUDNN, "cuDNN, no mask"),
    "dense_fa4": _dense(FlashAttention4, "FlashAttention-4, no mask"),
    # Binding SDPA to a backend costs host time that calls without a preference do not have.
    "dense_sdpa": _dense(_SDPA, "SDPA on a kernel of PyTorch's choice, no mask"),
    "compact_flash": _compact(_FLASH, "FlashAttention of torch over w keys, no mask"),
    "compact_cudnn": _compact(_CUDNN, "cuDNN over w keys, no mask"),
    "compact_fa4": _compact(FlashAttention4, "FlashAttention-4 over w keys, no mask"),
    "sdpa": _sdpa("SDPA, mask shared by a group of heads"),
    "sdpa_expanded": _sdpa("SDPA, keys, values and mask repeated for heads", layout="expanded"),
    "sdpa_gqa": _sdpa("SDPA with enable_gqa", layout="gqa"),
    "sdpa_math": _sdpa("SDPA's unfused formula", backend="MATH"),
    "sdpa_flash": _sdpa(
        "SDPA's FlashAttention, which takes masks on CPUs only", backend="FLASH_ATTENTION"
    ),
    "sdpa_efficient": _sdpa("SDPA's memory-efficient kernels", backend="EFFICIENT_ATTENTION"),
    "sdpa_cudnn": _sdpa("SDPA on cuDNN", backend="CUDNN_ATTENTION"),
    "sdpa_augmented": Entrant(
        SdpaAugmented,
        "SDPA, the bias as one more column of the keys",
        role="information",
        alone=True,
        per_query=False,
    ),
    "earlier": Entrant(Earlier, "flash-dmattn 1.2.2's kernels", alone=True, decode=True),
    "flex": Entrant(Flex, "FlexAttention with a block mask", alone=True, compiled=True),
    "pair_bias": _pair(PairFlashDmattn, "flash_dmattn, one bias for the batch", role="ours"),
    "cuequivariance": _pair(CuEquivariance, "cuEquivariance's triangle attention"),
    "pair_sdpa": _pair(PairSdpa, "SDPA, mask and bias added for the whole batch", alone=True),
    "trifast": _pair(TriFast, "trifast's Triton kernels", alone=True, compiled=True, square=True),
    "pair_flex": _pair(
        PairFlex, "FlexAttention that adds the bias to scores", alone=True, compiled=True
    ),
}


def fits(name: str, case: Case) -> bool:
    """Say whether a contestant applies to a case; for example, masks need a window."""
    entrant = ENTRANTS[name]
    if case.pair_bias or entrant.pair:
        square = case.batch == case.rows == case.length
        return case.pair_bias and entrant.pair and (square or not entrant.square)
    if case.window is None:
        return entrant.dense and (case.queries is None or entrant.decode)
    if case.queries is not None and not entrant.decode:
        return False
    # A per-query bias has no per-key selection, unless there is one query.
    return entrant.per_query or not case.per_query or case.queries == 1


def attends_to(name: str, case: Case) -> str:
    """Return a contestant's mask in a case. Only contestants with the same mask are comparable."""
    mask = ENTRANTS[name].mask
    if case.window is None and not case.pair_bias:
        return ALL_KEYS
    if mask == TOP_KEYS_OF_EACH_QUERY and case.queries == 1:
        return TOP_KEYS_OF_ALL_QUERIES  # the only query
    return mask
