# SPDX-License-Identifier: BSD-3-Clause
"""Put digests in the place of the images' names in a plan of scripts/plan_matrix.py.

Reads the plan from standard input and prints one line for each of its parts, `packs=[...]`, the
form of a workflow's outputs. The digests stand in .github/images.json; --update asks the registry
for those of the images that the plan names, and writes them there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parent.parent / ".github" / "images.json"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class UnpinnedImageError(Exception):
    """An image has no digest."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", type=Path, default=LOCK, help="digests by image")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--require", action="store_true", help="fail if an image has no digest")
    mode.add_argument("--update", action="store_true", help="write the present digests instead")
    options = parser.parse_args(arguments)
    plan = json.load(sys.stdin)
    try:
        if options.update:
            digests = {image: present_digest(image) for image in images_of(plan)}
            options.lock.write_text(json.dumps(digests, indent=2, sort_keys=True) + "\n")
            return 0
        plan = pinned(plan, json.loads(options.lock.read_text()), require=options.require)
    except UnpinnedImageError as error:
        print(f"pin_images: {error}", file=sys.stderr)
        return 1
    for part, entries in plan.items():
        print(f"{part}={json.dumps(entries, separators=(',', ':'))}")
    return 0


def images_of(plan: Mapping[str, Any]) -> list[str]:
    return sorted({e["image"] for entries in plan.values() for e in entries if "image" in e})


def pinned(
    plan: Mapping[str, Any], digests: Mapping[str, str], *, require: bool
) -> dict[str, list[dict[str, Any]]]:
    """Return the plan with `name@digest` for each image; one without a digest keeps its name."""
    missing = [image for image in images_of(plan) if image not in digests]
    if missing:
        text = f"no digest in {LOCK.parent.name}/{LOCK.name} for {', '.join(missing)}"
        if require:
            raise UnpinnedImageError(f"{text}; see docs/release.md for how to pin them")
        print(f"pin_images: {text}; whatever they are today is taken", file=sys.stderr)
    for image, digest in digests.items():
        if not DIGEST.fullmatch(digest):
            raise UnpinnedImageError(f"{digest!r} is not a digest of {image}")
    return {
        part: [
            {**entry, "image": f"{entry['image']}@{digests[entry['image']]}"}
            if entry.get("image") in digests
            else entry
            for entry in entries
        ]
        for part, entries in plan.items()
    }


def present_digest(image: str) -> str:
    """Return the digest that the registry has for an image now."""
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}"]
    done = subprocess.run([*command, image], capture_output=True, text=True, check=False)
    digest = done.stdout.strip()
    if done.returncode != 0 or not DIGEST.fullmatch(digest):
        raise UnpinnedImageError(f"{' '.join(command)} {image}: {done.stderr.strip() or digest!r}")
    return digest


if __name__ == "__main__":
    sys.exit(main())
