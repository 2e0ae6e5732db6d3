# SPDX-License-Identifier: BSD-3-Clause
"""What scripts/render_docs.py draws, a kind of picture to a module."""
