# SPDX-License-Identifier: BSD-3-Clause
"""The kernels of flash-dmattn 1.2.2, with the arguments of its Python functions.

They are in a separate extension module, ``flash_dmattn_cuda``, which a build of its source
distribution makes. Its package has the same name as this one, so only the module is on the path.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .cases import Case, Inputs, Pass
from .contestants import Contestant, keep_matrix

_MODULE = "flash_dmattn_cuda"
# The kernels pad keys of the mask and the bias to a multiple of this; the cases need no padding.
_KEY_MULTIPLE = 128


class Earlier(Contestant):
    """flash-dmattn 1.2.2 with a boolean mask and a bias of each query and key."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.kernels: Any = importlib.import_module(_MODULE)
        if case.length % _KEY_MULTIPLE:
            raise ValueError(f"length is {case.length}; it must be a multiple of {_KEY_MULTIPLE}")
        super().__init__(case, inputs)
        self.mask: torch.Tensor | None = None

    def prepare(self, which: Pass) -> None:
        assert self.bias is not None
        self.mask = keep_matrix(self.case, self.bias).contiguous()

    def attend(self) -> torch.Tensor:
        attention: Any = _EarlierAttention.apply
        out: torch.Tensor = attention(self, *self.leaves)
        return out


class _EarlierAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: Earlier, *tensors: torch.Tensor) -> torch.Tensor:
        query, key, value, bias = tensors
        options = (of.case.head_dim**-0.5, of.case.causal, 0.0)
        out: torch.Tensor
        out, lse, _ = of.kernels.fwd(query, key, value, of.mask, bias, None, *options, False)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.of, ctx.options = of, options
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outs: torch.Tensor) -> Any:
        query, key, value, bias, out, lse = ctx.saved_tensors
        # The kernels add to these, or skip keys that no row keeps.
        gradients = [torch.zeros_like(tensor) for tensor in (query, key, value, bias)]
        ctx.of.kernels.bwd(
            *(grad_outs[0], query, key, value, ctx.of.mask, bias, out, lse),
            *(*gradients, *ctx.options, False),
        )
        return None, *gradients
