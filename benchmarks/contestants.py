# SPDX-License-Identifier: BSD-3-Clause
"""The compared implementations: this package with each kind of mask, and those of PyTorch."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from flash_dmattn import IntervalMask, dynamic_mask, flash_dmattn_func, make_plan

from .cases import Case, Inputs, Pass
from .tables import QUANTITIES
from .timing import Call

if TYPE_CHECKING:
    from typing_extensions import Self

# Quantities of masked cases that only this package has: its plans, and the host's part.
_OF_THIS_PACKAGE = ("host", "host_forward_backward", "plan", "forward_planned")


class Contestant:
    """One implementation on one case, on inputs in its preferred layout.

    ``prepare`` makes its mask, which is not part of a timed call. ``leaves`` are the tensors that
    get gradients.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        self.leaves = [self.arrange(t) for t in (inputs.query, inputs.key, inputs.value)]
        if inputs.bias is not None:
            self.leaves.append(self.arrange_bias(inputs.bias))
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.query, self.key, self.value = self.leaves[:3]
        self.bias = self.leaves[3] if inputs.bias is not None else None
        self.bias_shape = () if inputs.bias is None else inputs.bias.shape
        self.grad_out = self.arrange(inputs.grad_out)

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a private copy of a (B,rows,heads,D) tensor in the contestant's layout."""
        return tensor.clone()

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return a private copy of the bias in the contestant's layout."""
        return bias.clone()

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the inverse of ``arrange``."""
        return tensor

    def prepare(self, which: Pass) -> None:
        """Make what a model would make once per call: selection and mask."""

    def attend(self) -> torch.Tensor:
        """Return the attention's output in the contestant's layout."""
        raise NotImplementedError

    def run(self, which: Pass) -> list[torch.Tensor]:
        """Run the timed call. Return the output, and in a training pass the leaves' gradients."""
        if which == "forward":
            with torch.no_grad():
                return [self.attend()]
        out = self.attend()
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad_out)]

    def prepare_and_run(self, which: Pass) -> list[torch.Tensor]:
        """Run the work of a layer: mask and call."""
        self.prepare(which)
        return self.run(which)

    def detached(self) -> Self:
        """Return a copy whose tensors require no gradients."""
        plain = copy.copy(self)
        plain.query, plain.key, plain.value = (leaf.detach() for leaf in self.leaves[:3])
        plain.bias = None if self.bias is None else self.bias.detach()
        return plain

    def call(self, quantity: str) -> Call | None:
        """Return the call whose time is the quantity; None if the quantity does not apply."""
        which = QUANTITIES[quantity].which
        if quantity in ("forward", "forward_backward"):
            return partial(self.run, which)
        if quantity == "backward":
            out = self.attend()
            gradients: Any = torch.autograd.grad
            return partial(gradients, out, self.leaves, self.grad_out, retain_graph=True)
        if quantity.startswith("host") and self.bias is None:
            return self.detached().attend if quantity == "host" else partial(self.run, which)
        if self.bias is None or quantity in _OF_THIS_PACKAGE:
            return None
        return partial(self.prepare if quantity == "selection" else self.prepare_and_run, which)

    def results(self, which: Pass) -> list[torch.Tensor]:
        """Return the tensors of ``run`` in the public layout, for comparison of contestants."""
        tensors = self.run(which)
        plain = [self.restore(t) for t in tensors[:4]]
        if self.bias is not None and which == "forward_backward":
            plain.append(tensors[4].reshape(self.bias_shape))
        return plain


def select(case: Case, bias: torch.Tensor) -> IntervalMask | torch.Tensor:
    """Return the keys that the case's window keeps."""
    assert case.window is not None
    bias = bias.detach().reshape(case.batch, case.kv_heads, -1, case.length)
    return dynamic_mask(bias, case.window, case.causal)


def keep_matrix(case: Case, bias: torch.Tensor) -> torch.Tensor:
    """Return the same selection, with causality, as a boolean (B,Hk,Q,K) tensor."""
    mask = select(case, bias)
    if isinstance(mask, IntervalMask):
        mask = mask.to_bool(case.rows)
    return mask.expand(-1, -1, case.rows, -1)


