# SPDX-License-Identifier: BSD-3-Clause
"""Runs other attention libraries' tests and transformers' on this one, for scripts/test_peers."""
