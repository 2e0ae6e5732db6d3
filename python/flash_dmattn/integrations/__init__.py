# SPDX-License-Identifier: BSD-3-Clause
"""flash-dmattn in models of Hugging Face transformers, and as replacement of other functions.

Importing this package registers the attention implementation "flash_dmattn" if transformers is
installed. Nothing else in flash_dmattn imports transformers.
"""

from __future__ import annotations

from .apply import apply_flash_dmattn
from .fla import parallel_forgetting_attn
from .implementations import ATTENTION_NAME
from .import_utils import is_transformers_available
from .registration import register
from .structural_biology import evoformer_attention, triangle_attention

__all__ = [
    "ATTENTION_NAME",
    "apply_flash_dmattn",
    "evoformer_attention",
    "parallel_forgetting_attn",
    "register",
    "triangle_attention",
]

if is_transformers_available():
    register()
