# SPDX-License-Identifier: BSD-3-Clause
"""The two equivalence protocols of flash-dmattn 1.2.2, with tolerances that mean something.

The shapes are its 72: one sequence, two heads on one key/value head, 128 to 4096 tokens, six head
dimensions, causal or not, a 16-bit bias for each query and key, the top 1024 keys of each query.
Its scripts compared with a reference in 16 bit and passed where 95 % of the elements were near.
Here every element counts: the largest error against float64 may be at most twice that of the same
formula in PyTorch in the same 16 bit, for the output and for every gradient of its sum.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch

from .. import flash_dmattn_func
from .cases import Case, Inputs, make_inputs
from .contestants.base import keep_matrix, select
from .engine import release_memory
from .environment import describe_environment, heading
from .options import add_measuring, default_device, positive, progress_bar, usable_device
from .records import Record, short_reason, values
from .results import write_json, written
from .tables import Table
from .timing import Deadline

LIMIT = 2.0
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
TENSORS = ("out", "dquery", "dkey", "dvalue", "dbias")
_QUANTITIES = {
    name: f"largest error of {name}, of the largest value in float64" for name in TENSORS
}
PYTORCH = "pytorch"
_MASK = "top-w keys of each query"
# Errors below this, of the largest value, are zero in 16 bit: nothing may be divided by them.
_NOTHING = 1e-7
# What a CPU takes by default, so that it is done in a minute.
_LONGEST_ON_CPU = 1024


def configurations(device: str, dtype: str, longest: int) -> list[Case]:
    """1.2.2's, as far as they are not longer than wanted."""
    return [
        Case(
            name=f"d{head_dim}-n{length}-{'causal' if causal else 'full'}",
            dtype=dtype,
            heads=2,
            kv_heads=1,
            head_dim=head_dim,
            length=length,
            window=1024,
            causal=causal,
            device=device,
            per_query=True,
        )
        for length, head_dim, causal in product(LENGTHS, HEAD_DIMS, (True, False))
        if length <= longest
    ]


def measure(case: Case, backends: Sequence[str]) -> Iterator[Record]:
    """Errors of PyTorch's formula and of ours on each backend."""
    inputs = make_inputs(case)
    assert inputs.bias is not None
    keep = keep_matrix(case, inputs.bias).repeat_interleave(case.group, dim=1)
    expected = _results(inputs, partial(_formula, keep=keep), torch.float64)

    def records(contestant: str, role: str, found: Mapping[str, torch.Tensor]) -> Iterator[Record]:
        for name, tensor in found.items():
            yield Record(case.name, contestant, role, _MASK, name, _error(tensor, expected[name]))

    theirs = _results(inputs, partial(_formula, keep=keep), case.torch_dtype)
    yield from records(PYTORCH, "baseline", theirs)
    del theirs
    mask = select(case, inputs.bias)
    for backend in backends:
        name = "flash_dmattn" if backend == "auto" else backend
        try:
            call = partial(_ours, mask=mask, causal=case.causal, backend=backend)
            yield from records(name, "ours", _results(inputs, call, case.torch_dtype))
        except Exception as error:  # the others go on, and this one has failed
            yield _missing(case, name, short_reason(error))


def _missing(case: Case, contestant: str, reason: str) -> Record:
    return Record(case.name, contestant, "ours", _MASK, "all", None, reason=reason)


def _formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    *,
    keep: torch.Tensor,
) -> torch.Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value, bias = (t.repeat_interleave(group, dim=1) for t in (key, value, bias))
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


