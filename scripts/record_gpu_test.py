# SPDX-License-Identifier: BSD-3-Clause
"""Write down on which GPU, and with which pack, the installed wheel passes its self-test.

Run it with the environment's Python, after the tests. It fails if what is installed is not the
wheel, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from release.distributions import sha256
from release.gpu_record import UntestedReleaseError, record_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("record", type=Path, help="the JSON file to write")
    options = parser.parse_args(arguments)
    try:
        if installed_sha256() != sha256(options.wheel):
            raise UntestedReleaseError(f"{options.wheel.name} is not what is installed")
        record_of(self_test(), options.wheel).write(options.record)
    except UntestedReleaseError as error:
        print(f"record_gpu_test: {error}", file=sys.stderr)
        return 1
    return 0


def installed_sha256() -> str | None:
    """Return the hash that pip noted when it installed the package from a file."""
    text = metadata.distribution("flash-dmattn").read_text("direct_url.json")
    if text is None:
        return None
    hashes: dict[str, str] = json.loads(text).get("archive_info", {}).get("hashes", {})
    return hashes.get("sha256")


def self_test() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "flash_dmattn", "--selftest", "--json"],
            cwd=folder,
            stdout=subprocess.PIPE,
            check=False,
        )
    if done.returncode != 0:
        raise UntestedReleaseError(f"the self-test ended with {done.returncode}")
    report: dict[str, object] = json.loads(done.stdout)
    return report


if __name__ == "__main__":
    sys.exit(main())
