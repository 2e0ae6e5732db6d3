# SPDX-License-Identifier: BSD-3-Clause
"""Attention over listed keys by Triton kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_dmattn.backends.base import lse_shape, mass_shape
from flash_dmattn.key_lists.visible_keys import bias_strides, by_head, visible_keys
from flash_dmattn.record import Gradients, KeyListInputs
from flash_dmattn.reference import softmax_shares

from ..shapes import refuse_float64_bias
from .kernels.key_lists import list_backward_kernel, list_forward_kernel, list_mass_kernel
from .launch import Tiles, blocks, fitting, launch, on_device
from .problem import UNIT, padded_head_dim

__all__ = ["backward", "forward", "key_mass"]


class _Problem(NamedTuple):
    """The arguments of the kernels for a call."""

    inputs: KeyListInputs
    rows: int
    heads: int
    group: int
    has_tile_per_head: bool  # whether each query head has its own tile
    arguments: dict[str, Any]  # by the kernels' argument names
    constants: dict[str, Any]

    def start(self, name: str, kernel: Any, arguments: dict[str, Any], **constants: Any) -> None:
        """Run a pass with the first tiles that fit the device."""
        inputs, block_d = self.inputs, self.constants["BLOCK_D"]
        max_block_rows = (
            16 if self.has_tile_per_head else max(16, 1 << (self.group - 1).bit_length())
        )

        def start(tiles: Tiles) -> None:
            tiles = tiles._replace(block_rows=min(tiles.block_rows, max_block_rows))
            heads_at_once = 1 if self.has_tile_per_head else min(self.group, tiles.block_rows)
            head_blocks = blocks(self.group, heads_at_once)
            launch(
                kernel,
                self.rows * (self.heads // self.group) * head_blocks,
                self.arguments
                | {"heads_at_once": heads_at_once, "head_blocks": head_blocks}
                | arguments,
                **tiles.constants,
                **self.constants,
                **constants,
            )

        with on_device(inputs.query.device):
            fitting(name, inputs.query, block_d, start)


def forward(inputs: KeyListInputs, out_rest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return out and lse of a checked call, and write out_rest."""
    refuse_float64_bias(inputs.without_lists(), "triton")
    problem = _describe(inputs)
    out = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
    lse = out.new_empty((problem.rows, problem.heads), dtype=torch.float32)
    sink = problem.arguments["sink"]
    rests = None if out_rest is None else out_rest.view(torch.int8)
    problem.start(
        "list_forward",
        list_forward_kernel,
        {"out": out, "out_rest": rests, "lse": lse},
        SINK=sink is not None,
        HAS_REST=rests is not None,
    )
    if inputs.packed:
        return out, lse.transpose(0, 1).contiguous()
    batch, heads, queries = lse_shape(inputs.query)
    return out, lse.view(batch, queries, heads).transpose(1, 2).contiguous()


def key_mass(inputs: KeyListInputs, lse: Tensor) -> Tensor:
    """Return the sum of each key's probabilities, added in any order. Pages are not supported."""
    refuse_float64_bias(inputs.without_lists(), "triton")
    problem = _describe(inputs)
    shape = mass_shape(inputs.without_lists())
    mass = lse.new_zeros(shape, dtype=torch.float32)
    by_row = lse.transpose(-1, -2).reshape(problem.rows, problem.heads).contiguous()
    arguments = {"lse": by_row, "mass": mass, "mass_head": shape[-1]}
    constants = {n: v for n, v in problem.constants.items() if n != "PAGED"}
    problem._replace(constants=constants).start(
        "list_mass",
        list_mass_kernel,
        arguments | {"mass_batch": problem.heads * shape[-1]},
        SINK=problem.arguments["sink"] is not None,
        PACKED=inputs.packed,
    )
    return mass


