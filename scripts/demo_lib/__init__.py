# SPDX-License-Identifier: BSD-3-Clause
"""The parts of ``scripts/train_demo.py``: text, model, attention, training, measuring, showing."""
