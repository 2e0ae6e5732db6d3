# SPDX-License-Identifier: BSD-3-Clause
"""Calls that draw all options together, what they should give, and a runner of many of them."""