def backward(
    inputs: KeyListInputs, operands: tuple[Tensor | None, ...], wanted: tuple[str, ...]
) -> Gradients:
    """Return the gradients of the wanted fields, with row sums in any order.

    Args:
        inputs: of the call.
        operands: the gradients of out and lse, then out, lse and out_rest.
        wanted: names of fields.
    """
    dout, dlse, out, lse, out_rest = operands
    assert dout is not None
    assert out is not None
    assert lse is not None
    problem = _describe(inputs)
    shape = (problem.rows, problem.heads)
    is_empty = lse == -torch.inf
    key_share, sink_share = torch.ones_like(lse), torch.zeros_like(lse)
    if inputs.sink is not None:
        key_share, sink_share = softmax_shares(inputs.sink, lse)
    outs = out.float() if out_rest is None else _with_rest(out, out_rest)
    delta = (outs * dout.float()).sum(-1).transpose(-1, -2)  # in the layout of lse
    # With a sink, delta includes its share already, because out does.
    shift = (0.0 if dlse is None else dlse.float()) - key_share * delta
    found: Gradients = {}
    if inputs.sink is not None and "sink" in wanted:
        parts = (sink_share * delta).masked_fill(is_empty, 0)
        found["sink"] = -parts.sum(-1 if inputs.packed else (0, 2))
    by_row = {
        name: t.transpose(-1, -2).reshape(shape).contiguous()
        for name, t in {"lse": lse, "share": key_share, "shift": shift}.items()
    }
    index_bias, bias = inputs.index_bias, inputs.bias

    def zeros(name: str, like: Tensor | None) -> Tensor:
        is_wanted = like is not None and name in wanted
        size = like.shape if is_wanted and like is not None else (0,)
        return inputs.query.new_zeros(size, dtype=torch.float32)

    found |= {
        "query": torch.empty_like(inputs.query, memory_format=torch.contiguous_format),
        "key": zeros("key", inputs.key),
        "value": zeros("value", inputs.value),
        "bias": zeros("bias", bias),
        "index_bias": zeros("index_bias", problem.arguments["index_bias"]),
    }
    problem.start(
        "list_backward",
        list_backward_kernel,
        by_row
        | {"dout": dout.contiguous(), "dq": found["query"], "dk": found["key"]}
        | {"dv": found["value"], "dbias": found["bias"], "dindex_bias": found["index_bias"]},
        WANT_DK="key" in wanted,
        WANT_DV="value" in wanted,
        WANT_DBIAS=bias is not None and "bias" in wanted,
        WANT_DINDEX=index_bias is not None and "index_bias" in wanted,
        BIAS_BY_HEAD=problem.arguments["bias_share"] < problem.group,
        INDEX_BY_HEAD=problem.arguments["index_share"] < problem.group,
    )
    if index_bias is not None and not inputs.packed and "index_bias" in wanted:
        batch_and_queries = (index_bias.shape[0], index_bias.shape[2])
        found["index_bias"] = torch.unflatten(found["index_bias"], 1, batch_and_queries).transpose(
            0, 1
        )
    return {name: found[name].to(getattr(inputs, name).dtype).contiguous() for name in wanted}


def _with_rest(out: Tensor, out_rest: Tensor) -> Tensor:
    """Compute `kernels.common.with_rest`."""
    shift = 5 if out.dtype == torch.float16 else 9
    rests = out_rest.view(torch.int8).view(out.shape).int() << shift
    return (out.float().view(torch.int32) + rests).view(torch.float32)


def _describe(inputs: KeyListInputs) -> _Problem:
    heads, head_dim = inputs.query.shape[-2:]
    kv_heads, packed = inputs.key.shape[-2], inputs.packed
    group, visible = heads // kv_heads, visible_keys(inputs)
    indices = by_head(inputs.indices, packed=packed).contiguous()
    index_bias, bias, table = inputs.index_bias, inputs.bias, inputs.block_table
    if index_bias is not None:
        index_bias = by_head(index_bias, packed=packed).contiguous()
    index_share = heads if index_bias is None else heads // index_bias.shape[0]
    bias_share, bias_firsts, bias_head, bias_key = heads, None, 0, 0
    if bias is not None:
        bias_firsts, bias_head, bias_key = bias_strides(inputs, visible)
        bias_share = heads // bias.shape[-3]
        bias = bias.float().contiguous()
    unit = UNIT if head_dim % UNIT == 0 else 1
    block_d = padded_head_dim(head_dim)
    arguments: dict[str, Any] = {
        "q": inputs.query.contiguous(),
        "k": inputs.key.contiguous(),
        "v": inputs.value.contiguous(),
        "indices": indices,
        "limits": visible.limit.to(torch.int32),
        "begins": visible.begin,
        "sequences": visible.sequence,
        "table": None if table is None else table.contiguous(),
        "bias": bias,
        "bias_firsts": bias_firsts,
        "index_bias": index_bias,
        "sink": None if inputs.sink is None else inputs.sink.float().contiguous(),
        "heads": heads,
        "kv_heads": kv_heads,
        "group": group,
        "rows": indices.shape[1],
        "length": indices.shape[2],
        "head_dim": head_dim // unit,
        "list_share": kv_heads // indices.shape[0],
        "index_share": index_share,
        "bias_share": bias_share,
        "bias_head": bias_head,
        "bias_key": bias_key,
        "page": 1 if table is None else inputs.key.shape[1],
        "page_batch": 0 if table is None else table.shape[1],
        "scale": inputs.scale,
        "softcap": inputs.softcap,
    }
    constants = {
        "BIAS": bias is not None,
        "INDEX_BIAS": index_bias is not None,
        "SOFTCAP": inputs.softcap > 0,
        "PAGED": table is not None,
        "UNIT": unit,
        "EVEN": head_dim == block_d,
        "BLOCK_D": block_d,
    }
    # A key that one head of a group drops and another keeps may be non-finite. In a common tile it
    # would reach both heads.
    has_tile_per_head = min(index_share, bias_share) < group
    return _Problem(inputs, indices.shape[1], heads, group, has_tile_per_head, arguments, constants)
