# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that compete: this package with each kind of mask, and what PyTorch has."""
