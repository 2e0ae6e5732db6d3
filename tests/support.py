# SPDX-License-Identifier: BSD-3-Clause
"""Attention problems, and the rule that judges results."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flash_dmattn
from flash_dmattn import _core, loader
from flash_dmattn.reference import per_query_head

HALF_TYPES = (torch.float16, torch.bfloat16)


class Target(NamedTuple):
    """The device and backend of a call."""

    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.device}-{self.backend}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of query, key and value."""
        if self.has_kernels_of_gpu and self.backend != "reference":
            return HALF_TYPES
        return (torch.float32, *HALF_TYPES)

    @property
    def most_head_dim(self) -> int:
        """The largest head dimension of its pack, or of any call."""
        return loader.pack_for(self.device).max_head_dim if self.is_pack else sys.maxsize

    @property
    def has_kernels_of_gpu(self) -> bool:
        """Whether it is a GPU, or a CPU that emulates GPU kernels by scripts/test_emulated."""
        if self.device == "cpu" and self.is_pack:
            return "float32" not in loader.pack_for(self.device).dtypes
        return self.device == "cuda"

    @property
    def is_pack(self) -> bool:
        return self.backend in ("cpu", "cuda")


TARGETS = tuple(
    Target(device, backend)
    for device in ("cpu", "cuda")
    for backend in (device, "reference", "flex", "triton")
)


def plan_bytes(
    pack: _core.Pack,
    kind: str,
    lists: int,
    keys: int,
    row_keys: int,
    rows: int,
    sequences: int,
    max_kept: int = 0,
) -> int:
    """Return the bytes of a plan by the formula of fdm_plan_layout in pack.h."""
    *sizes, tile_rows, most_tile_keys = pack.plan_layouts[kind]
    fixed, per_list, per_key, per_tile, per_tile_key = sizes
    tiles = rows // tile_rows + sequences
    most = most_tile_keys if max_kept == 0 or kind == "rows" else max_kept + tile_rows - 1
    per_tile += min(row_keys, most) * per_tile_key
    return fixed + lists * (per_list + keys * per_key + tiles * per_tile)


def reads_float64(target: Target) -> bool:
    """Whether its kernels read a float64 bias for each key."""
    return target.backend in ("reference", "cpu", "cuda")


