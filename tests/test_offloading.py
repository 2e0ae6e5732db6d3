# SPDX-License-Identifier: BSD-3-Clause
"""A layer whose parameters are elsewhere between the calls of its parts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_dmattn import AttentionCache, DynamicMaskAttention
from plain_module import make_input, make_module
from support import Target

Held = dict[str, nn.Parameter]


def take_away(part: nn.Module) -> Held:
    held = {name: p for name, p in part._parameters.items() if p is not None}
    for name, parameter in held.items():
        part._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    return held


def by_another_forward(part: nn.Module) -> None:
    """Replace `forward` by a method that fetches the parameters, as accelerate does."""
    held, forward = take_away(part), part.forward

    @functools.wraps(forward)
    def brings(*args: Any, **kwargs: Any) -> Any:
        part._parameters.update(held)
        try:
            return forward(*args, **kwargs)
        finally:
            take_away(part)

    part.forward = brings


def by_hooks(part: nn.Module) -> None:
    held = take_away(part)
    part.register_forward_pre_hook(lambda *_: part._parameters.update(held))
    part.register_forward_hook(lambda *_: [take_away(part), None][1])


@pytest.mark.parametrize("offload", [by_another_forward, by_hooks])
@pytest.mark.parametrize("settings", [{}, {"sink": True, "projection_bias": True}], ids=str)
def test_parts_bring_their_parameters(
    settings: dict[str, Any], offload: Callable[[nn.Module], None], target: Target
) -> None:
    module = make_module(target, **settings)
    x = make_input(module, 2, 21)
    want = module(x)
    offloaded = copy.deepcopy(module)
    for part in list(offloaded.modules()):
        offload(part)
    assert all(p.is_meta for p in offloaded.parameters())
    assert_computes(offloaded, x, want)


def test_accelerate(tmp_path: Path, target: Target) -> None:
    accelerate = pytest.importorskip("accelerate")
    module = make_module(target)
    x = make_input(module, 2, 21)
    want, device = module(x), torch.device(target.device)
    offloaded = accelerate.cpu_offload(copy.deepcopy(module), execution_device=device)
    assert_computes(offloaded, x, want)
    on_disk = accelerate.disk_offload(copy.deepcopy(module), str(tmp_path), execution_device=device)
    assert_computes(on_disk, x, want)


def assert_computes(module: DynamicMaskAttention, x: Tensor, want: Tensor) -> None:
    """Compare one pass over a sequence, with and without training, and token by token."""
    tolerance = 1e-5 if x.dtype == torch.float32 else 2e-2
    close = functools.partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    close(module(x), want)
    cache = AttentionCache()
    with torch.no_grad():
        close(module(x), want)
        outs = [module(x[:, :18], cache=cache)]
        outs += [module(x[:, n : n + 1], cache=cache) for n in range(18, x.shape[1])]
    close(torch.cat(outs, 1), want)


def test_parameters_that_nothing_brings_are_explained(target: Target) -> None:
    module = make_module(target)
    x = make_input(module, 2, 21)
    module.to("meta")
    with pytest.raises(ValueError, match="hidden_states must be on meta, as the layer's"):
        module(x)
