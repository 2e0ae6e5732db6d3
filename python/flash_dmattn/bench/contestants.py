# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that compete, each as a small object with the same four methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .. import IntervalMask, dynamic_mask, flash_dmattn_func
from .cases import Case, Inputs, Pass

Role = Literal["ours", "baseline", "information"]


class Contestant(ABC):
    """One implementation on one case.

    The constructor puts the inputs into the layout the implementation likes best; ``prepare`` makes
    its mask. Neither is part of a timed call. ``leaves`` are the tensors differentiated by.
    """

    name: ClassVar[str]
    role: ClassVar[Role]

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        self.leaves = [self.arrange(t) for t in (inputs.query, inputs.key, inputs.value)]
        if inputs.bias is not None:
            self.leaves.append(self.arrange_bias(inputs.bias))
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.query, self.key, self.value = self.leaves[:3]
        self.bias = self.leaves[3] if inputs.bias is not None else None
        self.grad_out = self.arrange(inputs.grad_out)

    @staticmethod
    def supports(case: Case) -> bool:
        """Whether the contestant can be entered for ``case``."""
        return True

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """A private copy of a (B,N,heads,D) tensor in the contestant's layout."""
        return tensor.clone()

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """A private copy of the (B,Hk,1,N) bias in the contestant's layout."""
        return bias.clone()

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of ``arrange``."""
        return tensor

    @abstractmethod
    def prepare(self, which: Pass) -> None:
        """Make what the pass needs and a model would make once per call: selection and mask."""

    @abstractmethod
    def attend(self) -> torch.Tensor:
        """The attention's output in the contestant's layout."""

    def run(self, which: Pass) -> list[torch.Tensor]:
        """The timed call: the output, followed in a training pass by the leaves' gradients."""
        if which == "forward":
            with torch.no_grad():
                return [self.attend()]
        out = self.attend()
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad_out)]

    def results(self, which: Pass) -> list[torch.Tensor]:
        """``run``'s tensors in the public layout, to compare contestants with one another."""
        tensors = self.run(which)
        plain = [self.restore(t) for t in tensors[:4]]
        if self.bias is not None and which == "forward_backward":
            plain.append(tensors[4].reshape(self.case.batch, self.case.kv_heads, 1, -1))
        return plain


class FlashDmattn(Contestant):
    """This package; its mask is what ``dynamic_mask`` selects from the bias."""

    name = "flash_dmattn"
    role = "ours"
    mask: IntervalMask | torch.Tensor | None = None

    def prepare(self, which: Pass) -> None:
        self.mask = select(self.case, self.bias)

    def attend(self) -> torch.Tensor:
        out = flash_dmattn_func(
            self.query, self.key, self.value, self.mask, self.bias, is_causal=self.case.causal
        )
        assert isinstance(out, torch.Tensor)
        return out


class _Sdpa(Contestant):
    """PyTorch's scaled_dot_product_attention on contiguous (B,H,N,D) tensors.

    The selection and causality are one additive mask of 0 and -inf. A forward without gradients
    also has the bias in it already, so that PyTorch's fused kernel can take it; in training the
    bias is added inside the call, through which its gradient flows.
    """

    role: ClassVar[Role] = "baseline"
    gqa: ClassVar[bool] = False
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
            bias = self.bias.view(self.case.batch, self.case.kv_heads, 1, self.case.length)
            shift = bias if which == "forward" else torch.zeros_like(bias)
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

    name = "sdpa_expanded"

    def for_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(self.case.group, dim=1)


class SdpaGqa(_Sdpa):
    """Grouped heads left to SDPA (``enable_gqa=True``, PyTorch 2.5 and later)."""

    name = "sdpa_gqa"
    gqa = True

    @staticmethod
    def supports(case: Case) -> bool:
        return "enable_gqa" in (scaled_dot_product_attention.__doc__ or "")


class SdpaGrouped(_Sdpa):
    """(B*Hk, group, N, D): the key/value heads are batch entries, so a group shares one mask."""

    name = "sdpa_grouped"

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        batch, length, heads, dim = tensor.shape
        kv = self.case.kv_heads
        return super().arrange(tensor).view(batch * kv, heads // kv, length, dim)

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.clone().view(-1, 1, 1, bias.shape[-1])

    def for_heads(self, per_kv_head: torch.Tensor) -> torch.Tensor:
        return per_kv_head.reshape(-1, 1, *per_kv_head.shape[-2:])

    def for_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(-1, self.case.group, -1, -1)


class SdpaAugmented(SdpaGrouped):
    """The bias as one more column of the keys, met by a column of ones in the queries.

    Then the Q x K mask needs no gradient and PyTorch's fused kernels serve training too. It is
    shown for information: it is not attention with a materialised bias, and few would write it.
    """

    name = "sdpa_augmented"
    role = "information"

    @staticmethod
    def supports(case: Case) -> bool:
        return case.window is not None

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


CONTESTANTS: dict[str, type[Contestant]] = {
    contestant.name: contestant
    for contestant in (FlashDmattn, SdpaExpanded, SdpaGqa, SdpaGrouped, SdpaAugmented)
}


def select(case: Case, bias: torch.Tensor | None) -> IntervalMask | torch.Tensor | None:
    """The keys that the case's window keeps; None for dense attention."""
    if case.window is None or bias is None:
        return None
    bias = bias.detach().reshape(case.batch, case.kv_heads, 1, case.length)
    return dynamic_mask(bias, case.window, case.causal)


def keep_matrix(case: Case, bias: torch.Tensor) -> torch.Tensor:
    """The same selection, with causality, as a boolean (B,Hk,N,N) tensor."""
    mask = select(case, bias)
    assert mask is not None
    if isinstance(mask, IntervalMask):
        return mask.to_bool(case.length)
    return mask.expand(-1, -1, case.length, -1)
