# SPDX-License-Identifier: BSD-3-Clause
"""A folder of assets, told as GitHub tells of a release: the index is made from either."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from release.distributions import sha256


def local_release(folder: Path, tag: str, base_url: str) -> dict[str, Any]:
    """Return the release of a tag whose assets are the files of a folder, served at an address."""
    return {
        "tag_name": tag,
        "draft": False,
        "prerelease": False,
        "assets": [
            {
                "name": path.name,
                "browser_download_url": f"{base_url}/{path.name}",
                "digest": f"sha256:{sha256(path)}",
                "size": path.stat().st_size,
                "created_at": datetime.datetime.fromtimestamp(
                    int(path.stat().st_mtime), datetime.timezone.utc
                ).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            for path in sorted(folder.iterdir())
        ],
    }
