# SPDX-License-Identifier: BSD-3-Clause
"""Every kind of call in 16 bit against float64, element by element.

scripts/sanitize runs this module, so it must stay small and reach every kernel.
"""

from __future__ import annotations

import pytest
import torch

from drawn.judge import expected
from flash_dmattn import loader
from support import HALF_TYPES, Target

from .kinds import KINDS, Draw

# Every head dimension with kernels, and sizes between them.
HEAD_DIMS = (1, 32, 64, 96, 100, 128, 192, 200, 256)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_every_kind(
    kind: str, dtype: torch.dtype, deterministic: bool, pack_target: Target, seed: int
) -> None:
    call = KINDS[kind](Draw(seed, dtype)).to(pack_target.device)
    expected(call).check(call.results(deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "form", ["causal", "intervals", "near_keys", "row_mask", "decode", "packed_key_mask"]
)
def test_every_head_dim(
    form: str, head_dim: int, deterministic: bool, pack_target: Target, seed: int
) -> None:
    most = loader.pack_for(pack_target.device).max_head_dim
    if head_dim > most:
        pytest.skip(f"the pack was built for head dimensions up to {most}")
    call = KINDS[form](Draw(seed, HALF_TYPES[head_dim % 3 == 1], head_dim))
    call = call.to(pack_target.device)
    expected(call).check(call.results(deterministic=deterministic))
