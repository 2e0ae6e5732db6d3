# SPDX-License-Identifier: BSD-3-Clause
"""What is measured on a GPU: shapes, who competes on each, and which quantities are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ..cases import Case
from .contestants import fits

# Times in seconds, on the GPU except for "host"; memory in bytes.
QUANTITIES = {
    "selection": "making the mask from the bias",
    "plan": "the plan alone",
    "forward": "forward, plan included",
    "forward_planned": "forward with a plan made before",
    "backward": "backward, with the bias's gradient where there is a bias",
    "forward_backward": "forward and backward",
    "end_to_end": "making the mask, forward and backward",
    "host": "host time of a forward call without gradients",
    "memory_forward": "peak extra memory of forward",
    "memory_forward_backward": "peak extra memory of forward and backward",
    "memory_with_mask": "the same with making the mask",
}
_TRAINING = tuple(QUANTITIES)
_REFERENCES = ("dense_flash", "dense_cudnn", "compact_flash", "compact_cudnn")
_MASKED = ("intervals", "key_mask", "boolean", *_REFERENCES, "sdpa", "sdpa_expanded")


@dataclass(frozen=True)
class Workload:
    """One case. ``queries`` is 1 for decoding, None where there are as many as keys."""

    shape: Case
    contestants: tuple[str, ...]
    quantities: tuple[str, ...] = _TRAINING
    queries: int | None = None

    @property
    def name(self) -> str:
        """The name that the command line and the results know."""
        return self.shape.name

    @property
    def query_bytes(self) -> int:
        """Bytes of the query tensor."""
        shape = self.shape
        rows = shape.length if self.queries is None else self.queries
        return shape.batch * rows * shape.heads * shape.head_dim * shape.torch_dtype.itemsize


def _shape(
    name: str, heads: int, kv_heads: int, head_dim: int, length: int, window: int | None
) -> Case:
    return Case(
        name=name,
        dtype="bfloat16",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        length=length,
        window=window,
        device="cuda",
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        # FlexAttention compiles for up to a minute a shape: on one shape, unless asked for.
        Workload(_shape("heads32-8k", 32, 8, 128, 8192, 1024), (*_MASKED, "flex")),
        Workload(_shape("heads16-16k", 16, 2, 128, 16384, 2048), _MASKED),
        Workload(_shape("heads2-32k", 2, 1, 128, 32768, 1024), _MASKED),
        Workload(_shape("heads2-16k-d64", 2, 1, 64, 16384, 1024), _MASKED),
        Workload(
            _shape("dense-8k", 32, 8, 128, 8192, None), ("no_mask", "dense_flash", "dense_cudnn")
        ),
        *(
            Workload(
                _shape(f"growth-{length // 1024}k", 8, 2, 128, length, 1024),
                ("intervals", *_REFERENCES),
            )
            for length in (8192, 16384, 32768, 65536)
        ),
        Workload(_shape("selection-32k", 32, 8, 128, 32768, 1024), ("intervals",), ("selection",)),
        Workload(
            # The only query sees every key, so this is what causal attention does.
            replace(_shape("decode-64k", 32, 8, 128, 65536, 1024), causal=False),
            ("key_mask", *_REFERENCES, "sdpa"),
            ("plan", "forward", "forward_planned"),
            queries=1,
        ),
    )
}
QUICK = ("heads32-8k", "dense-8k", "decode-64k")
# Left out of a quick run: slow, and part of no bar.
SLOW_CONTESTANTS = ("sdpa", "sdpa_expanded", "flex")


def chosen_workloads(
    patterns: Sequence[str],
    contestants: Sequence[str] | None,
    quantities: Sequence[str] | None,
    device: str,
    *,
    quick: bool = False,
    without: Sequence[str] = (),
) -> list[Workload]:
    """The workloads whose names match a pattern, cut down to what is wanted.

    A contestant that is asked for by name also runs on cases where it does not by default, if it
    can: masks need a window, and decoding has its own few.

    Raises:
        ValueError: a pattern that no case matches, or nothing is left to measure.
    """
    names = list(QUICK) if quick and not patterns else []
    for pattern in patterns or ([] if quick else ["*"]):
        found = [name for name in WORKLOADS if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"no case matches {pattern!r}; cases are {', '.join(WORKLOADS)}")
        names += [name for name in found if name not in names]
    chosen = []
    for name in names:
        workload = WORKLOADS[name]
        entered = workload.contestants
        if contestants is not None:
            entered = tuple(c for c in contestants if _can_enter(c, workload))
        left_out = {*without, *(SLOW_CONTESTANTS if quick and contestants is None else ())}
        entered = tuple(c for c in entered if c not in left_out)
        wanted = tuple(q for q in workload.quantities if quantities is None or q in quantities)
        if wanted and entered:
            shape = replace(workload.shape, device=device)
            chosen.append(replace(workload, shape=shape, contestants=entered, quantities=wanted))
    if not chosen:
        asked = ", ".join([*(contestants or ()), *(quantities or ())])
        raise ValueError(f"none of {', '.join(names)} measures {asked}")
    return chosen


def _can_enter(contestant: str, workload: Workload) -> bool:
    if workload.queries is not None:
        return contestant in workload.contestants
    return fits(contestant, workload.shape)