class FlashDmattn(Contestant):
    """This package with the mask of ``dynamic_mask`` from the bias, in its original form.

    ``form`` may be "boolean", a mask with an element for each query and key; "keys", one selection
    for all queries; or "none", neither mask nor bias.
    """

    def __init__(
        self, case: Case, inputs: Inputs, form: str = "selected", backend: str | None = None
    ) -> None:
        super().__init__(case, replace(inputs, bias=None) if form == "none" else inputs)
        self.form, self.backend = form, backend
        self.mask: IntervalMask | torch.Tensor | None = None

    def prepare(self, which: Pass) -> None:
        if self.bias is None:
            return
        case = replace(self.case, causal=False) if self.form == "keys" else self.case
        self.mask = select(case, self.bias)
        if self.form == "boolean" and isinstance(self.mask, IntervalMask):
            self.mask = self.mask.to_bool(self.case.rows)

    def attend(self, **mask: Any) -> torch.Tensor:
        """Return the output; ``mask`` may be a plan in place of the mask."""
        out = flash_dmattn_func(
            self.query,
            self.key,
            self.value,
            attn_bias=self.bias,
            is_causal=self.case.causal,
            backend=self.backend,
            **(mask or {"attn_mask": self.mask}),
        )
        assert isinstance(out, torch.Tensor)
        return out

    def call(self, quantity: str) -> Call | None:
        if quantity not in _OF_THIS_PACKAGE:
            return super().call(quantity)
        if quantity == "host_forward_backward":
            return partial(self.run, QUANTITIES[quantity].which)
        plain = self.detached()
        if quantity == "host":
            return plain.attend
        if self.backend is not None or self.mask is None:
            return None
        plan = partial(make_plan, plain.query, plain.key, self.mask, self.case.causal)
        return plan if quantity == "plan" else partial(plain.attend, plan=plan())


class SelectingFlashDmattn(FlashDmattn):
    """This package with ``window_size``: the call includes the selection, as in its layer."""

    def prepare(self, which: Pass) -> None:
        """Do nothing."""

    def attend(self, **_: Any) -> torch.Tensor:
        return super().attend(window_size=self.case.window)

    def call(self, quantity: str) -> Call | None:
        """Return None for quantities that exclude the selection."""
        with_selection = ("forward_with_mask", "end_to_end", "backward")
        taken = quantity in with_selection or quantity.startswith("host")
        return super().call(quantity) if taken else None


def _only(backend: str | None) -> AbstractContextManager[object]:
    """Let SDPA use only this backend. Its name is a string, since older torch lacks some."""
    if backend is None:
        return nullcontext()
    chosen: AbstractContextManager[object] = sdpa_kernel(getattr(SDPBackend, backend))
    return chosen


class Sdpa(Contestant):
    """SDPA on (B,H,N,D) tensors with the mask as a Q x K tensor; no mask if there is no bias.

    The selection and causality are one additive mask of 0 and -inf. A forward without gradients
    also has the bias in that mask, so that PyTorch's fused kernel can take it. In training the bias
    is added inside the call, and its gradient flows through the addition.

    ``layout`` is "grouped", (B*Hk, group, N, D), where a group of heads shares one mask;
    "expanded", keys and values repeated for every query head; "gqa", left to SDPA; or "views", also
    left to SDPA, of (B,N,H,D) tensors, which fused kernels read directly. The other layouts are
    contiguous.
    """

    def __init__(
        self, case: Case, inputs: Inputs, layout: str = "grouped", backend: str | None = None
    ) -> None:
        self.layout, self.backend = layout, backend
        super().__init__(case, inputs)
        self.additive: torch.Tensor | None = None

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.layout == "views":
            return tensor.clone().transpose(1, 2)
        tensor = tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        if self.layout != "grouped":
            return tensor
        return tensor.view(self.case.batch * self.case.kv_heads, -1, *tensor.shape[-2:])

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        bias = bias.clone()
        return bias.view(-1, 1, *bias.shape[-2:]) if self.layout == "grouped" else bias

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(self.case.batch, -1, *tensor.shape[-2:]).transpose(1, 2)

    def prepare(self, which: Pass) -> None:
        if self.bias is None:
            return
        with torch.no_grad():
            keep = keep_matrix(self.case, self.bias)
            bias = self.bias.view(self.case.batch, self.case.kv_heads, -1, self.case.length)
            shift = bias if which == "forward" else torch.zeros_like(bias[..., :1, :])
            self.additive = self._for_heads(torch.where(keep, shift, -torch.inf))

    def attend(self) -> torch.Tensor:
        mask = self.additive
        if mask is not None and self.bias is not None and torch.is_grad_enabled():
            mask = mask + self._for_heads(self.bias)
        with _only(self.backend):
            return scaled_dot_product_attention(
                self.query,
                self.for_queries(self.key),
                self.for_queries(self.value),
                attn_mask=mask,
                is_causal=self.case.causal and mask is None,
                **({"enable_gqa": True} if self.layout in ("gqa", "views") else {}),
            )

    def _for_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a (B,Hk,.,N) tensor for every query head, in the layout of the scores."""
        if self.layout == "grouped":
            return tensor.reshape(-1, 1, *tensor.shape[-2:])
        return tensor.repeat_interleave(self.case.group, dim=1)

    def for_queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return keys or values for every query head, unless SDPA groups them itself."""
        if self.layout == "grouped":
            return tensor.expand(-1, self.case.group, -1, -1)
        return tensor.repeat_interleave(self.case.group, 1) if self.layout == "expanded" else tensor


