# SPDX-License-Identifier: BSD-3-Clause
"""What every contestant is: a small object with the same few methods, and the selection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch

from ... import IntervalMask, dynamic_mask
from ..cases import Case, Inputs, Pass

Role = Literal["ours", "baseline", "information"]


class Contestant(ABC):
    """One implementation on one case.

    The constructor puts the inputs into the layout the implementation likes best; ``prepare`` makes
    its mask. Neither is part of a timed call. ``leaves`` are the tensors differentiated by.
    """

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

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """A private copy of a (B,rows,heads,D) tensor in the contestant's layout."""
        return tensor.clone()

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """A private copy of the (B,Hk,{1|Q},K) bias in the contestant's layout."""
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

    def prepare_and_run(self, which: Pass) -> list[torch.Tensor]:
        """What a layer does: the selection and mask, then the call."""
        self.prepare(which)
        return self.run(which)

    def results(self, which: Pass) -> list[torch.Tensor]:
        """``run``'s tensors in the public layout, to compare contestants with one another."""
        tensors = self.run(which)
        plain = [self.restore(t) for t in tensors[:4]]
        if self.bias is not None and which == "forward_backward":
            rows = self.bias.shape[-2]
            plain.append(tensors[4].reshape(self.case.batch, self.case.kv_heads, rows, -1))
        return plain


def select(case: Case, bias: torch.Tensor | None) -> IntervalMask | torch.Tensor | None:
    """The keys that the case's window keeps; None for dense attention."""
    if case.window is None or bias is None:
        return None
    bias = bias.detach().reshape(case.batch, case.kv_heads, -1, case.length)
    return dynamic_mask(bias, case.window, case.causal)


def keep_matrix(case: Case, bias: torch.Tensor) -> torch.Tensor:
    """The same selection, with causality, as a boolean (B,Hk,Q,K) tensor."""
    mask = select(case, bias)
    assert mask is not None
    if isinstance(mask, IntervalMask):
        return mask.to_bool(case.rows)
    return mask.expand(-1, -1, case.rows, -1)
