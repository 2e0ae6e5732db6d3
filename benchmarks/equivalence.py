# SPDX-License-Identifier: BSD-3-Clause
"""The two equivalence protocols of flash-dmattn 1.2.2, with stricter tolerances.

The 72 shapes are those of 1.2.2: one sequence, two heads on one KV head, 128 to 4096 tokens, six
head dimensions, causal or not, a 16-bit bias for each query and key, the top 1024 keys of each
query. Its scripts compare with a reference in 16 bit and pass if 95 % of the elements are near.
Here every element counts: the largest error against float64 may be at most twice that of the same
formula in PyTorch in the same 16 bit, for the output and for every gradient of its sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from flash_dmattn import flash_dmattn_func

from .cases import Case, Inputs, make_inputs
from .contestants import keep_matrix, select
from .entrants import TOP_KEYS_OF_EACH_QUERY
from .results import Record, Results, Step, short_reason
from .tables import Table

LIMIT = 2.0
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
TENSORS = ("out", "dquery", "dkey", "dvalue", "dbias")
QUANTITIES = {name: f"largest error of {name}, of the largest value in float64" for name in TENSORS}
PYTORCH = "pytorch"
# Relative errors below this are zero in 16 bit. It is the least divisor.
_NOTHING = 1e-7


def configurations(device: str, dtype: str, longest: int) -> list[Case]:
    """Return the configurations of 1.2.2 up to the longest length."""
    base = Case("", dtype, heads=2, kv_heads=1, window=1024, device=device, per_query=True)
    cases = []
    for length, head_dim, causal in product(LENGTHS, HEAD_DIMS, (True, False)):
        name = f"d{head_dim}-n{length}-{'causal' if causal else 'full'}"
        case = replace(base, name=name, length=length, head_dim=head_dim, causal=causal)
        cases.append(case)
    return [case for case in cases if case.length <= longest]


def step(case: Case, backends: Sequence[str]) -> Step:
    """Return the step that measures one configuration."""
    record = partial(Record, case.name, "flash_dmattn", "ours", TOP_KEYS_OF_EACH_QUERY, "all")
    run = partial(measure, case, backends)
    return Step(case.name, run, lambda reason: [record(reason=reason)])


def measure(case: Case, backends: Sequence[str]) -> Iterator[Record]:
    """Yield the errors of PyTorch's formula, and of ours on each backend."""
    inputs = make_inputs(case)
    assert inputs.bias is not None
    keep = keep_matrix(case, inputs.bias).repeat_interleave(case.group, dim=1)
    formula = partial(_formula, keep=keep)
    expected = _results(inputs, formula, torch.float64)
    mask = select(case, inputs.bias)
    attends: dict[str, Callable[..., torch.Tensor]] = {PYTORCH: formula}
    for backend in backends:
        name = "flash_dmattn" if backend == "auto" else backend
        attends[name] = partial(_ours, mask=mask, causal=case.causal, backend=backend)
    for name, attend in attends.items():
        role = "baseline" if name == PYTORCH else "ours"
        record = partial(Record, case.name, name, role, TOP_KEYS_OF_EACH_QUERY)
        try:
            found = _results(inputs, attend, case.torch_dtype)
        except Exception as error:  # record the failure, and continue with the others
            yield record("all", reason=short_reason(error))
            continue
        for tensor, value in found.items():
            largest = (value.double() - expected[tensor]).abs().max() / expected[tensor].abs().max()
            yield record(tensor, float(largest))


def _formula(*tensors: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors[:3])
    group = query.shape[1] // key.shape[1]
    key, value, bias = (t.repeat_interleave(group, dim=1) for t in (key, value, tensors[3]))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
    out: torch.Tensor = scores.masked_fill(~keep, -torch.inf).softmax(-1) @ value
    return out.transpose(1, 2)


def _ours(*tensors: torch.Tensor, mask: Any, causal: bool, backend: str) -> torch.Tensor:
    query, key, value, bias = tensors
    out = flash_dmattn_func(
        query, key, value, mask, bias, is_causal=causal, deterministic=True, backend=backend
    )
    assert isinstance(out, torch.Tensor)
    return out


def _results(
    inputs: Inputs, attend: Callable[..., torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of its sum."""
    assert inputs.bias is not None
    given = (inputs.query, inputs.key, inputs.value, inputs.bias)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
    out = attend(*leaves)
    return dict(zip(TENSORS, [out.detach(), *torch.autograd.grad(out.sum(), leaves)], strict=True))


def ratios(results: Results) -> dict[tuple[str, str, str], float]:
    """Return our error relative to PyTorch's by case, contestant and tensor; NaN becomes inf."""
    known, found = results.values, {}
    for (case, contestant, tensor), error in known.items():
        if contestant != PYTORCH:
            ratio = error / max(known[case, PYTORCH, tensor], _NOTHING)
            found[case, contestant, tensor] = ratio if ratio == ratio else float("inf")
    return found


def failures(results: Results) -> list[str]:
    """Return a text for each error that is too large and each call that failed."""
    large = [
        f"{case}, {contestant}: the error of {tensor} is {ratio:.2f} times PyTorch's"
        for (case, contestant, tensor), ratio in ratios(results).items()
        if ratio > LIMIT
    ]
    return large + [
        f"{record.case}, {record.contestant}: {record.reason}"
        for record in results.records
        if record.reason and not record.reason.startswith("not measured")
    ]


def is_equivalence(results: Results) -> bool:
    """Say whether a run is one of this protocol."""
    return results.quantities == QUANTITIES


def equivalence_tables(results: Results) -> list[Table]:
    """Return the worst ratio of each tensor by head dimension, and the failures."""
    found = ratios(results)
    measured = len({case for case, *_ in found})
    dims = {name: case["head_dim"] for name, case in results.cases.items()}
    worst: dict[str, dict[int, dict[str, float]]] = {}
    for (case, contestant, tensor), ratio in found.items():
        row = worst.setdefault(contestant, {}).setdefault(dims[case], {})
        row[tensor] = max(ratio, row.get(tensor, 0.0))
    title = (
        "largest error, relative to PyTorch's in the same 16 bit, both against float64, worst of "
        f"{measured} of {len(dims)} configurations; at most {LIMIT:g}"
    )
    tables = [
        Table(
            f"{contestant}: {title}",
            ("", *TENSORS),
            tuple((f"D{dim}", *(f"{row[t]:.2f}" for t in TENSORS)) for dim, row in rows.items()),
        )
        for contestant, rows in worst.items()
    ]
    wrong = tuple(failures(results))
    return [*tables, *([Table("Failures", notes=wrong)] if wrong else [])]
