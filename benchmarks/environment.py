# SPDX-License-Identifier: BSD-3-Clause
"""The environment of a run: everything that is needed to repeat it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flash_dmattn import __version__
from flash_dmattn.backends import select_backend
from flash_dmattn.loader import pack_for

_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


# Distributions of optional contestants.
_PEERS = (
    "cuequivariance-ops-torch-cu12",
    "cuequivariance-ops-torch-cu13",
    "flash-attn-4",
    "trifast",
)


def describe_environment(
    device: str, measurement: str, commit: str | None = None, note: str | None = None
) -> dict[str, Any]:
    """Return what is measured, on which machine, and when.

    ``commit`` is needed outside a git checkout. ``note`` is other information for readers, such as
    other users of the machine.
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
        "load": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": cudnn.version() if on_gpu else None,
        "peers": _peer_versions(),
        "note": note,
        "measurement": measurement,
        "state_before": gpu_state(device),
    }


def describe_pack(device: str) -> dict[str, str] | None:
    """Return the kernel pack of a device; None if the plain PyTorch reference serves it."""
    where = torch.device(device)
    if select_backend(where, "auto").name == "reference":
        return None
    pack = pack_for(where.type, where.index)
    return {name: getattr(pack, name) for name in ("name", "version", "compiler", "features")}


def _peer_versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    found = {}
    for name in _PEERS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def cpu_model() -> str:
    """Return the processor's name as the system reports it."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def gpu_state(device: str) -> dict[str, str] | None:
    """Return driver, clocks and temperature from ``nvidia-smi``; None without it."""
    if torch.device(device).type != "cuda":
        return None
    # torch and nvidia-smi may number GPUs differently, and torch may see only some of them.
    properties: Any = torch.cuda.get_device_properties(device)
    asked = [f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    cells = (_output(["nvidia-smi", *asked, f"--id=GPU-{properties.uuid}"]) or "").split(", ")
    return dict(zip(_SMI_FIELDS.values(), cells, strict=True)) if len(cells) > 1 else None


def _commit() -> str | None:
    """Return the checkout's commit, with ``-dirty`` for changes; None outside a git checkout."""
    here = str(Path(__file__).resolve().parent)
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return _output(["git", "-C", here, *describe])


def _output(command: Sequence[str]) -> str | None:
    """Return what a program prints; None if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
