# SPDX-License-Identifier: BSD-3-Clause
"""What the pages need: blocks that programs write, pictures of masks and plans, mkdocs' hooks."""
