# SPDX-License-Identifier: BSD-3-Clause
"""What a target that is slow runs of the suite; ``pytest --all-backends`` runs all of it."""

from __future__ import annotations

import pytest

# By the names of test functions, which stand for all their cases, or of single cases without the
# target: "test_head_dims", "test_head_dims[16]". Targets that are not here run everything.
SUBSETS: dict[str, frozenset[str]] = {
    "cpu-flex": frozenset(),
    # By Triton's interpreter, with TRITON_INTERPRET=1.
    "cpu-triton": frozenset(),
}
_FIXTURES = ("target", "kernel_target")


def is_chosen(item: pytest.Item) -> bool:
    """Say whether a test runs without --all-backends."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return True
    parameters = item.callspec.params
    target = next((str(parameters[fixture]) for fixture in _FIXTURES if fixture in parameters), "")
    if target not in SUBSETS:
        return True
    case = item.callspec.id.replace(f"{target}-", "").replace(f"-{target}", "")
    return bool({item.originalname, f"{item.originalname}[{case}]"} & SUBSETS[target])
