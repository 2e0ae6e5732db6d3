# SPDX-License-Identifier: BSD-3-Clause
"""Helpers with the signatures of flash-dmattn 1.2.2, for its callers."""
