# SPDX-License-Identifier: BSD-3-Clause
"""Generated blocks of pages."""

from __future__ import annotations

import pytest

from docs_tools.blocks import MarkerError, blocks, filled

PAGE = """# Title
<!-- a-b -->
old
<!-- end a-b -->
<!-- c_d -->
<!-- end c_d -->
<!-- a remark -->
"""


def test_blocks_are_read_by_name() -> None:
    assert blocks(PAGE) == {"a-b": "old\n", "c_d": ""}


def test_named_blocks_are_renewed_and_the_rest_kept() -> None:
    page = filled(PAGE, {"a-b": "new\n", "absent": "x"})
    assert page == PAGE.replace("old", "new")
    assert filled(page, {"a-b": "new\n"}) == page


def test_block_without_end_is_an_error() -> None:
    with pytest.raises(MarkerError, match="<!-- a --> has no <!-- end a -->"):
        blocks("<!-- a -->\n<!-- end b -->\n")
