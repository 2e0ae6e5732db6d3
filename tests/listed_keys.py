# SPDX-License-Identifier: BSD-3-Clause
"""Calls with key lists, and their expected results."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.reference import per_query_head
from support import Target, cotangent, gathered, moved

LEAVES = ("query", "key", "value", "attn_bias", "index_bias", "sink")


def expected(
    leaves: dict[str, Tensor],
    key_indices: Tensor,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a dense call by dense attention.

    Each listing of a key adds exp(index_bias) to the factor of its exponential.
    """
    query, key, value = (leaves[name].transpose(1, 2) for name in LEAVES[:3])
    heads, kv_heads, keys = query.shape[1], key.shape[1], key.shape[2]
    key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
    indices = per_query_head(key_indices, heads, kv_heads).long()
    indices = indices.expand(query.shape[0], heads, *indices.shape[2:])
    valid = (indices >= 0) & (indices < keys)
    if is_causal:
        limit = torch.arange(query.shape[2])[:, None] + keys - query.shape[2]
        valid = valid & (indices <= limit)
    factor = torch.ones(indices.shape, dtype=query.dtype)
    if "index_bias" in leaves:
        own = per_query_head(leaves["index_bias"], heads, kv_heads).expand(indices.shape)
        factor = torch.exp(own.to(query.dtype).masked_fill(~valid, 0))
    # An extra column collects invalid indices.
    place = indices.where(valid, keys)
    shape = (*indices.shape[:3], keys + 1)
    factors = torch.zeros(shape, dtype=query.dtype).scatter_add(-1, place, factor)[..., :keys]
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (query @ key.transpose(-1, -2)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    kept = factors > 0
    if "attn_bias" in leaves:
        bias = per_query_head(leaves["attn_bias"], heads, kv_heads).to(query.dtype)
        kept = kept & (bias != -torch.inf)
        scores = scores + bias
    scores = scores + factors.where(kept, 1).log()
    empty = ~kept.any(-1, keepdim=True)
    scores = scores.masked_fill(~kept, -torch.inf).masked_fill(empty, 0)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(~kept, 0)
    if "sink" in leaves:
        sink = leaves["sink"].to(lse.dtype)[:, None]
        weights = weights * torch.sigmoid(lse - sink).unsqueeze(-1)
    out = (weights @ value).masked_fill(empty, 0)
    return out.transpose(1, 2), lse.masked_fill(empty.squeeze(-1), -torch.inf)


def expected_packed(
    leaves: dict[str, Tensor],
    key_indices: Tensor,
    bounds: tuple[list[int], list[int]],
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a packed call; sequences are computed separately."""
    outs, lses = [], []
    for n in range(len(bounds[0]) - 1):
        rows, keys = (slice(b[n], b[n + 1]) for b in bounds)
        own = {"query": leaves["query"][rows], "sink": leaves.get("sink")}
        own |= {name: leaves[name][keys] for name in ("key", "value")}
        own |= {"attn_bias": t[:, :, keys] if (t := leaves.get("attn_bias")) is not None else None}
        own |= {"index_bias": t[:, rows] if (t := leaves.get("index_bias")) is not None else None}
        batched = {
            name: t if name == "sink" else t.unsqueeze(0)
            for name, t in own.items()
            if t is not None
        }
        out, lse = expected(batched, key_indices[:, rows].unsqueeze(0), **settings)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def leaves_of(
    tensors: dict[str, Tensor], device: str = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    return {n: moved(t.detach(), device, dtype).requires_grad_() for n, t in tensors.items()}


class ListedCall:
    """A random call, dense or packed."""

    def __init__(self, seed: int, target: Target, **fixed: Any) -> None:
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def choose(name: str, *values: Any) -> Any:
            drawn = draw.choice(values)
            return fixed.get(name, drawn)

        def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        dtype = choose("dtype", *target.dtypes)
        kv_heads, group = choose("kv_heads", 1, 2, 3), choose("group", 1, 2, 3, 8, 16)
        heads, head_dim = kv_heads * group, choose("head_dim", 8, 16, 20, 64)
        value_dim = fixed.get("value_dim", head_dim if seed % 4 else (head_dim * 3) // 4)
        length = choose("length", 0, 1, 3, 5, 17, 40, 64, 65, 200)
        self.packed = choose("packed", False, True)
        sizes = [(draw.randint(0, 20), draw.randint(0, 30)) for _ in range(draw.randint(1, 3))]
        sizes = fixed.get("sizes", sizes)
        if not self.packed:
            sizes = sizes[:1] * len(sizes)
        self.bounds = tuple(
            [0, *torch.tensor([s[side] for s in sizes]).cumsum(0).tolist()] for side in (0, 1)
        )
        total_q, total_k = self.bounds[0][-1], self.bounds[1][-1]
        batch, (queries, keys) = len(sizes), sizes[0]
        front_q, front_k = (
            ((total_q,), (total_k,)) if self.packed else ((batch, queries), (batch, keys))
        )
        lead, rows = ((), total_q) if self.packed else ((batch,), queries)
        self.tensors = {
            "query": randn(*front_q, heads, head_dim, dtype=dtype),
            "key": randn(*front_k, kv_heads, head_dim, dtype=dtype),
            "value": randn(*front_k, kv_heads, value_dim, dtype=dtype),
        }
        bias_heads = choose("bias_heads", None, 1, kv_heads, heads)
        if bias_heads is not None:
            bias_batch = () if self.packed else (choose("bias_batch", 1, batch),)
            bias = randn(*bias_batch, bias_heads, 1, total_k if self.packed else keys)
            dropped = torch.rand(bias.shape, generator=generator) < choose("dropped", 0.0, 0.2)
            bias = bias.masked_fill(dropped, -torch.inf)
            self.tensors["attn_bias"] = bias.to(choose("bias_dtype", dtype, torch.float32))
        index_heads = choose("index_heads", None, 1, kv_heads, heads)
        if index_heads is not None:
            own = randn(*lead, index_heads, rows, length)
            dropped = torch.rand(own.shape, generator=generator) < choose("index_dropped", 0.0, 0.2)
            own = own.masked_fill(dropped, -torch.inf)
            self.tensors["index_bias"] = own.to(choose("index_dtype", dtype, torch.float32))
        if choose("sink", False, True):
            self.tensors["sink"] = randn(heads)
        most = max([1, *(s[1] for s in sizes)])
        shape = (*lead, choose("list_heads", 1, kv_heads), rows, length)
        # Indices range from below the first key to beyond the last, with repetitions.
        self.indices = torch.randint(-2, most + 2, shape, dtype=torch.int32, generator=generator)
        far = torch.rand(shape, generator=generator)
        self.indices[far < 0.02] = 2**31 - 1
        self.indices[far > 0.98] = -(2**31)
        self.settings = {
            "softmax_scale": choose("scale", None, 0.3),
            "is_causal": choose("causal", False, True),
            "softcap": choose("softcap", 0.0, 2.0),
        }
        out_shape = (*self.tensors["query"].shape[:-1], value_dim)
        self.dout = cotangent(randn(*out_shape)).to(dtype)
        lse_shape = (heads, total_q) if self.packed else (batch, heads, queries)
        self.dlse = randn(*lse_shape) if choose("dlse", False, True) else None
        self.sizes = sizes
        self.target = target

    def call(self, leaves: dict[str, Tensor], **options: Any) -> Any:
        device = leaves["query"].device
        given = dict(leaves, key_indices=self.indices.to(device), **self.settings)
        given |= {"backend": self.target.backend, "return_lse": True} | options
        if not self.packed:
            return flash_dmattn.flash_dmattn_func(**given)
        for side, name in enumerate("qk"):
            bounds = torch.tensor(self.bounds[side], dtype=torch.int32, device=device)
            given[f"cu_seqlens_{name}"] = bounds
            given[f"max_seqlen_{name}"] = max([0, *(s[side] for s in self.sizes)])
        return flash_dmattn.flash_dmattn_varlen_func(**given)

    def got(self, **options: Any) -> dict[str, Tensor]:
        leaves = leaves_of(self.tensors, self.target.device)
        return gathered(*self.call(leaves, **options), leaves, self.dout, self.dlse)

    def want(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        leaves = leaves_of(self.tensors, "cpu", dtype)
        if self.packed:
            results = expected_packed(leaves, self.indices, self.bounds, **self.settings)
        else:
            results = expected(leaves, self.indices, **self.settings)
        return gathered(*results, leaves, self.dout, self.dlse)
