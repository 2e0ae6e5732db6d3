# SPDX-License-Identifier: BSD-3-Clause
"""The demo of ``scripts/demo``: text, model, attention, training, measurement, output."""