@dataclasses.dataclass
class Problem:
    """The tensors and settings of one call; the tensors' strides are part of the problem."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | flash_dmattn.IntervalMask | None = None
    bias: Tensor | None = None
    causal: bool = False
    softcap: float = 0.0
    scale: float | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:-1], self.value.shape[-1])

    def results(
        self, target: Target, *, dout: Tensor, dlse: Tensor | None = None, **options: object
    ) -> dict[str, Tensor]:
        """Run flash_dmattn and return out, lse and the gradients, on the CPU."""
        leaves = self.leaves(target.device, None)
        out, lse = flash_dmattn.flash_dmattn_func(
            leaves["query"],
            leaves["key"],
            leaves["value"],
            None if self.mask is None else self.mask.to(target.device),
            leaves.get("bias"),
            self.scale,
            self.causal,
            self.softcap,
            return_lse=True,
            backend=target.backend,
            **options,
        )
        return gathered(out, lse, leaves, dout, dlse)

    def truth(self, *, dout: Tensor, dlse: Tensor | None = None) -> dict[str, Tensor]:
        """Return the expected `results`, computed in float64."""
        leaves = self.leaves("cpu", torch.float64)
        out, lse = flash_dmattn.attention_reference(
            leaves["query"],
            leaves["key"],
            leaves["value"],
            self.mask,
            leaves.get("bias"),
            scale=self.scale,
            causal=self.causal,
            softcap=self.softcap,
        )
        return gathered(out, lse, leaves, dout, dlse)

    def eager(self, *, dout: Tensor, dlse: Tensor | None = None) -> dict[str, Tensor]:
        """Return the same formula by PyTorch operations in the inputs' dtype."""
        leaves = self.leaves("cpu", None)
        out, lse = eager_attention(self, leaves)
        return gathered(out, lse, leaves, dout, dlse)

    def leaves(self, device: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the tensors that require gradients; strides are kept unless they are cast."""
        named = {"query": self.query, "key": self.key, "value": self.value, "bias": self.bias}
        return {
            name: moved(tensor.detach(), device, dtype).requires_grad_()
            for name, tensor in named.items()
            if tensor is not None
        }


def moved(tensor: Tensor, device: str, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and dtype != tensor.dtype:
        return tensor.to(device, dtype)
    if tensor.device.type == device:
        return tensor.detach()
    # A copy of a strided view is dense: move the whole storage and create the same view on it.
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def gathered(
    out: Tensor, lse: Tensor, leaves: dict[str, Tensor], dout: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    """Return out, lse and the gradients of sum(out * dout) + sum(lse * dlse over finite lse)."""
    outputs, cotangents = [out], [moved(dout, out.device.type, out.dtype)]
    if dlse is not None:
        outputs.append(lse)
        # The lse of an empty row is -inf; a gradient of it is meaningless and must do no harm.
        cotangents.append(dlse.to(lse.device, lse.dtype))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    named = {
        f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
    return {name: t.detach().cpu() for name, t in {"out": out, "lse": lse, **named}.items()}


def eager_attention(problem: Problem, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute out and lse with every operation in the dtype of the inputs."""
    query, key, value = (leaves[n].transpose(1, 2) for n in ("query", "key", "value"))
    heads, kv_heads = query.shape[1], key.shape[1]
    key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    scale = problem.scale if problem.scale is not None else query.shape[-1] ** -0.5
    scores = (query @ key.transpose(-1, -2)) * scale
    if problem.softcap > 0:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    kept = torch.ones(scores.shape, dtype=torch.bool)
    if problem.causal:
        kept = kept.tril(kept.shape[3] - kept.shape[2])
    mask = problem.mask
    if isinstance(mask, flash_dmattn.IntervalMask):
        mask = mask.to_bool(query.shape[2])
    if mask is not None:
        kept = kept & per_query_head(four_dimensional(mask), heads, kv_heads)
    if "bias" in leaves:
        bias = per_query_head(four_dimensional(leaves["bias"]), heads, kv_heads)
        kept = kept & (bias != -torch.inf)
        scores = (scores + bias).to(query.dtype)
    empty = ~kept.any(-1, keepdim=True)
    scores = scores.masked_fill(~kept, -torch.inf).masked_fill(empty, 0)
    probabilities = torch.softmax(scores, -1).masked_fill(~kept, 0)
    lse = torch.logsumexp(scores, -1).masked_fill(empty.squeeze(-1), -torch.inf)
    return (probabilities @ value).transpose(1, 2), lse


def four_dimensional(tensor: Tensor) -> Tensor:
    if tensor.dim() == 2:
        return tensor[:, None, None, :]
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def assert_forward_is_accurate(problem: Problem, target: Target) -> None:
    """Assert the rule of `assert_accurate` for out and lse."""
    dout = problem.query.new_zeros(problem.out_shape)
    parts = problem.results(target, dout=dout), problem.truth(dout=dout), problem.eager(dout=dout)
    assert_accurate(*({name: part[name] for name in ("out", "lse")} for part in parts))


def assert_accurate(
    got: dict[str, Tensor], truth: dict[str, Tensor], eager: dict[str, Tensor]
) -> None:
    """Assert the rule: no error above twice that of the same formula in the inputs' dtype.

    The floor, relative to the largest value (or to 1), is for small problems in which the eager
    formula happens to round luckily: 4 units in the last place of the dtype (for gradients that of
    out, which the backward pass reads), and 64 of float32, for sums that cancel.
    """
    assert got.keys() == truth.keys()
    for name, value in got.items():
        want, reference = truth[name], eager[name].double()
        assert value.shape == want.shape, name
        assert not value.isnan().any(), f"{name} has NaN"
        infinite = want.isinf()
        assert torch.equal(value.double()[infinite], want[infinite]), f"{name}: infinities differ"
        if infinite.all():
            continue
        value, want, reference = (t.double()[~infinite] for t in (value, want, reference))
        error = (value - want).abs().max().item()
        allowed = (reference - want).abs().max().item()
        rounded = got["lse" if name == "lse" else "out"].dtype
        unit = 4 * torch.finfo(rounded).eps + 64 * torch.finfo(torch.float32).eps
        floor = unit * max(1.0, want.abs().max().item())
        assert error <= 2 * allowed + floor, (
            f"{name}: error {error:.3g} above twice the eager {allowed:.3g} plus {floor:.3g}"
        )


def check(problem: Problem, target: Target, seed: int = 0, **options: object) -> None:
    """Compare out, lse and all gradients of a problem with float64, by the rule."""
    generator = torch.Generator().manual_seed(seed)
    dtype = problem.query.dtype
    dout = cotangent(torch.randn(problem.out_shape, generator=generator)).to(dtype)
    batch, rows, heads, _ = problem.query.shape
    dlse = torch.randn(batch, heads, rows, generator=generator).to(dtype)
    cotangents = {"dout": dout, "dlse": dlse}
    got = problem.results(target, **cotangents, **options)
    assert_accurate(got, problem.truth(**cotangents), problem.eager(**cotangents))


def cotangent(gradient: Tensor) -> Tensor:
    """Scale a gradient of out so that its mostly cancelling products with value are about 1.

    Otherwise the remaining sum would be as small as their rounding.
    """
    return gradient * gradient.shape[-1] ** -0.5


@contextlib.contextmanager
def core_without_allocator() -> Iterator[mock.Mock]:
    """Let the core decline all calls, as without an allocator."""
    refuse = mock.Mock(return_value=None)
    methods = ("attend", "keep", "differentiate")
    with (
        mock.patch.multiple(_core.Call, **dict.fromkeys(methods, refuse)),
        mock.patch.multiple(_core, select=refuse, forget=refuse, forget_backward=refuse),
    ):
        yield refuse


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rand_bool(*shape: int, density: float = 0.5, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def simple_problem(
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 2,
    queries: int = 17,
    keys: int = 23,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    seed: int = 0,
    **settings: object,
) -> Problem:
    """Return a problem of random query, key and value."""
    value_dim = head_dim if value_dim is None else value_dim
    return Problem(
        randn(batch, queries, kv_heads * group, head_dim, dtype=dtype, seed=seed),
        randn(batch, keys, kv_heads, head_dim, dtype=dtype, seed=seed + 1),
        randn(batch, keys, kv_heads, value_dim, dtype=dtype, seed=seed + 2),
        **settings,
    )


class LargestStorage(TorchDispatchMode):
    """Records the bytes of the largest storage that an operator returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result
