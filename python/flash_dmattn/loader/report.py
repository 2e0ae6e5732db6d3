# SPDX-License-Identifier: BSD-3-Clause
"""What ``python -m flash_dmattn`` tells: versions, devices, packs, and the trace of each device."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from typing import Any

from . import environment
from .candidates import Candidate, OpenedPack
from .errors import passed_over_text
from .facts import Device
from .resolver import Loader
from .trace import Refused, Trace

__all__ = ["SCHEMA", "make_report", "render"]

SCHEMA = 1


def make_report(loader: Loader[Any], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the report as what JSON can hold. It imports torch and NumPy where they are, and opens
    packs.

    ``usable`` is true if a pack serves every visible device; without a GPU the CPU alone counts.
    """
    environ = os.environ if environ is None else environ
    torch_version, numpy_version = _version_of("torch"), _version_of("numpy")
    facts = loader.facts
    driver, torch = facts.driver(), facts.torch()
    devices = [_describe(loader, d) for d in (Device("cpu", 0), *facts.cuda_devices())]
    return {
        "schema": SCHEMA,
        "versions": {
            "flash_dmattn": facts.package_version(),
            "python": platform.python_version(),
            "torch": torch_version,
            "numpy": numpy_version,
        },
        "host": {
            "system": platform.platform(),
            "machine": facts.host().machine,
            "libc": facts.host().libc,
        },
        "cuda": {
            "torch": torch.cuda if torch else None,
            "driver": driver.version if driver else None,
            "driver_runs": driver.cuda if driver else None,
        },
        "environment": environment.variables_set(environ),
        "problems": environment.problems(environ),
        "packs": [_describe_candidate(candidate) for candidate in loader.candidates()],
        "devices": devices,
        "usable": all(device["pack"] is not None for device in devices),
    }


def render(report: Mapping[str, Any]) -> str:
    """Return a report as text."""
    versions, host, cuda = report["versions"], report["host"], report["cuda"]
    lines = [
        f"flash_dmattn  {versions['flash_dmattn'] or 'not installed as a distribution'}",
        f"python        {versions['python']}",
        f"torch         {versions['torch'] or 'not installed'}"
        + (f", CUDA {cuda['torch']}" if cuda["torch"] else ", without CUDA")
        * bool(versions["torch"]),
        f"numpy         {versions['numpy'] or 'not installed'}",
        f"host          {host['system']}, {host['machine']}, {host['libc']}",
        f"driver        {_driver_text(cuda)}",
    ]
    lines += [f"set           {name}={value}" for name, value in report["environment"].items()]
    lines += [f"warning       {problem}" for problem in report["problems"]]
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
        lines += [f"  {line}" for line in device["trace"]]
        if device["warning"] is not None:
            lines += [f"  {line}" for line in f"warning: {device['warning']}".splitlines()]
        if device["remedy"] is not None:
            lines.append(f"  fix: {device['remedy']}")
    verdict = "usable" if report["usable"] else "not usable: a device above has no pack"
    return "\n".join([*lines, "", f"flash_dmattn is {verdict}"])


def _describe(loader: Loader[Any], device: Device) -> dict[str, Any]:
    trace = loader.trace_for(device.kind, device.index)
    chosen = trace.chosen
    pack = loader.opened_for(device.kind, device.index)
    return {
        "kind": device.kind,
        "index": device.index,
        "name": device.name,
        "capability": device.capability,
        "text": str(device),
        "pack": None if chosen is None or pack is None else _describe_pack(pack, chosen.path),
        "candidates": _describe_candidates(trace),
        "trace": trace.lines(),
        "problem": trace.problem.reason if trace.problem else None,
        "warning": passed_over_text(trace) or None,
        "remedy": trace.remedy if chosen is None else None,
    }


def _describe_candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "path": candidate.path,
        "source": candidate.source,
        "device": candidate.device,
        "cuda": candidate.cuda,
        "arch": candidate.arch,
        "version": candidate.version,
        "sha256": candidate.sha256,
        "defect": candidate.defect or None,
    }


def _describe_pack(pack: OpenedPack, path: str) -> dict[str, Any]:
    return {
        "name": pack.name,
        "path": path,
        "version": pack.version,
        "compiler": pack.compiler,
        "features": pack.features,
    }


def _describe_candidates(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "name": entry.candidate.name,
            "path": entry.candidate.path,
            "source": entry.candidate.source,
            "accepted": not isinstance(entry.verdict, Refused),
            "reason": entry.verdict.reason
            if isinstance(entry.verdict, Refused)
            else entry.verdict.note,
        }
        for entry in trace.entries
    ]


def _driver_text(cuda: Mapping[str, Any]) -> str:
    if cuda["driver"] is None and cuda["driver_runs"] is None:
        return "no NVIDIA driver"
    version, runs = (cuda[key] or "of unknown version" for key in ("driver", "driver_runs"))
    return f"NVIDIA {version}, runs CUDA {runs}"


def _version_of(module: str) -> str | None:
    """Import a module and return its version; None if it is absent, the reason if it is broken."""
    try:
        return str(importlib.import_module(module).__version__)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # a broken installation is what a report is for
        return f"broken: {type(error).__name__}: {error}"