def _results(inputs: Inputs, attend: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output, and the gradients of its sum."""
    assert inputs.bias is not None
    given = (inputs.query, inputs.key, inputs.value, inputs.bias)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
    out = attend(*leaves)
    return dict(zip(TENSORS, [out.detach(), *torch.autograd.grad(out.sum(), leaves)], strict=True))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected).abs().max() / expected.abs().max()
    return float(difference.item())


def ratios(results: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    """Our error by PyTorch's, for each case, contestant and tensor; NaN counts as infinite."""
    known = values(Record(**{"value": None, **fields}) for fields in results["records"])
    found = {}
    for (case, contestant, tensor), error in known.items():
        if contestant != PYTORCH:
            theirs = max(known[case, PYTORCH, tensor], _NOTHING)
            ratio = error / theirs
            found[case, contestant, tensor] = ratio if ratio == ratio else float("inf")
    return found


def failures(results: Mapping[str, Any]) -> list[str]:
    """What is wrong, for people: errors that are too large, and calls that failed."""
    large = [
        f"{case}, {contestant}: the error of {tensor} is {ratio:.2f} times PyTorch's"
        for (case, contestant, tensor), ratio in ratios(results).items()
        if ratio > LIMIT
    ]
    return large + [
        f"{fields['case']}, {fields['contestant']}: {fields['reason']}"
        for fields in results["records"]
        if fields.get("reason") and not fields["reason"].startswith("not measured")
    ]


def is_equivalence(results: Mapping[str, Any]) -> bool:
    """Whether a file of results is one of this protocol."""
    return bool(results["quantities"] == _QUANTITIES)


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The worst ratio of each tensor by head dimension."""
    found = ratios(results)
    measured = len({case for case, *_ in found})
    dims = {name: case["head_dim"] for name, case in results["cases"].items()}
    shown = []
    for contestant in dict.fromkeys(contestant for _, contestant, _ in found):
        rows = []
        for dim in sorted(set(dims.values())):
            worst = {
                tensor: max(
                    ratio
                    for (case, who, what), ratio in found.items()
                    if (who, what, dims[case]) == (contestant, tensor, dim)
                )
                for case, who, tensor in found
                if who == contestant and dims[case] == dim
            }
            if worst:
                rows.append((f"D{dim}", *(f"{worst[tensor]:.2f}" for tensor in TENSORS)))
        title = (
            f"{contestant}: largest error by that of PyTorch in the same 16 bit, both against "
            f"float64, worst of {measured} of {len(dims)} configurations; at most {LIMIT:g}"
        )
        shown.append(Table(title, ("", *TENSORS), tuple(rows)))
    problems = tuple((problem,) for problem in failures(results))
    return [*shown, *([Table("Failures", ("",), problems)] if problems else [])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_measuring(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--longest",
        type=positive,
        help=f"leave longer sequences out (default: {LENGTHS[-1]}; {_LONGEST_ON_CPU} on a CPU)",
    )
    parser.add_argument(
        "--backends", nargs="+", default=["auto"], metavar="NAME", help="default: auto"
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the protocol; returns 1 where an error is too large or a call failed, 3 out of time."""
    try:
        device = usable_device(options.device or default_device())
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    longest = options.longest or (LENGTHS[-1] if device.startswith("cuda") else _LONGEST_ON_CPU)
    cases = configurations(device, options.dtype, longest)
    if not cases:
        parser.error(f"--longest is {longest}; the shortest sequence is {LENGTHS[0]}")
    environment = describe_environment(device, options.commit, options.note)
    deadline = Deadline(options.budget)
    shapes = {case.name: asdict(case) for case in cases}
    results: dict[str, Any] = {}
    records: list[Record] = []
    bar, tick = progress_bar(len(cases))
    with bar:
        for case in cases:
            tick(case.name)
            if deadline.passed:
                records.append(_missing(case, "flash_dmattn", deadline.reason))
            else:
                records += measure(case, options.backends)
                release_memory()
            results = written(environment, _QUANTITIES, shapes, records)
            if options.output is not None:
                write_json(options.output, results)
    print("\n\n".join([heading(environment), *(table.text() for table in tables(results))]))
    if failures(results):
        return 1
    measured = len({case for case, *_ in ratios(results)})
    print(f"{measured} of {len(cases)} configurations were measured, none failed")
    return 0 if measured == len(cases) else 3
