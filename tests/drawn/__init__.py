# SPDX-License-Identifier: BSD-3-Clause
"""Calls that draw all options together, their expected results, and a runner of many of them."""
