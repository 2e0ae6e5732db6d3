# SPDX-License-Identifier: BSD-3-Clause
"""PyTorch's scaled_dot_product_attention with the mask as a materialised Q x K tensor."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ..cases import Pass
from .base import Contestant, Role, keep_matrix


def only(backend: str | None) -> AbstractContextManager[object]:
    """SDPA fails rather than take another backend; by name, since an older torch lacks some."""
    if backend is None:
        return nullcontext()
    if not hasattr(SDPBackend, backend):
        raise RuntimeError(f"this torch has no SDPA backend {backend}")
    chosen: AbstractContextManager[object] = sdpa_kernel(getattr(SDPBackend, backend))
    return chosen


class _Sdpa(Contestant):
    """SDPA on contiguous (B,H,N,D) tensors.

    The selection and causality are one additive mask of 0 and -inf. A forward without gradients
    also has the bias in it already, so that PyTorch's fused kernel can take it; in training the
    bias is added inside the call, through which its gradient flows.
    """

    role: ClassVar[Role] = "baseline"
    gqa: ClassVar[bool] = False
    backend: ClassVar[str | None] = None
    additive: torch.Tensor | None = None

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(self.case.batch, -1, *tensor.shape[-2:]).transpose(1, 2)

    def prepare(self, which: Pass) -> None:
        if self.bias is None:
            return
        with torch.no_grad():
            keep = keep_matrix(self.case, self.bias)
            bias = self.bias.view(self.case.batch, self.case.kv_heads, -1, self.case.length)
            shift = bias if which == "forward" else torch.zeros_like(bias[..., :1, :])
            self.additive = self.for_heads(torch.where(keep, shift, -torch.inf))

    def for_heads(self, per_kv_head: torch.Tensor) -> torch.Tensor:
        """A (B,Hk,.,N) tensor for every query head, as the scores' layout wants it."""
        return per_kv_head.repeat_interleave(self.case.group, dim=1)

    def mask(self) -> torch.Tensor | None:
        if self.additive is None or self.bias is None or not torch.is_grad_enabled():
            return self.additive
        return self.additive + self.for_heads(self.bias)

    def attend(self) -> torch.Tensor:
        mask = self.mask()
        with only(self.backend):
            return scaled_dot_product_attention(
                self.query,
                self.for_queries(self.key),
                self.for_queries(self.value),
                attn_mask=mask,
                is_causal=self.case.causal and mask is None,
                **({"enable_gqa": True} if self.gqa else {}),
            )

    def for_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keys or values as many as there are query heads, unless SDPA groups them itself."""
        return tensor


class SdpaExpanded(_Sdpa):
    """Keys and values repeated for every query head."""

    def for_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(self.case.group, dim=1)


class SdpaGqa(_Sdpa):
    """Grouped heads left to SDPA (``enable_gqa=True``, PyTorch 2.5 and later)."""

    gqa = True


class SdpaGrouped(_Sdpa):
    """(B*Hk, group, N, D): the key/value heads are batch entries, so a group shares one mask."""

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        batch, length, heads, dim = tensor.shape
        kv = self.case.kv_heads
        return super().arrange(tensor).view(batch * kv, heads // kv, length, dim)

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.clone().view(-1, 1, *bias.shape[-2:])

    def for_heads(self, per_kv_head: torch.Tensor) -> torch.Tensor:
        return per_kv_head.reshape(-1, 1, *per_kv_head.shape[-2:])

    def for_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(-1, self.case.group, -1, -1)


class SdpaMath(SdpaGrouped):
    """PyTorch's unfused formula."""

    backend = "MATH"


class SdpaFlash(SdpaGrouped):
    """PyTorch's FlashAttention, which takes a mask on CPUs only."""

    backend = "FLASH_ATTENTION"


class SdpaEfficient(SdpaGrouped):
    """The memory-efficient kernels."""

    backend = "EFFICIENT_ATTENTION"


class SdpaCudnn(SdpaGrouped):
    """cuDNN."""

    backend = "CUDNN_ATTENTION"


class SdpaAugmented(SdpaGrouped):
    """The bias as one more column of the keys, met by a column of ones in the queries.

    Then the Q x K mask needs no gradient and PyTorch's fused kernels serve training too. It is
    shown for information: it is not attention with a materialised bias, and few would write it.
    """

    role: ClassVar[Role] = "information"

    def prepare(self, which: Pass) -> None:
        super().prepare("forward_backward")

    def attend(self) -> torch.Tensor:
        assert self.bias is not None
        dim = self.case.head_dim
        scale = dim**-0.5
        # Eight more columns, of which seven are zeros, keep rows aligned for vector loads.
        query = torch.cat([self.query, torch.ones_like(self.query[..., :1])], dim=-1)
        column = self.bias.transpose(-2, -1) / scale
        key = torch.cat([self.key, column], dim=-1)
        out = scaled_dot_product_attention(
            pad(query, (0, 7)),
            self.for_queries(pad(key, (0, 7))),
            self.for_queries(pad(self.value, (0, 8))),
            attn_mask=self.additive,
            scale=scale,
        )
        return out[..., :dim]
