# SPDX-License-Identifier: BSD-3-Clause
"""The demo that ``scripts/demo`` starts: text, model, attention, training, measuring, showing."""
