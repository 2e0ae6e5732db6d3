# SPDX-License-Identifier: BSD-3-Clause
"""A pytest plugin that runs every EACH-th of a job's tests; .ci/run runs all of them.

It skips tests of an installed CUDA pack where libraries stand in for these packs.
"""

from __future__ import annotations

import os

import pytest

EACH = 100


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _opens_what_stands_in(item)][::EACH]


def _opens_what_stands_in(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    is_cuda = getattr(parameters.get("candidate"), "device", "") == "cuda"
    return is_cuda and not os.environ.get("REHEARSAL_PACKS")
