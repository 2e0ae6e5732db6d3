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
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from release.gpu_record import UntestedReleaseError, record_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("record", type=Path, help="the JSON file to write")
    options = parser.parse_args(arguments)
    try:
        check_installed(options.wheel, metadata.distribution("flash-dmattn"))
        record_of(self_test(), options.wheel).write(options.record)
    except UntestedReleaseError as error:
        print(f"record_gpu_test: {error}", file=sys.stderr)
        return 1
    return 0


def check_installed(wheel: Path, distribution: metadata.Distribution) -> None:
    """Check that every file of a wheel is installed as it is; RECORD is the installer's own."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(("/", ".dist-info/RECORD")):
                continue
            place = Path(str(distribution.locate_file(name)))
            if not place.is_file() or place.read_bytes() != archive.read(name):
                raise UntestedReleaseError(f"{wheel.name} is not what is installed: {name} differs")


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
