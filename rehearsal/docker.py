# SPDX-License-Identifier: BSD-3-Clause
"""Stands in for docker: its `run`, and the registry's digests.

A container is a chroot with this machine's programs, but without its home folders and its CUDA.
Other folders are present only as volumes. The user is root with an empty home.
The registry returns a new digest for each request, as for a tag that moves. A container starts only
from a digest that is committed or that the registry has returned.
Only /tmp/tools outlives a container: the next one finds the tools that scripts/in_image installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from release import targets
from release.matrix import LOCK

REHEARSAL = Path(os.environ["REHEARSAL"])
TOLD = REHEARSAL / "hub" / "digests.json"
USED = REHEARSAL / "hub" / "images.jsonl"
TOOLS = REHEARSAL / "tools"
# A folder of packs that were built before; optional.
PACKS = os.environ.get("REHEARSAL_PACKS")
# The path of the oldest supported Python in a manylinux image.
PYTHON = "opt/python/cp310-cp310/bin/python"
SYSTEM = (
    "bin",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "sbin",
    "usr",
    "opt",
    "dev",
    "proc",
    "sys",
)
# Prefixes of this machine's variables for access to package indexes.
NETWORK = ("PIP_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


def main() -> int:
    """Run one of the supported docker commands."""
    words = sys.argv[1:]
    if words[:3] == ["buildx", "imagetools", "inspect"]:
        print(told_digest(words[-1]))
        return 0
    if words[:1] != ["run"]:
        sys.exit(f"docker of the rehearsal: it cannot {' '.join(words[:2])}")
    options = run_parser().parse_args(words[1:])
    check_image(options.image)
    return start(options)


def run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="docker run")
    parser.add_argument("--rm", action="store_true", required=True)
    parser.add_argument("--volume", action="append", default=[])
    parser.add_argument("--workdir", default="/")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


# --- the registry


def told_digest(image: str) -> str:
    """Return a new digest of an image, and record it."""
    told = json.loads(TOLD.read_text()) if TOLD.exists() else []
    digest = hashlib.sha256(f"{image} {len(told)}".encode()).hexdigest()
    TOLD.write_text(json.dumps([*told, f"{image}@sha256:{digest}"]))
    return f"sha256:{digest}"


def check_image(image: str) -> None:
    """Exit if an image has no known digest; else record its use."""
    committed = [f"{name}@{digest}" for name, digest in json.loads(LOCK.read_text()).items()]
    told = json.loads(TOLD.read_text()) if TOLD.exists() else []
    if image not in [*committed, *told]:
        sys.exit(f"docker of the rehearsal: no digest of {image} is committed, or was looked up")
    with USED.open("a") as stream:
        stream.write(json.dumps({"job": os.environ.get("GITHUB_JOB"), "image": image}) + "\n")


# --- the container


def start(options: argparse.Namespace) -> int:
    """Run the command in a container and return its status."""
    (REHEARSAL / "containers").mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(dir=REHEARSAL / "containers"))
    volumes = [Path(volume.split(":")[0]) for volume in options.volume]
    if PACKS:
        volumes.append(Path(PACKS))
    tools = take_tools(root.with_suffix(".tools"))
    shared = f"mkdir tmp/tools; mount --bind {tools} tmp/tools"
    steps = "\n".join([*mounts(root, volumes), shared, entering(root, options)])
    # The mounts are private to these processes, and end with the last of them.
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-euc", steps], check=False
    )
    root.rmdir()
    tools.rename(TOOLS / root.name)
    return done.returncode


def take_tools(place: Path) -> Path:
    """Move a folder of tools that no container uses to a place, or make an empty one there."""
    TOOLS.mkdir(exist_ok=True)
    for free in TOOLS.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another container took it
            return free.rename(place)
    place.mkdir()
    return place


def mounts(root: Path, volumes: list[Path]) -> Iterator[str]:
    """Yield the shell commands that make the root of a container."""
    yield f"mount -t tmpfs container {root}"
    yield f"cd {root}; mkdir -m 1777 tmp; mkdir -p root {' '.join(SYSTEM)}"
    for name in SYSTEM:
        place = Path("/", name)
        if place.is_symlink():
            yield f"rmdir {name}; ln -s {place.readlink()} {name}"
        elif name == "opt":
            yield from (bind(root, path) for path in sorted(place.glob("*")) if path.is_dir())
        elif place.is_dir():
            yield f"mount --rbind {place} {name}"
    # Hides this machine's /usr/local and its CUDA, but shows its Python wherever that is.
    yield "mount -t tmpfs local usr/local"
    yield bind(root, Path(sys.base_prefix))
    yield "for cuda in usr/local/cuda*; do ! [[ -d $cuda ]] || mount -t tmpfs cuda $cuda; done"
    yield f"mkdir -p {Path(PYTHON).parent}; ln -s {Path(sys.executable).resolve()} {PYTHON}"
    yield from (bind(root, path) for path in volumes)


def bind(root: Path, path: Path) -> str:
    """Return the command that mounts a folder of the machine at the same path in the container."""
    return f"mkdir -p {root}{path}; mount --rbind {path} {root}{path}"


def entering(root: Path, options: argparse.Namespace) -> str:
    """Return the shell command that runs the command in the container's root."""
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/root",
        "AUDITWHEEL_POLICY": policy(options.workdir),  # set in manylinux images
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith(NETWORK) and name != "PIP_CONSTRAINT"
        },
        # Stand-ins for packs need a stand-in for cuobjdump, which reads packs.
        **({} if PACKS else {"CUDA_HOME": f"{options.workdir}/rehearsal/toolkit"}),
        **cuda_variables(options.image.partition("@")[0], options.workdir),
        **{name: os.environ[name] for name in options.env if name in os.environ},
    }
    words = ["exec", "chroot", str(root), "env", "-i"]
    words += [f"{name}={value}" for name, value in variables.items()]
    words += ["bash", "-c", 'cd "$0" && exec "$@"', options.workdir, *options.command]
    return shlex.join(words)


def policy(workdir: str) -> str:
    """Return the manylinux policy of the source tree in the container; "" without a tree."""
    table = Path(workdir) / "cmake" / "targets.json"
    return targets.load(table).wheel.policy if table.exists() else ""


def cuda_variables(image: str, workdir: str) -> dict[str, str]:
    """Return the variables that make builds in a CUDA image use the stand-ins for compilers."""
    table = targets.load()
    for cuda in table.cuda:
        names = [
            cuda.image.format(policy=table.wheel.policy, machine=row.machine)
            for row in table.platforms
        ]
        if image in names:
            return {
                "REHEARSAL_CUDA": cuda.toolkit,
                "REHEARSAL_PACKS": PACKS or "",
                "CUDACXX": f"{workdir}/rehearsal/nvcc",
                "CMAKE": f"{workdir}/rehearsal/cmake",
            }
    return {}


if __name__ == "__main__":
    sys.exit(main())
