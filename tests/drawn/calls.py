# SPDX-License-Identifier: BSD-3-Clause
"""A call with all of its inputs; it can be moved, overwritten in place and repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import flash_dmattn
from flash_dmattn import IntervalMask
from flash_dmattn.arguments import mask_parts, to_4d
from flash_dmattn.record import AttentionInputs
from support import moved

GRADIENT_OF = ("query", "key", "value", "bias", "sink")
# Calls with key lists do not have these arguments.
MASKED = ("attn_mask", "window_size", "keep_last", "keep_first")


@dataclasses.dataclass
class Call:
    """The arguments of an attention call, dense or packed, and the gradients of its results."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    dlse: Tensor
    mask: Tensor | IntervalMask | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    indices: Tensor | None = None  # key indices listed by each query
    index_bias: Tensor | None = None
    causal: bool = False
    softcap: float = 0.0
    window: int | None = None
    keep_last: int = 0
    keep_first: int = 0
    scale: float | None = None
    key_mass: bool = False  # whether it is requested
    # The inputs whose gradients are requested, and the results that get a gradient.
    wanted: tuple[str, ...] = GRADIENT_OF
    of: tuple[str, ...] = ("out", "lse")
    # For packed sequences.
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    longest: tuple[int, int] = (0, 0)
    block_table: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Return this call with every tensor changed; a tensor in two places stays shared."""
        changed: dict[int, Tensor] = {}

        def change_once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Call(**pytree.tree_map_only(Tensor, change_once, fields))

    def to(self, device: str, dtype: torch.dtype | None = None) -> Call:
        """Move the call and keep the strides; a dtype casts all floating-point tensors."""
        return self.mapped(lambda t: moved(t, device, dtype if t.is_floating_point() else None))

    def inputs(self, mask: Tensor | IntervalMask | None) -> AttentionInputs:
        """Return the backends' inputs of this call, with the given mask."""
        plain, start, end, *_ = mask_parts(mask)
        if self.cu_seqlens_q is None:
            (batch, _, heads, _), (_, keys, kv_heads, _) = self.query.shape, self.key.shape
            sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "keys": keys}
            plain = None if plain is None else to_4d("mask", plain, **sizes)
            bias = None if self.bias is None else to_4d("bias", self.bias, **sizes)
        else:
            bias = self.bias
        packing = (self.cu_seqlens_q, self.cu_seqlens_k, self.block_table)
        return AttentionInputs(self.query, self.key, self.value, plain, start, end, bias, *packing)

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(vars(self)) if isinstance(leaf, Tensor)]

    def copy_(self, other: Call) -> None:
        """Overwrite the tensors in place with those of a call of the same shapes."""
        for to, source in zip(self.tensors(), other.tensors(), strict=True):
            to.copy_(source)

    def results(self, **options: Any) -> dict[str, Tensor]:
        """Compute out, lse and all gradients on the device without waiting for it."""
        leaves = {
            name: getattr(self, name).detach().requires_grad_()
            for name in self.wanted
            if getattr(self, name) is not None
        }
        if self.block_table is not None or not leaves:  # paged keys have no gradients
            return self.results_alone(**options)
        found = self.named(self.attend(leaves, **options))
        gradients = torch.autograd.grad(
            [found[name] for name in self.of],
            list(leaves.values()),
            [getattr(self, f"d{name}") for name in self.of],
            allow_unused=True,
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            found[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
        return {name: value.detach() for name, value in found.items()}

    def results_alone(self, **options: Any) -> dict[str, Tensor]:
        """Compute out and lse without gradients, in the fewest steps."""
        with torch.no_grad():
            return self.named(self.attend({}, **options))

    def named(self, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
        names = ("out", "lse", "mass") if self.key_mass else ("out", "lse")
        return dict(zip(names, results, strict=True))

    def attend(self, leaves: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
        query, key, value, bias, sink = (
            leaves.get(name, getattr(self, name)) for name in GRADIENT_OF
        )
        options = {
            "attn_mask": self.mask,
            "attn_bias": bias,
            "sink": sink,
            "softmax_scale": self.scale,
            "is_causal": self.causal,
            "softcap": self.softcap,
            "window_size": self.window,
            "keep_last": self.keep_last,
            "keep_first": self.keep_first,
            "return_lse": True,
            "return_key_mass": self.key_mass,
            **options,
        }
        if self.indices is not None:
            options = {name: value for name, value in options.items() if name not in MASKED}
            index_bias = leaves.get("index_bias", self.index_bias)
            options |= {"key_indices": self.indices, "index_bias": index_bias}
        if self.cu_seqlens_q is None:
            return flash_dmattn.flash_dmattn_func(query, key, value, **options)
        return flash_dmattn.flash_dmattn_varlen_func(
            query,
            key,
            value,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            *self.longest,
            block_table=self.block_table,
            **options,
        )


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Compare all results bit for bit with one wait for the device."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return False
    differ = [(_bytes(value) != _bytes(other[name])).any() for name, value in one.items()]
    return not torch.stack(differ).any()


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    if same_bits(got, want):
        return
    for name, value in got.items():
        bits, wanted = _bytes(value), _bytes(want[name])
        if not torch.equal(bits, wanted):
            difference = (value.double() - want[name].double()).abs()
            raise AssertionError(
                f"{name} differs in {int((bits != wanted).sum())} bytes of {bits.numel()}, by at "
                f"most {difference.nan_to_num(nan=torch.inf).max().item():.3g}"
            )


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of the elements in order, whatever the strides."""
    return tensor.flatten().view(torch.uint8)
