# SPDX-License-Identifier: BSD-3-Clause
"""Contestants for cases whose batch shares one bias for each pair of query and key.

Each batch element also has a key mask. This is attention over the rows of a pair representation, as
in AlphaFold, and attention of encoders with a relative bias.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import flash_dmattn_func

from .cases import Case, Inputs
from .contestants import Contestant


class PairContestant(Contestant):
    """One implementation that takes the mask and the bias of a case with a pair bias."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, inputs)
        assert inputs.keep is not None
        self.keep = inputs.keep


class PairFlashDmattn(PairContestant):
    """This package, with mask and bias unchanged."""

    def attend(self) -> torch.Tensor:
        out = flash_dmattn_func(
            self.query, self.key, self.value, self.keep, self.bias, is_causal=False
        )
        assert isinstance(out, torch.Tensor)
        return out


class HeadsFirst(PairContestant):
    """A contestant on contiguous (B,H,S,D) tensors."""

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2)


class PairSdpa(HeadsFirst):
    """SDPA, which takes one additive tensor for all batch elements and heads.

    Mask and bias are added in the call, because each layer of a model has another bias.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, inputs)
        nothing = torch.zeros((), dtype=case.torch_dtype, device=self.keep.device)
        self.additive = torch.where(self.keep, nothing, -torch.inf)

    def attend(self) -> torch.Tensor:
        assert self.bias is not None
        return scaled_dot_product_attention(
            self.query, self.key, self.value, attn_mask=self.additive + self.bias
        )


class Float32Bias(HeadsFirst):
    """A contestant with the bias in float32, converted before the timed call."""

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.to(torch.float32, copy=True)


class PairFlex(Float32Bias):
    """Compiled FlexAttention, which sums the gradient of a bias in the bias's own dtype."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, inputs)
        from torch.nn.attention.flex_attention import flex_attention

        assert self.bias is not None
        bias, keep = self.bias, self.keep

        def with_bias(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
            return torch.where(keep[b, 0, 0, key], score + bias[0, h, row, key], -torch.inf)

        # Each shape gets its own kernels; the reset lifts the limit of compiled shapes per process.
        torch._dynamo.reset()
        self.compiled: Any = torch.compile(flex_attention, dynamic=False)
        self.with_bias = with_bias

    def attend(self) -> torch.Tensor:
        out: torch.Tensor = self.compiled(
            self.query, self.key, self.value, score_mod=self.with_bias
        )
        return out


class CuEquivariance(Float32Bias):
    """cuEquivariance's triangle attention, whose kernels on an H200 take only a float32 bias.

    Below 100 keys it runs PyTorch operations instead of a kernel.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.function: Any = importlib.import_module("cuequivariance_ops_torch").triangle_attention
        super().__init__(case, inputs)

    def attend(self) -> torch.Tensor:
        assert self.bias is not None
        tensors = (self.query, self.key, self.value, self.bias, self.keep)
        out: torch.Tensor = self.function(*(tensor[None] for tensor in tensors))
        return out[0]


class TriFast(PairContestant):
    """trifast's Triton kernels on (1,H,S,S,D) tensors, which need as many batch elements as keys.

    Its mask is True for dropped keys.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.function: Any = importlib.import_module("trifast").triangle_attention
        super().__init__(case, inputs)
        self.dropped = ~self.keep.view(1, case.batch, case.length)

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.permute(1, 2, 0, 3)

    def attend(self) -> torch.Tensor:
        query, key, value = (tensor[None] for tensor in (self.query, self.key, self.value))
        out: torch.Tensor = self.function(query, key, value, self.bias, self.dropped)
        return out[0]
