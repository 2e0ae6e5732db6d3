# SPDX-License-Identifier: BSD-3-Clause
"""Prints the jobs of CI, made from cmake/targets.json, with the digests of their images.

The jobs are printed as a workflow's outputs, one line for each kind: ``packs=[...]``. The line
``build={...}`` repeats the build jobs for the build record. The digest of an image comes from
.github/images.json, or from the registry when a run starts: every job of a run uses the same.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from release import targets
from release.project import ROOT, ReleaseError, commit_time
from release.targets import Platform, Table

Jobs: TypeAlias = dict[str, list[dict[str, str]]]
SMALL_ARCH = "sm90"
SMALL_HEAD_DIMS = (64, 128)
# The tests on systems whose wheel has only the cpu pack; other tests need programs of Linux. Jobs
# with an empty string run all tests.
CPU_TESTS = (
    "tests/test_attention.py tests/test_cpu_pack_limits.py tests/test_edge_cases.py "
    "tests/test_selection.py tests/test_varlen.py"
)
LOCK = ROOT / ".github" / "images.json"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# The kinds of jobs that build files of a release in an image.
BUILDS = ("packs", "wheels")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    machines = [row.machine for row in targets.load().platforms]
    parser.add_argument("--small", action="store_true", help="the subset that a change is tried on")
    parser.add_argument("--machine", action="append", default=[], choices=machines)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--resolve-digests", action="store_true", help="ask the registry for those not committed"
    )
    mode.add_argument(
        "--newest-digests", action="store_true", help="ask the registry for all of them"
    )
    mode.add_argument(
        "--update-digests", action="store_true", help="write those that the registry has now"
    )


def run(options: argparse.Namespace) -> None:
    """Print the jobs, or renew the digests of their images."""
    found = jobs(targets.load(), options.machine, options.small)
    images = images_of(found)
    if options.update_digests:
        LOCK.write_text(lock_text({image: present_digest(image) for image in images}))
        return
    digests = {} if options.newest_digests else json.loads(LOCK.read_text())
    if options.newest_digests or options.resolve_digests:
        unknown = [image for image in images if image not in digests]
        digests |= {image: present_digest(image) for image in unknown}
    found = pinned(found, digests)
    for kind, rows in found.items():
        print(f"{kind}={compact(rows)}")
    print(f"build={compact({kind: found[kind] for kind in BUILDS})}")
    # Built files contain the time of the sources, so that equal sources give equal files.
    if seconds := commit_time():
        print(f"epoch={seconds}")


def compact(content: object) -> str:
    """Return JSON on one line, as outputs of a workflow must be."""
    return json.dumps(content, separators=(",", ":"))


def lock_text(digests: Mapping[str, str]) -> str:
    """Return the content of .github/images.json."""
    return json.dumps(digests, indent=2, sort_keys=True) + "\n"


def jobs(table: Table, machines: Sequence[str] = (), small: bool = False) -> Jobs:
    """Return the jobs: packs, wheels with them, wheels with only the cpu pack, and tests.

    Args:
        table: the declared targets.
        machines: only these machines of Linux; all platforms of the table if none is given.
        small: the subset for a change: one machine of Linux, the newest CUDA, one arch, two head
            dimensions. It includes all wheels with only the cpu pack, which are small.
    """
    chosen = list(machines) or [row.machine for row in table.platforms][: 1 if small else None]
    unknown = sorted(set(chosen) - {row.machine for row in table.platforms})
    if unknown:
        raise ReleaseError(f"the table has no machine {', '.join(unknown)}")
    platforms = [row for row in table.platforms if row.machine in chosen]
    cpu_platforms = () if machines else table.cpu_platforms
    pythons = table.torch_pythons
    if small:
        pythons = (pythons[0], pythons[-1])
    return {
        "packs": [job for row in platforms for job in _packs(table, row, small)],
        "wheels": [
            {
                "machine": row.machine,
                "runner": row.runner,
                "image": table.wheel.image.format(policy=table.wheel.policy, machine=row.machine),
                "tag": f"{_abi_tag(table)}-{table.wheel.policy}_{row.machine}",
                "artifact": f"wheel-{row.machine}",
            }
            for row in platforms
        ],
        "cpu_wheels": [
            {
                "machine": row.name,
                "runner": row.runner,
                "tag": f"{_abi_tag(table)}-{row.tag}",
                "artifact": f"wheel-{row.name}",
            }
            for row in cpu_platforms
        ],
        "tests": [
            {
                "machine": name,
                "runner": runner,
                "python": python,
                "artifact": f"wheel-{name}",
                "tests": tests,
            }
            for name, runner, tests in (
                *((row.machine, row.runner, "") for row in platforms),
                *((row.name, row.runner, CPU_TESTS) for row in cpu_platforms),
            )
            for python in pythons
        ],
    }


def _packs(table: Table, platform: Platform, small: bool) -> list[dict[str, str]]:
    """Return the jobs that build one platform's packs, one for each CUDA major."""
    return [
        {
            "cuda": cuda.major,
            "machine": platform.machine,
            "runner": platform.runner,
            "image": cuda.image.format(policy=table.wheel.policy, machine=platform.machine),
            "archs": SMALL_ARCH
            if small
            else " ".join(arch.name for arch in table.released(cuda, platform.machine)),
            "head_dims": " ".join(map(str, SMALL_HEAD_DIMS)) if small else "",
            "artifact": f"packs-cu{cuda.major}-{platform.machine}",
        }
        for cuda in (table.cuda[-1:] if small else table.cuda)
    ]


def _abi_tag(table: Table) -> str:
    return f"cp{table.pythons[0].replace('.', '')}-abi3"


def images_of(found: Jobs) -> list[str]:
    return sorted({row["image"] for rows in found.values() for row in rows if "image" in row})


def pinned(found: Jobs, digests: Mapping[str, str]) -> Jobs:
    """Return the jobs with ``name@digest`` for each image; one without a digest keeps its name."""
    missing = [image for image in images_of(found) if image not in digests]
    if missing:
        print(
            f"release matrix: no digest in .github/images.json for {', '.join(missing)}; "
            "--resolve-digests asks the registry",
            file=sys.stderr,
        )
    for image, digest in digests.items():
        if not DIGEST.fullmatch(digest):
            raise ReleaseError(f"{digest!r} is not a digest of {image}")
    return {
        kind: [
            {**row, "image": f"{row['image']}@{digests[row['image']]}"}
            if row.get("image") in digests
            else row
            for row in rows
        ]
        for kind, rows in found.items()
    }


def present_digest(image: str) -> str:
    """Return the digest that the registry has for an image now."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}"]
    done = subprocess.run([*command, image], capture_output=True, text=True, check=False)
    digest = done.stdout.strip()
    if done.returncode != 0 or not DIGEST.fullmatch(digest):
        raise ReleaseError(f"{' '.join(command)} {image}: {done.stderr.strip() or digest!r}")
    return digest
