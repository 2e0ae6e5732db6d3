# SPDX-License-Identifier: BSD-3-Clause
"""Results as JSON, with what is needed to repeat them, and as text."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..backends import select_backend
from ..loader import pack_for
from .runner import CaseResult, Entry, Ratio

SCHEMA = 1
_MIB = 1 << 20


def describe_environment(device: str) -> dict[str, Any]:
    """What was measured, on what, and when."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "flash_dmattn": __version__,
        "pack": describe_pack(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    }


def describe_pack(device: str) -> dict[str, str] | None:
    """The kernel pack that serves a device; None where the plain PyTorch reference does."""
    where = torch.device(device)
    if select_backend(where, "auto").name == "reference":
        return None
    pack = pack_for(where.type, where.index)
    return {
        "name": pack.name,
        "version": pack.version,
        "compiler": pack.compiler,
        "features": pack.features,
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The source tree's commit, with ``-dirty`` if it has changes; None outside a git checkout."""
    here = Path(__file__).resolve().parent
    command = [
        "git",
        "-C",
        str(here),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def to_json(environment: dict[str, Any], results: Sequence[CaseResult]) -> dict[str, Any]:
    """The whole run as plain values; times in seconds, memory in bytes."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "results": [
            {
                "case": asdict(result.case),
                "pass": result.which,
                "contestants": [asdict(entry) for entry in result.entries],
                "ratios": [{**asdict(ratio), "met": ratio.met} for ratio in result.ratios],
            }
            for result in results
        ],
    }


def to_text(environment: dict[str, Any], results: Sequence[CaseResult]) -> str:
    """The same for people."""
    pack = environment["pack"]
    kernels = f"{pack['name']} [{pack['features']}]" if pack else "none (plain PyTorch reference)"
    lines = [
        f"flash_dmattn {environment['flash_dmattn']}, kernel pack {kernels}, "
        f"commit {environment['commit'] or 'unknown'}",
        f"torch {environment['torch']}, Python {environment['python']}, {environment['cpu']}, "
        f"{environment['threads']} threads, {environment['date']}",
    ]
    for result in results:
        lines += ["", *_result_lines(result)]
    return "\n".join(lines)


def _result_lines(result: CaseResult) -> list[str]:
    case = result.case
    window = "" if case.window is None else f" w{case.window}"
    shape = f"B{case.batch} H{case.heads} Hk{case.kv_heads} D{case.head_dim} N{case.length}{window}"
    title = f"{case.name}: {result.which.replace('_', ' + ')} ({shape})"
    masked = case.window is not None
    header = f"  {'':16}{'median ms':>11}"
    if masked:
        header += f"{'making mask ms':>16}{'extra MiB':>11}{'call MiB':>10}"
    lines = [title, header, *(_entry_line(entry, masked) for entry in result.entries)]
    return lines + [f"  {_ratio_text(ratio)}" for ratio in result.ratios]


def _ratio_text(ratio: Ratio) -> str:
    more, less = {
        "time": ("faster than", "slower than"),
        "memory": ("less memory than", "more memory than"),
    }[ratio.quantity]
    if ratio.value >= 1:
        text = f"{ratio.value:.2f} x {more} {ratio.baseline}"
    else:
        text = f"{1 / ratio.value:.2f} x {less} {ratio.baseline}"
    if ratio.target is None:
        return text
    promise = f"at least {ratio.target:g} x {more.split()[0]}"
    if ratio.target < 1:
        promise = f"at most {1 / ratio.target:g} x {less.split()[0]}"
    return f"{text} (promised: {promise}; {'met' if ratio.met else 'MISSED'})"


def _entry_line(entry: Entry, masked: bool) -> str:
    line = f"  {entry.contestant:16}{entry.median_s * 1e3:11.2f}"
    if masked:
        line += f"{entry.prepare_s * 1e3:16.2f}"
    if entry.memory is not None:
        line += f"{entry.memory.total_bytes / _MIB:11.1f}{entry.memory.call_bytes / _MIB:10.1f}"
    return line
