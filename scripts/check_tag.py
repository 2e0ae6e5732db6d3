# SPDX-License-Identifier: BSD-3-Clause
"""Check that a tag is the version that the tree declares and that the changelog tells of it.

Prints `version=...` and `pre_release=true|false`, the form of a workflow's outputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from release.changelog import NotReleasableError, check_tag, is_pre_release


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tag", help="such as v2.0.0")
    options = parser.parse_args(arguments)
    try:
        version = check_tag(options.tag)
    except NotReleasableError as error:
        print(f"check_tag: {error}", file=sys.stderr)
        return 1
    print(f"version={version}\npre_release={str(is_pre_release(version)).lower()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
