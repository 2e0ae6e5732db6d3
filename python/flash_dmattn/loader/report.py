# SPDX-License-Identifier: BSD-3-Clause
"""What ``python -m flash_dmattn`` tells: versions, devices, packs, and the trace of each device."""

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
from .trace import Accepted

__all__ = ["SCHEMA", "make_report", "render"]

SCHEMA = 1
_CANDIDATE_FIELDS = ("name", "path", "source", "device", "cuda", "arch", "version", "sha256")


def make_report(loader: Loader, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the report as what JSON can hold. It opens packs, and imports torch only where a
    backend or GPUs can be asked in no other way.

    ``usable`` is true if every value of a variable is allowed, and calls compute: on every visible
    device by its pack, or on one at least by what FLASH_DMATTN_BACKEND names.
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
            "torch": torch.version if torch else None,
            "numpy": facts.package_version("numpy"),
        },
        "host": {
            "system": platform.platform(),
            "machine": facts.host().machine,
            "libc": facts.host().libc,
        },
        "cuda": {
            "torch": torch.cuda if torch else None,
            "torch_rocm": torch.rocm if torch else None,
            "torch_xpu": torch.xpu if torch else None,
            "driver": driver.version if driver else None,
            "driver_runs": driver.cuda if driver else None,
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
    lines = [
        f"flash_dmattn  {versions['flash_dmattn'] or 'not installed as a distribution'}",
        f"python        {versions['python']}",
        f"torch         {_torch_text(versions['torch'], cuda)}",
        f"numpy         {versions['numpy'] or 'not installed'}",
        f"host          {host['system']}, {host['machine']}, {host['libc']}",
        f"driver        {_driver_text(cuda)}",
    ]
    lines += [f"set           {name}={value}" for name, value in report["environment"].items()]
    lines += [f"problem       {problem}" for problem in report["problems"]]
    lines += [f"warning       {warning}" for warning in report["warnings"]]
    lines += [f"pack          {pack['name']} from {pack['source']}" for pack in report["packs"]]
    for device in report["devices"]:
        pack = device["pack"]
        lines += ["", device["text"]]
        if pack is not None:
            lines += [
                f"  pack      {pack['name']} {pack['version']}, {pack['path']}",
                f"  built by  {pack['compiler']}"
                + f", uses {pack['features']}" * bool(pack["features"]),
            ]
        if device["calls"] is not None:
            lines.append(f"  calls     {device['calls']}")
        lines += [f"  {line}" for line in device["trace"]]
        if device["warning"] is not None:
            lines += [f"  {line}" for line in f"warning: {device['warning']}".splitlines()]
        if device["remedy"] is not None:
            lines.append(f"  fix: {device['remedy']}")
    return "\n".join([*lines, "", f"flash_dmattn is {_verdict(report)}"])


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
    chosen = trace.chosen
    pack = loader.opened_for(device.kind, device.index)
    computes, calls = pack is not None, None
    if backend not in ("auto", device.kind):
        computes, calls = _asked(backend, device)
    return {
        **_fields(device, "kind", "index", "name", "capability"),
        "text": str(device),
        "pack": None
        if chosen is None or pack is None
        else {
            "name": pack.name,
            "path": chosen.path,
            **_fields(pack, "version", "compiler", "features"),
        },
        "computes": computes,
        "calls": calls,
        "candidates": [
            {
                **_fields(entry.candidate, "name", "path", "source"),
                "accepted": isinstance(entry.verdict, Accepted),
                "reason": entry.verdict.note
                if isinstance(entry.verdict, Accepted)
                else entry.verdict.reason,
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
    """Say whether a backend that FLASH_DMATTN_BACKEND names computes on a device, and what comes of
    calls.
    """
    if backend == "reference":
        return True, messages.COMPUTED_BY.format(backend=backend)
    if backend in ("cpu", "cuda"):
        return False, messages.LEFT_ASIDE.format(backend=backend)
    try:
        portable = importlib.import_module("flash_dmattn.backends.portable")
    except Exception as error:  # a broken installation is what a report is for
        reason = messages.NO_PYTORCH.format(error=error)
    else:
        reason = portable.why_unavailable(backend, device.kind)
    if reason is None:
        return True, messages.COMPUTED_BY.format(backend=backend)
    return False, messages.CALLS_RAISE.format(backend=backend, reason=reason)


def _driver_text(cuda: Mapping[str, Any]) -> str:
    if cuda["driver"] is None and cuda["driver_runs"] is None:
        return "no NVIDIA driver"
    version, runs = (cuda[key] or "of unknown version" for key in ("driver", "driver_runs"))
    return f"NVIDIA {version}, runs CUDA {runs}"


def _torch_text(version: str | None, cuda: Mapping[str, Any]) -> str:
    if version is None:
        return "not installed"
    return str(Torch(version, cuda["torch"], cuda["torch_rocm"], cuda["torch_xpu"]))