def dense(case: Case, inputs: Inputs, backend: str | None) -> Contestant:
    """Return dense attention by one backend of SDPA over all keys, without bias or mask.

    It is a reference line. None: the backend that PyTorch chooses.
    """
    return Sdpa(case, replace(inputs, bias=None), "views", backend)


class FlashAttention4(Contestant):
    """FlashAttention-4 (``flash-attn-4``) over all keys, without bias or mask: a reference line."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.function: Any = importlib.import_module("flash_attn.cute").flash_attn_func
        super().__init__(case, replace(inputs, bias=None))

    def attend(self) -> torch.Tensor:
        found = self.function(self.query, self.key, self.value, causal=self.case.causal)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out


def compact(case: Case, inputs: Inputs, make: Callable[[Case, Inputs], Contestant]) -> Contestant:
    """Return dense attention of all queries over only ``window`` keys, as a reference cost.

    ``make`` makes the contestant for these keys. Each head has the keys with its largest biases,
    gathered before the call. For a per-query bias the first query decides.
    """
    assert inputs.bias is not None
    assert case.window is not None
    kept = inputs.bias.detach()[:, :, 0].topk(min(case.window, case.length)).indices
    rows = kept.sort().values.transpose(1, 2)[..., None].expand(-1, -1, -1, case.head_dim)
    key, value = (tensor.gather(1, rows) for tensor in (inputs.key, inputs.value))
    return make(replace(case, causal=False), replace(inputs, key=key, value=value))


class SdpaAugmented(Sdpa):
    """SDPA with the bias as one more column of the keys, and a column of ones in the queries.

    The Q x K mask then needs no gradient, so PyTorch's fused kernels also serve training. It is
    shown for information: it is not attention with a Q x K bias, and is rarely written.
    """

    def prepare(self, which: Pass) -> None:
        super().prepare("forward_backward")

    def attend(self) -> torch.Tensor:
        assert self.bias is not None
        dim = self.case.head_dim
        scale = dim**-0.5
        # Eight more columns, seven of them zeros, keep rows aligned for vector loads.
        query = torch.cat([self.query, torch.ones_like(self.query[..., :1])], dim=-1)
        key = torch.cat([self.key, self.bias.transpose(-2, -1) / scale], dim=-1)
        out = scaled_dot_product_attention(
            pad(query, (0, 7)),
            self.for_queries(pad(key, (0, 7))),
            self.for_queries(pad(self.value, (0, 8))),
            attn_mask=self.additive,
            scale=scale,
        )
        return out[..., :dim]


class Flex(Sdpa):
    """Compiled FlexAttention: a block mask from the selection; the bias is added to the scores."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, inputs, "views")
        assert self.bias is not None
        bias, group, per_query = self.bias, case.group, case.per_query
        shape = (case.batch, case.kv_heads, case.length)
        # Made once and overwritten for each mask, because other functions would be recompiled.
        keep = torch.zeros(bias.shape if per_query else 0, dtype=torch.bool, device=bias.device)
        start, end = torch.zeros(2, *shape, dtype=torch.int32, device=bias.device)
        self.buffers = [keep] if per_query else [start, end]

        def kept(b: Any, h: Any, row: Any, key: Any) -> Any:
            if per_query:
                return keep[b, h // group, row, key]
            head = h // group
            seen = (start[b, head, key] <= row) & (row < end[b, head, key])
            return seen & (key <= row)

        def with_bias(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
            return score + bias[b, h // group, row if per_query else 0, key]

        self.kept, self.with_bias = kept, with_bias
        self.block_mask: Any = None

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return it in float32, because its gradient is summed in its own dtype."""
        return bias.to(torch.float32, copy=True)

    def prepare(self, which: Pass) -> None:
        """Select, and find the blocks with a kept key."""
        assert self.bias is not None
        mask = select(self.case, self.bias)
        parts = [mask.start, mask.end] if isinstance(mask, IntervalMask) else [mask]
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.copy_(part)
        sizes = (self.case.batch, self.case.heads, self.case.length, self.case.length)
        self.block_mask = _compiled_flex()[1](self.kept, *sizes, device=self.query.device)

    def attend(self) -> torch.Tensor:
        out: torch.Tensor = _compiled_flex()[0](
            self.query,
            self.key,
            self.value,
            score_mod=self.with_bias,
            block_mask=self.block_mask,
            enable_gqa=True,
        )
        return out


@functools.cache
def _compiled_flex() -> tuple[Any, Any]:
    """Compile once per process. The code for a shape serves all calls of that shape."""
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Otherwise a compiled backward frees buffers, and cannot run again to be timed alone.
    functorch.donated_buffer = False
    return torch.compile(flex_attention), torch.compile(create_block_mask)
