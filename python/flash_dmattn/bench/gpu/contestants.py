# SPDX-License-Identifier: BSD-3-Clause
"""Who competes on a GPU: this package with each kind of mask, and what PyTorch has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ... import IntervalMask, dynamic_mask
from ..cases import Case, Inputs, Pass
from ..contestants import Contestant, FlashDmattn, Role, SdpaExpanded, SdpaGrouped


class KeyMask(FlashDmattn):
    """This package; the keys with the largest bias of all, the same for every query."""

    def prepare(self, which: Pass) -> None:
        """Select once for all queries."""
        assert self.bias is not None
        assert self.case.window is not None
        self.mask = dynamic_mask(self.bias, self.case.window, is_causal=False)


class Boolean(FlashDmattn):
    """This package; the intervals' mask as a boolean for each query and key."""

    def prepare(self, which: Pass) -> None:
        """Select, and write the Q x K mask."""
        super().prepare(which)
        assert isinstance(self.mask, IntervalMask)
        self.mask = self.mask.to_bool(self.case.length)


class NoMask(FlashDmattn):
    """This package without mask and bias."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, replace(inputs, bias=None))

    def prepare(self, which: Pass) -> None:
        """There is nothing to make."""


class _HeadsFirst(Contestant):
    """(B,heads,N,D) views of (B,N,heads,D) tensors, which PyTorch's fused kernels take as is."""

    role: ClassVar[Role] = "baseline"

    def arrange(self, tensor: torch.Tensor) -> torch.Tensor:
        """A private copy, seen with the heads first."""
        return tensor.clone().transpose(1, 2)

    def restore(self, tensor: torch.Tensor) -> torch.Tensor:
        """The heads behind the rows again."""
        return tensor.transpose(1, 2)


class Dense(_HeadsFirst):
    """One backend of scaled_dot_product_attention over all keys, without bias."""

    backend: ClassVar[str]  # by name: an older torch lacks some

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, replace(inputs, bias=None))
        self.causal = case.causal

    def prepare(self, which: Pass) -> None:
        """There is nothing to make."""

    def attend(self) -> torch.Tensor:
        """SDPA that fails rather than take another backend."""
        with sdpa_kernel(getattr(SDPBackend, self.backend)):
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

    The keys are those with the largest bias of each head, laid out densely before the call.
    """

    role = "information"

    def __init__(self, case: Case, inputs: Inputs) -> None:
        assert inputs.bias is not None
        assert case.window is not None
        kept = inputs.bias.detach()[:, :, 0].topk(case.window).indices.sort().values
        rows = kept.transpose(1, 2)[..., None].expand(-1, -1, -1, case.head_dim)
        key, value = (tensor.gather(1, rows) for tensor in (inputs.key, inputs.value))
        super().__init__(case, replace(inputs, key=key, value=value))
        self.causal = False


class CompactFlash(Compact):
    """FlashAttention-2 over compacted keys."""

    backend = "FLASH_ATTENTION"


class CompactCudnn(Compact):
    """cuDNN over compacted keys."""

    backend = "CUDNN_ATTENTION"


class Flex(_HeadsFirst):
    """Compiled FlexAttention: a block mask from the intervals, the bias added to the scores."""

    block_mask: Any = None

    def __init__(self, case: Case, inputs: Inputs) -> None:
        super().__init__(case, inputs)
        assert self.bias is not None
        bias, group = self.bias, case.group
        shape = (case.batch, case.kv_heads, case.length)
        start = self.start = torch.zeros(shape, dtype=torch.int32, device=bias.device)
        end = self.end = torch.zeros_like(start)

        # Made once, and start and end written anew: other functions would be compiled again.
        def kept(b: Any, h: Any, row: Any, key: Any) -> Any:
            head = h // group
            seen = (start[b, head, key] <= row) & (row < end[b, head, key])
            return seen & (key <= row)

        def with_bias(score: Any, b: Any, h: Any, row: Any, key: Any) -> Any:
            return score + bias[b, h // group, 0, key]

        self.kept, self.with_bias = kept, with_bias

    def arrange_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """In float32, since its gradient is summed in its own dtype."""
        return bias.to(torch.float32, copy=True)

    def prepare(self, which: Pass) -> None:
        """Select, and find the blocks that hold a kept key."""
        assert self.bias is not None
        case = self.case
        assert case.window is not None
        mask = dynamic_mask(self.bias, case.window, is_causal=True)
        assert isinstance(mask, IntervalMask)
        self.start.copy_(mask.start)
        self.end.copy_(mask.end)
        self.block_mask = _compiled_flex().create_block_mask(
            self.kept, case.batch, case.heads, case.length, case.length, device=self.query.device
        )

    def attend(self) -> torch.Tensor:
        """FlexAttention with the bias as a score modification."""
        out: torch.Tensor = _compiled_flex().attention(
            self.query,
            self.key,
            self.value,
            score_mod=self.with_bias,
            block_mask=self.block_mask,
            enable_gqa=True,
        )
        return out


@dataclass(frozen=True)
class _CompiledFlex:
    attention: Callable[..., Any]
    create_block_mask: Callable[..., Any]


@functools.cache
def _compiled_flex() -> _CompiledFlex:
    """Compile once in a process; what is compiled for a shape serves all calls of that shape."""
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Otherwise a compiled backward frees what running it again, to time it alone, needs.
    functorch.donated_buffer = False
    return _CompiledFlex(torch.compile(flex_attention), torch.compile(create_block_mask))


TOP_KEYS_OF_EACH_QUERY = "top-w keys of each query"
ALL_KEYS = "all keys"


@dataclass(frozen=True)
class Entrant:
    """A contestant by its name, what it attends to, and whether it is timed by itself.

    The others are timed in turns, so that drifting clocks change their ratios little. Those with
    large masks are not, because then all would have to fit the memory at once.
    """

    kind: type[Contestant]
    mask: str
    alone: bool = False


ENTRANTS: dict[str, Entrant] = {
    "intervals": Entrant(FlashDmattn, TOP_KEYS_OF_EACH_QUERY),
    "key_mask": Entrant(KeyMask, "top-w keys of all queries"),
    "boolean": Entrant(Boolean, TOP_KEYS_OF_EACH_QUERY),
    "no_mask": Entrant(NoMask, ALL_KEYS),
    "dense_flash": Entrant(DenseFlash, ALL_KEYS),
    "dense_cudnn": Entrant(DenseCudnn, ALL_KEYS),
    "compact_flash": Entrant(CompactFlash, "only w keys, not causal"),
    "compact_cudnn": Entrant(CompactCudnn, "only w keys, not causal"),
    "sdpa": Entrant(SdpaGrouped, TOP_KEYS_OF_EACH_QUERY, alone=True),
    "sdpa_expanded": Entrant(SdpaExpanded, TOP_KEYS_OF_EACH_QUERY, alone=True),
    "flex": Entrant(Flex, TOP_KEYS_OF_EACH_QUERY, alone=True),
}


def fits(name: str, case: Case) -> bool:
    """Whether a contestant has a meaning for a case: masks need a window."""
    return case.window is not None or ENTRANTS[name].mask == ALL_KEYS
