# SPDX-License-Identifier: BSD-3-Clause
"""The report of ``python -m flash_dmattn``: versions, devices, packs, and each device's trace."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from typing import Any

from . import environment, messages
from .errors import passed_over_text
from .facts import Device, Torch
from .resolver import Loader

SCHEMA = 1
_CANDIDATE_FIELDS = ("name", "path", "source", "device", "cuda", "arch", "version", "sha256")


def make_report(loader: Loader, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the report in JSON types.

    It opens packs. It imports torch only if a backend or GPUs cannot be queried otherwise.

    ``usable`` is true if all variables have allowed values, and calls compute: on every visible
    device by its pack, or on at least one by the backend of FLASH_DMATTN_BACKEND.
    """
    environ = os.environ if environ is None else environ
    facts = loader.facts
    driver, torch = facts.driver(), facts.torch()
    problems = environment.invalid(environ)
    backend = "auto" if problems else environment.get("FLASH_DMATTN_BACKEND", environ)
    devices = [_describe(loader, d, backend) for d in (Device("cpu", 0), *facts.gpus())]
    problems += [device["problem"] for device in devices if device["problem"] is not None]
    by_pack = [device for device in devices if backend in ("auto", device["kind"])]
    return {
        "schema": SCHEMA,
        "versions": {
            "flash_dmattn": facts.package_version(),
            "python": platform.python_version(),
            "torch": torch and torch.version,
            "numpy": facts.package_version("numpy"),
        },
        "host": {"system": platform.platform(), **facts.host()._asdict()},
        "cuda": {
            "torch": torch and torch.cuda,
            "torch_rocm": torch and torch.rocm,
            "torch_xpu": torch and torch.xpu,
            "driver": driver and driver.version,
            "driver_runs": driver and driver.cuda,
        },
        "environment": environment.variables_set(environ),
        "problems": list(dict.fromkeys(problems)),
        "warnings": environment.unknown(environ),
        "packs": [
            {**_fields(candidate, *_CANDIDATE_FIELDS), "defect": candidate.defect or None}
            for candidate in loader.candidates()
        ],
        "devices": devices,
        "usable": not problems
        and any(device["computes"] for device in devices)
        and all(device["computes"] for device in by_pack),
    }


def render(report: Mapping[str, Any]) -> str:
    """Return a report as text."""
    versions, host, cuda = report["versions"], report["host"], report["cuda"]
    torch = Torch(versions["torch"] or "", cuda["torch"], cuda["torch_rocm"], cuda["torch_xpu"])
    driver, runs = (cuda[key] or "of unknown version" for key in ("driver", "driver_runs"))
    has_driver = cuda["driver"] or cuda["driver_runs"]
    rows = [
        ("flash_dmattn", versions["flash_dmattn"] or "not installed as a distribution"),
        ("python", versions["python"]),
        ("torch", torch if torch.version else "not installed"),
        ("numpy", versions["numpy"] or "not installed"),
        ("host", ", ".join(host.values())),
        ("driver", f"NVIDIA {driver}, runs CUDA {runs}" if has_driver else "no NVIDIA driver"),
        *(("set", f"{name}={value}") for name, value in report["environment"].items()),
        *(("problem", problem) for problem in report["problems"]),
        *(("warning", warning) for warning in report["warnings"]),
        *(("pack", f"{pack['name']} from {pack['source']}") for pack in report["packs"]),
    ]
    devices = [line for device in report["devices"] for line in _lines(device)]
    lines = [*(f"{head:<14}{text}" for head, text in rows), *devices]
    return "\n".join([*lines, "", f"flash_dmattn is {_verdict(report)}"])


def _lines(device: Mapping[str, Any]) -> list[str]:
    lines, pack = list(device["trace"]), device["pack"]
    if device["calls"] is not None:
        lines.insert(0, f"calls     {device['calls']}")
    if pack is not None:
        uses = f", uses {pack['features']}" if pack["features"] else ""
        opened = f"{pack['name']} {pack['version']}, {pack['path']}"
        lines[:0] = [f"pack      {opened}", f"built by  {pack['compiler']}{uses}"]
    if device["warning"] is not None:
        lines += f"warning: {device['warning']}".splitlines()
    if device["remedy"] is not None:
        lines.append(f"fix: {device['remedy']}")
    return ["", device["text"], *(f"  {line}" for line in lines)]


def _verdict(report: Mapping[str, Any]) -> str:
    if report["usable"]:
        return "usable"
    if report["problems"]:
        return f"not usable: {report['problems'][0]}"
    if any(device["calls"] is not None for device in report["devices"]):
        return "not usable: FLASH_DMATTN_BACKEND names what computes on no device above"
    return "not usable: a device above has no pack"


def _describe(loader: Loader, device: Device, backend: str) -> dict[str, Any]:
    trace = loader.trace_for(device.kind, device.index)
    chosen, pack, opened = trace.chosen, trace.pack, None
    if chosen is not None and pack is not None:
        about = _fields(pack, "version", "compiler", "features")
        opened = {"name": pack.name, "path": chosen.path, **about}
    computes, calls = pack is not None, None
    if backend not in ("auto", device.kind):
        computes, calls = _asked(backend, device)
    return {
        **_fields(device, "kind", "index", "name", "capability"),
        "text": str(device),
        "pack": opened,
        "computes": computes,
        "calls": calls,
        "candidates": [
            {
                **_fields(entry.candidate, "name", "path", "source"),
                "accepted": entry.rule is None,
                "reason": entry.reason,
            }
            for entry in trace.entries
        ],
        "trace": trace.lines(),
        "problem": trace.problem,
        "warning": passed_over_text(trace) or None,
        "remedy": trace.remedy if chosen is None and calls is None else None,
    }


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _asked(backend: str, device: Device) -> tuple[bool, str]:
    """Return whether the backend of FLASH_DMATTN_BACKEND computes on a device, and the outcome of
    calls as text.
    """
    if backend in ("cpu", "cuda"):
        return False, messages.LEFT_ASIDE.format(backend=backend)
    reason = None
    if backend != "reference":
        try:
            portable = importlib.import_module("flash_dmattn.backends.portable")
        except Exception as error:  # the report must show a broken installation
            reason = messages.NO_PYTORCH.format(error=error)
        else:
            reason = portable.why_unavailable(backend, device.kind)
    if reason is None:
        return True, messages.COMPUTED_BY.format(backend=backend)
    return False, messages.CALLS_RAISE.format(backend=backend, reason=reason)
