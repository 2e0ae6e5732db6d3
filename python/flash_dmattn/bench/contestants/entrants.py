# SPDX-License-Identifier: BSD-3-Clause
"""Who competes, by name."""

from __future__ import annotations

from dataclasses import dataclass

from ..cases import Case
from . import dense, flex, ours, sdpa
from .base import Contestant

TOP_KEYS_OF_EACH_QUERY = "top-w keys of each query"
TOP_KEYS_OF_ALL_QUERIES = "top-w keys of all queries"
ALL_KEYS = "all keys"
ONLY_KEPT_KEYS = "only w keys, not causal"


@dataclass(frozen=True)
class Entrant:
    """A contestant: what it attends to, whether it is timed by itself, and on which cases it runs.

    The others are timed in turns, so that drifting clocks change their ratios little. Those with
    large masks are not, because then all would have to fit the memory at once. ``compiled`` ones
    come last: compiling may take longer than everything else.
    """

    kind: type[Contestant]
    about: str
    mask: str = TOP_KEYS_OF_EACH_QUERY
    alone: bool = False
    compiled: bool = False
    per_query: bool = True
    dense: bool = False
    decode: bool = False


def _sdpa(kind: type[Contestant], about: str) -> Entrant:
    return Entrant(kind, about, alone=True, dense=True, decode=True)


def _reference(kind: type[Contestant], about: str, mask: str) -> Entrant:
    return Entrant(kind, about, mask, dense=mask == ALL_KEYS, decode=True)


ENTRANTS: dict[str, Entrant] = {
    "intervals": Entrant(
        ours.FlashDmattn, "flash_dmattn, two integers for each key", per_query=False
    ),
    "key_mask": Entrant(
        ours.KeyMask,
        "flash_dmattn, one selection for all queries",
        TOP_KEYS_OF_ALL_QUERIES,
        per_query=False,
        decode=True,
    ),
    "boolean": Entrant(ours.Boolean, "flash_dmattn, a Q x K boolean mask"),
    "no_mask": Entrant(ours.NoMask, "flash_dmattn without mask and bias", ALL_KEYS, dense=True),
    "triton": Entrant(ours.Triton, "flash_dmattn's Triton kernels", alone=True, compiled=True),
    "dense_flash": _reference(dense.DenseFlash, "FlashAttention of torch, no mask", ALL_KEYS),
    "dense_cudnn": _reference(dense.DenseCudnn, "cuDNN, no mask", ALL_KEYS),
    "compact_flash": _reference(
        dense.CompactFlash, "FlashAttention of torch over w keys, no mask", ONLY_KEPT_KEYS
    ),
    "compact_cudnn": _reference(dense.CompactCudnn, "cuDNN over w keys, no mask", ONLY_KEPT_KEYS),
    "sdpa": _sdpa(sdpa.SdpaGrouped, "SDPA, mask shared by a group of heads"),
    "sdpa_expanded": _sdpa(sdpa.SdpaExpanded, "SDPA, keys, values and mask repeated for heads"),
    "sdpa_gqa": _sdpa(sdpa.SdpaGqa, "SDPA with enable_gqa"),
    "sdpa_math": _sdpa(sdpa.SdpaMath, "SDPA's unfused formula"),
    "sdpa_flash": _sdpa(sdpa.SdpaFlash, "SDPA's FlashAttention, which takes masks on CPUs only"),
    "sdpa_efficient": _sdpa(sdpa.SdpaEfficient, "SDPA's memory-efficient kernels"),
    "sdpa_cudnn": _sdpa(sdpa.SdpaCudnn, "SDPA on cuDNN"),
    "sdpa_augmented": Entrant(
        sdpa.SdpaAugmented,
        "SDPA, the bias as one more column of the keys",
        alone=True,
        per_query=False,
    ),
    "flex": Entrant(flex.Flex, "FlexAttention with a block mask", alone=True, compiled=True),
}


def fits(name: str, case: Case) -> bool:
    """Whether a contestant has a meaning for a case: masks need a window, and so on."""
    entrant = ENTRANTS[name]
    if case.window is None:
        return entrant.dense and (case.queries is None or entrant.decode)
    if case.queries is not None and not entrant.decode:
        return False
    # A bias that is another for each query has no selection per key; one query's has.
    return entrant.per_query or not case.per_query or case.queries == 1


def attends_to(name: str, case: Case) -> str:
    """What a contestant attends to in a case; only numbers of one mask do the same work."""
    entrant = ENTRANTS[name]
    if case.window is None:
        return ALL_KEYS
    if entrant.mask == TOP_KEYS_OF_EACH_QUERY and case.queries == 1:
        return TOP_KEYS_OF_ALL_QUERIES  # there is one
    return entrant.mask
