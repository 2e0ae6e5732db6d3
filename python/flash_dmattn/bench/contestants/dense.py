# SPDX-License-Identifier: BSD-3-Clause
"""Reference lines: fused attention without any mask, over all keys or over as many as are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..cases import Case, Inputs, Pass
from .base import Contestant, Role
from .sdpa import only


class HeadsFirst(Contestant):
    """(B,heads,N,D) views of (B,N,heads,D) tensors, which PyTorch's fused kernels take as is."""

    role: ClassVar[Role] = "baseline"

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """A private copy, seen with the heads first."""
        return tensor.clone().transpose(1, 2)

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """The heads behind the rows again."""
        return tensor.transpose(1, 2)


class Dense(HeadsFirst):
    """One backend of scaled_dot_product_attention over all keys, without bias."""

    backend: ClassVar[str]

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, replace(inputs, bias=None))
        self.causal = case.causal

    def prepare(self, which: Pass) -> None:
        """There is nothing to make."""

    def attend(self) -> torch.Tensor:
        with only(self.backend):
            return scaled_dot_product_attention(
                self.query, self.key, self.value, is_causal=self.causal, enable_gqa=True
            )


class DenseFlash(Dense):
    """FlashAttention-2."""

    backend = "FLASH_ATTENTION"


class DenseCudnn(Dense):
    """cuDNN."""

    backend = "CUDNN_ATTENTION"


class Compact(Dense):
    """Dense attention of all queries over only ``window`` keys: a reference cost, no mask at all.

    The keys are those with the largest bias of each head, laid out densely before the call; where
    the bias is another for each query, those of the first.
    """

    role = "information"

    def __init__(self, case: Case, inputs: Inputs) -> None:
        assert inputs.bias is not None
        assert case.window is not None
        kept = inputs.bias.detach()[:, :, 0].topk(min(case.window, case.length)).indices
        rows = kept.sort().values.transpose(1, 2)[..., None].expand(-1, -1, -1, case.head_dim)
        key, value = (tensor.gather(1, rows) for tensor in (inputs.key, inputs.value))
        super().__init__(case, replace(inputs, key=key, value=value))
        self.causal = False


class CompactFlash(Compact):
    """FlashAttention-2 over compacted keys."""

    backend = "FLASH_ATTENTION"


class CompactCudnn(Compact):
    """cuDNN over compacted keys."""

    backend = "CUDNN_ATTENTION"
