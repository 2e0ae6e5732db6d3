# SPDX-License-Identifier: BSD-3-Clause
"""A run as JSON, and as a table for each case."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..report import describe_environment
from .clock import GpuClock
from .records import Record, from_plain, ratios, to_plain
from .tables import Table
from .workloads import QUANTITIES, Workload

# 1 is the format of the benchmark on CPUs.
SCHEMA = 2
_MIB = 1 << 20
_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}

# Quantity, head of the column, and what turns its number into the cell.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("selection", "mask ms", lambda s: f"{s * 1e3:.3f}"),
    ("plan", "plan ms", lambda s: f"{s * 1e3:.3f}"),
    ("forward", "fwd ms", lambda s: f"{s * 1e3:.3f}"),
    ("forward_planned", "plan reused ms", lambda s: f"{s * 1e3:.3f}"),
    ("backward", "bwd ms", lambda s: f"{s * 1e3:.3f}"),
    ("forward_backward", "fwd+bwd ms", lambda s: f"{s * 1e3:.3f}"),
    ("end_to_end", "all ms", lambda s: f"{s * 1e3:.3f}"),
    ("host", "host us", lambda s: f"{s * 1e6:.1f}"),
    ("memory_forward", "fwd MiB", lambda b: f"{b / _MIB:.0f}"),
    ("memory_forward_backward", "fwd+bwd MiB", lambda b: f"{b / _MIB:.0f}"),
    ("memory_with_mask", "with mask MiB", lambda b: f"{b / _MIB:.0f}"),
)


def gpu_environment(device: str, commit: str | None) -> dict[str, Any]:
    """What was measured and on what; ``commit`` where the package is not run from its checkout."""
    environment = describe_environment(device)
    if commit is not None:
        environment["commit"] = commit
    environment["cuda"] = torch.version.cuda
    cudnn: Any = torch.backends.cudnn
    environment["cudnn"] = cudnn.version()
    environment["measurement"] = GpuClock.description
    environment["state_before"] = gpu_state(device)
    return environment


def gpu_state(device: str) -> dict[str, str] | None:
    """Driver, clocks and temperature as ``nvidia-smi`` tells them; None where it does not."""
    if torch.device(device).type != "cuda":
        return None
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_SMI_FIELDS)}",
        "--format=csv,noheader,nounits",
    ]
    if torch.cuda.device_count() > 1:  # torch and nvidia-smi may count them differently
        properties: Any = torch.cuda.get_device_properties(device)
        command.append(f"--id=GPU-{properties.uuid}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    cells = [cell.strip() for cell in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(cells) != len(_SMI_FIELDS):
        return None
    return dict(zip(_SMI_FIELDS.values(), cells, strict=True))


def to_json(
    environment: dict[str, Any], workloads: Sequence[Workload], records: Sequence[Record]
) -> dict[str, Any]:
    """The whole run as plain values; times in seconds, memory in bytes."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "quantities": QUANTITIES,
        "cases": {
            workload.name: {
                **asdict(workload.shape),
                "queries": workload.queries,
                "contestants": workload.contestants,
                "query_bytes": workload.query_bytes,
            }
            for workload in workloads
        },
        "records": [to_plain(record) for record in records],
        "ratios": ratios(records),
    }


def records_of(written: dict[str, Any]) -> list[Record]:
    """The records of a JSON file.

    Raises:
        ValueError: it has another schema.
    """
    if written.get("schema") != SCHEMA:
        raise ValueError(f"schema is {written.get('schema')!r}; results of a GPU have {SCHEMA}")
    return [from_plain(fields) for fields in written["records"]]


def heading(environment: dict[str, Any]) -> str:
    """One paragraph on what was measured on what."""
    pack = environment["pack"]
    kernels = f"{pack['name']} [{pack['features']}]" if pack else "none (plain PyTorch reference)"
    driver = (environment.get("state_before") or {}).get("driver", "unknown")
    return (
        f"flash_dmattn {environment['flash_dmattn']}, kernel pack {kernels}, "
        f"commit {environment['commit'] or 'unknown'}\n"
        f"{environment['gpu'] or environment['cpu']}, driver {driver}, torch "
        f"{environment['torch']}, CUDA {environment['cuda']}, cuDNN {environment['cudnn']}, "
        f"{environment['date']}"
    )


def case_tables(written: dict[str, Any]) -> list[Table]:
    """A table for each case: a row for each contestant, a column for each quantity."""
    records = records_of(written)
    return [
        _case_table(name, case, [record for record in records if record.case == name])
        for name, case in written["cases"].items()
    ]


def _case_table(name: str, case: dict[str, Any], records: Sequence[Record]) -> Table:
    measured = {record.quantity for record in records if record.value is not None}
    columns = [column for column in _COLUMNS if column[0] in measured]
    found = {(r.contestant, r.quantity): r.value for r in records if r.value is not None}
    masks = {record.contestant: record.mask for record in records}
    contestants = [contestant for contestant in case["contestants"] if contestant in masks]
    rows = tuple(
        (
            contestant,
            masks[contestant],
            *(
                shown(found[contestant, quantity]) if (contestant, quantity) in found else "-"
                for quantity, _, shown in columns
            ),
        )
        for contestant in contestants
    )
    heads = ("", "attends to", *(head for _, head, _ in columns))
    return Table(f"{name} ({_shape(case)})", heads, rows, tuple(_notes(records)))


def _shape(case: dict[str, Any]) -> str:
    queries = "" if case["queries"] is None else f" Q{case['queries']}"
    window = "" if case["window"] is None else f" w{case['window']}"
    return (
        f"B{case['batch']} H{case['heads']} Hk{case['kv_heads']} D{case['head_dim']}{queries} "
        f"N{case['length']}{window}, {case['dtype']}{', causal' if case['causal'] else ''}"
    )


def _notes(records: Iterable[Record]) -> Iterable[str]:
    for record in records:
        if record.reason is not None:
            yield f"{record.contestant}, {record.quantity}: {record.reason}"
