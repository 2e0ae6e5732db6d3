# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernels. Importing them imports triton."""
