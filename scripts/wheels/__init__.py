# SPDX-License-Identifier: BSD-3-Clause
"""How packs and wheels are built, assembled and checked: what the commands in scripts/ share.

Only `wheels.gates` needs more than the standard library (the extra `[gates]`).
"""
