# SPDX-License-Identifier: BSD-3-Clause
"""The measured problems and their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Pass = Literal["forward", "forward_backward"]
PASSES: tuple[Pass, ...] = ("forward", "forward_backward")

# Largest allowed |ours - theirs| / max |theirs|; both round each result to the dtype at least once.
AGREEMENT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
# Share of keys that a separate key mask keeps, as with a few residues or tokens of padding.
_KEPT_SHARE = 0.9


@dataclass(frozen=True)
class Case:
    """One attention problem. ``window`` is None for dense attention, which then has no bias.

    The bias is per key, as models learn it, or with ``per_query`` has a row for each query. With
    ``pair_bias`` it has such rows and no batch dimension; then there is no window, and each batch
    element has its own key mask. ``queries`` is 1 for decoding, None if there are as many as keys.
    """

    name: str
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    length: int = 4096
    window: int | None = None
    causal: bool = True
    device: str = "cpu"
    seed: int = 0
    queries: int | None = None
    per_query: bool = False
    pair_bias: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads != 0:
            raise ValueError(
                f"heads is {self.heads}; it must be a multiple of kv_heads, {self.kv_heads}"
            )

    @property
    def group(self) -> int:
        """Number of query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Number of queries."""
        return self.length if self.queries is None else self.queries

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of query, key, value and bias."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def query_bytes(self) -> int:
        """Bytes of the query tensor."""
        return self.batch * self.rows * self.heads * self.head_dim * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    """query, grad_out (B,Q,H,D); key, value (B,K,Hk,D); bias (B,Hk,{1|Q},K), None if dense.

    If the batch shares a pair bias, it is (1,H,Q,K), and ``keep`` is a boolean (B,1,1,K).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    grad_out: torch.Tensor
    keep: torch.Tensor | None = None


def make_inputs(case: Case) -> Inputs:
    """Return normal random tensors, equal for every contestant and in every process.

    Keys and biases have no structure, so that no tile of the mask is empty by chance.
    """
    generator = torch.Generator(device=case.device).manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=case.device)
        return values.to(case.torch_dtype)

    queries = (case.batch, case.rows, case.heads, case.head_dim)
    keys = (case.batch, case.length, case.kv_heads, case.head_dim)
    bias = (case.batch, case.kv_heads, case.rows if case.per_query else 1, case.length)
    if case.pair_bias:
        bias = (1, case.heads, case.rows, case.length)
    return Inputs(
        query=normal(*queries),
        key=normal(*keys),
        value=normal(*keys),
        bias=None if case.window is None and not case.pair_bias else normal(*bias),
        grad_out=normal(*queries),
        keep=_kept_keys(case, generator) if case.pair_bias else None,
    )


def _kept_keys(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Return a (B,1,1,K) mask of nine random keys in ten, always including the first."""
    drawn = torch.rand(case.batch, 1, 1, case.length, generator=generator, device=case.device)
    keep = drawn < _KEPT_SHARE
    keep[..., 0] = True
    return keep


def shape_text(case: dict[str, Any]) -> str:
    """Return a case of a results file as text, in the field's letters."""
    queries = "" if case["queries"] is None else f" Q{case['queries']}"
    window = "" if case["window"] is None else f" w{case['window']}"
    bias = ", bias per query and key" if case.get("per_query") and case["queries"] is None else ""
    bias = ", mask of keys, bias of pairs for all" if case.get("pair_bias") else bias
    return (
        f"B{case['batch']} H{case['heads']} Hk{case['kv_heads']} D{case['head_dim']}{queries} "
        f"N{case['length']}{window}, {case['dtype']}{', causal' if case['causal'] else ''}{bias}"
    )
