# SPDX-License-Identifier: BSD-3-Clause
"""Tools for the pages: generated blocks, pictures of masks and plans, mkdocs' hooks."""
