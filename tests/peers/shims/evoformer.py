# SPDX-License-Identifier: BSD-3-Clause
"""deepspeed.ops.deepspeed4science, the evoformer attention of DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flash_dmattn.integrations import evoformer_attention

from . import provide


class EvoformerAttnBuilder:
    """Tests ask it whether the operator can be built."""

    NAME = "evoformer_attn"


def skip_on_arch(least: int) -> None:
    """Skip a test that needs a newer GPU."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < least:
        pytest.skip(f"needs compute capability {least}")


def install(files: Path) -> None:
    """Make the modules that tests import.

    Args:
        files: the folder of the test, which needs no helper of DeepSpeed.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    accelerator = SimpleNamespace(device_name=lambda: device)
    provide("unit")
    provide("unit.util", skip_on_arch=skip_on_arch)
    provide("deepspeed")
    provide("deepspeed.accelerator", get_accelerator=lambda: accelerator)
    provide("deepspeed.ops", __compatible_ops__={EvoformerAttnBuilder.NAME: True})
    provide("deepspeed.ops.op_builder", EvoformerAttnBuilder=EvoformerAttnBuilder)
    provide("deepspeed.ops.deepspeed4science", DS4Sci_EvoformerAttention=evoformer_attention)
