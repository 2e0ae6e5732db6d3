# SPDX-License-Identifier: BSD-3-Clause
"""Runs the tests of other attention libraries and of transformers on flash_dmattn."""
