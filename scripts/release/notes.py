# SPDX-License-Identifier: BSD-3-Clause
"""The text of a release: what changed, what it holds, and what of it ran on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from release.distributions import sha256
from release.gpu_record import GpuRecord, archs_not_run

MIB = 1 << 20


def release_notes(
    changes: str,
    distributions: Sequence[Path],
    records: Sequence[GpuRecord],
    repository: str = "OWNER/REPOSITORY",
) -> str:
    wheels = [path for path in distributions if path.suffix == ".whl"]
    lines = [changes, "", "### Tested on GPUs", ""]
    if records:
        lines += ["| GPU | capability | pack | torch | driver |", "|---|---|---|---|---|"]
        lines += [
            f"| {r.device} | {r.capability} | {r.pack} | {r.torch} | {r.driver} |" for r in records
        ]
    else:
        lines.append("No GPU was at hand: nothing of this release ran on one.")
    missing = archs_not_run(records, wheels)
    if missing:
        lines += [
            "",
            f"**In the wheels, but not run for this release: {', '.join(missing)}.** Their machine "
            "code was checked to be present and complete.",
        ]
    lines += ["", "### Files", "", "| file | MiB | sha256 |", "|---|---|---|"]
    lines += [
        f"| {path.name} | {path.stat().st_size / MIB:.1f} | `{sha256(path)}` |"
        for path in distributions
    ]
    lines += [
        "",
        "Verify a download: `sha256sum --check --ignore-missing SHA256SUMS`, and who built it: "
        f"`gh attestation verify FILE --repo {repository}`.",
    ]
    return "\n".join(lines) + "\n"
