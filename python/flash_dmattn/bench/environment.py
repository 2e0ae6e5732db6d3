# SPDX-License-Identifier: BSD-3-Clause
"""What was measured, on what and when: what is needed to repeat a run."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..backends import select_backend
from ..loader import pack_for

_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def describe_environment(
    device: str, commit: str | None = None, note: str | None = None
) -> dict[str, Any]:
    """What was measured, on what, and when.

    ``commit`` is needed where the package is not run from its checkout; ``note`` is what else a
    reader should know, such as who else used the machine.
    """
    on_gpu = device.startswith("cuda")
    cudnn: Any = torch.backends.cudnn
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "flash_dmattn": __version__,
        "pack": describe_pack(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": cudnn.version() if on_gpu else None,
        "note": note,
        "state_before": gpu_state(device),
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


def machine(environment: dict[str, Any]) -> str:
    """What a run was on, in a few words."""
    threads = environment["threads"]
    on_cpu = f"{environment['cpu']}, {threads} thread{'' if threads == 1 else 's'}"
    return str(environment["gpu"] or on_cpu)


def heading(environment: dict[str, Any]) -> str:
    """One paragraph on what was measured on what."""
    pack = environment["pack"]
    kernels = f"{pack['name']} [{pack['features']}]" if pack else "none (plain PyTorch reference)"
    lines = [
        f"flash_dmattn {environment['flash_dmattn']}, kernel pack {kernels}, "
        f"commit {environment['commit'] or 'unknown'}"
    ]
    if environment["gpu"]:
        driver = (environment.get("state_before") or {}).get("driver", "unknown")
        lines.append(
            f"{environment['gpu']}, driver {driver}, torch {environment['torch']}, CUDA "
            f"{environment['cuda']}, cuDNN {environment['cudnn']}, {environment['date']}"
        )
    else:
        lines.append(
            f"{machine(environment)}, torch {environment['torch']}, Python "
            f"{environment['python']}, {environment['date']}"
        )
    if environment.get("note"):
        lines.append(environment["note"])
    return "\n".join(lines)


def _commit() -> str | None:
    """The source tree's commit, with ``-dirty`` if it has changes; None outside a git checkout."""
    here = str(Path(__file__).resolve().parent)
    options = ["--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", here, "describe", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
