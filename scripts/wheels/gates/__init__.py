# SPDX-License-Identifier: BSD-3-Clause
"""What a wheel must be before it is given to anyone: one function for each promise.

A gate yields a line for each failure, and raises `Skipped` where it cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping

from wheels.gates import layout, libraries, packs, tools
from wheels.gates.verdict import Gate, Result, Skipped, Task, judge

__all__ = ["GATES", "Gate", "Result", "Skipped", "Task", "judge"]

GATES: Mapping[str, Gate] = {
    "needed": libraries.needed,
    "symbol-versions": libraries.symbol_versions,
    "run-path": libraries.run_path,
    "exports": libraries.exports,
    "hardening": libraries.hardening,
    "machine": libraries.machine,
    "tag": layout.tag,
    "abi3-only": layout.abi3_only,
    "content": layout.content,
    "licences": layout.licences,
    "sizes": layout.sizes,
    "manifest": packs.manifest,
    "device-code": packs.device_code,
    "same-kernels": packs.same_kernels,
    "complete": packs.complete,
    "auditwheel": tools.auditwheel,
    "abi3audit": tools.abi3audit,
    "check-wheel-contents": tools.check_wheel_contents,
    "twine": tools.twine,
}
