# SPDX-License-Identifier: BSD-3-Clause
"""Attention by PyTorch's FlexAttention: compiled on GPUs, in its plain form on CPUs."""
