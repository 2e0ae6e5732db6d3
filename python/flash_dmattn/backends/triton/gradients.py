# SPDX-License-Identifier: BSD-3-Clause
"""The backward pass: kernel launches, and the sums of their partial results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_dmattn.record import Gradients

from .forward_pass import row_statistics
from .kernels.key_gradients import key_gradients_kernel
from .kernels.prepare import prepare_kernel
from .kernels.row_gradients import row_gradients_kernel
from .launch import Tiles, blocks, busy_programs, fitting, launch, row_parts, tiles_of
from .layout import plan_views
from .make_plan import ordered_keys
from .problem import KEY_BIAS, ROW_BIAS, Problem

_PREPARED_ROWS = 32


def gradients(
    problem: Problem,
    plan: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    out_rest: Tensor | None,
    lse: Tensor,
    wanted: tuple[str, ...],
) -> Gradients:
    """Return the gradients of the wanted fields."""
    inputs = problem.inputs
    if problem.rows == 0:
        return {name: torch.zeros_like(getattr(inputs, name)) for name in wanted}
    views = plan_views(problem.layout, plan)
    arguments = problem.arguments | views._asdict()
    statistics = row_statistics(problem, plan, lse.contiguous())
    outs = out.contiguous(), out_rest
    prepared = _prepare_rows(problem, dout.contiguous(), dlse, outs, *statistics)
    arguments |= prepared
    needs_dq, needs_dbias = "query" in wanted, "bias" in wanted
    is_bias_constant = needs_dbias and _is_constant_along_keys(problem)
    needs_row_dbias = needs_dbias and problem.bias_kind == ROW_BIAS and not is_bias_constant
    needs_key_dbias = needs_dbias and problem.bias_kind == KEY_BIAS and not is_bias_constant
    found: Gradients = {}
    if needs_dq or needs_row_dbias:
        found["query"], row_dbias = _row_gradients(problem, arguments, needs_dq, needs_row_dbias)
    if "key" in wanted or "value" in wanted or needs_key_dbias:
        arguments["ordered"] = ordered_keys(problem, views)
        found["key"], found["value"], key_dbias = _key_gradients(
            problem, arguments, needs_key_dbias
        )
    if needs_dbias and inputs.bias is not None:
        if is_bias_constant:
            dbias = _constant_bias_gradient(problem, dlse, lse)
        else:
            dbias = row_dbias if needs_row_dbias else key_dbias
        found["bias"] = dbias.to(inputs.bias.dtype)
    if "sink" in wanted and inputs.sink is not None:
        shares = prepared["sink_shares"].sum((0, 2) if inputs.query.dim() == 4 else 1)
        found["sink"] = shares.to(inputs.sink.dtype)
    return {name: found[name] for name in wanted}


def _prepare_rows(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    outs: tuple[Tensor, Tensor | None],
    lse: Tensor,
    row_sums: Tensor | None,
) -> dict[str, Tensor]:
    """Return query, the gradient of out, lse and delta in the form that the kernels read."""
    out, out_rest = outs
    live_q, live_dout = torch.empty_like(dout), torch.empty_like(dout)
    log2_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    has_sink = problem.inputs.sink is not None
    sink_shares = torch.empty_like(lse) if has_sink else lse.new_empty(0)
    rows = problem.batches * problem.rows * problem.heads
    launch(
        prepare_kernel,
        blocks(rows, _PREPARED_ROWS),
        problem.arguments
        | {
            "out": out,
            "out_rest": out_rest,
            "dout": dout,
            "lse": lse,
            "row_sums": row_sums,
            "total": rows,
        }
        | {"dlse": None if dlse is None else dlse.float().contiguous()}
        | {"live_q": live_q, "live_dout": live_dout, "log2_lse": log2_lse, "delta": delta}
        | {"sink_shares": sink_shares},
        HAS_DLSE=dlse is not None,
        HAS_SUMS=row_sums is not None,
        HAS_REST=out_rest is not None,
        SINK=has_sink,
        BLOCK_ROWS=_PREPARED_ROWS,
        **{name: problem.constants[name] for name in ("UNIT", "EVEN", "BLOCK_D")},
    )
    found = {"q": live_q, "dout": live_dout, "lse": log2_lse, "delta": delta}
    return found | {"sink_shares": sink_shares}


def _row_gradients(
    problem: Problem, arguments: dict[str, Any], needs_dq: bool, needs_dbias: bool
) -> tuple[Tensor, Tensor]:
    query, bias = problem.inputs.query, problem.inputs.bias
    make = query.new_empty if problem.inputs.cu_seqlens_q is None else query.new_zeros
    dquery = make(query.shape if needs_dq else 0)
    dbias = query.new_empty(0, dtype=torch.float32)
    share_batches = share_heads = 1
    strides: tuple[int, ...] = (0, 0, 0)
    if needs_dbias and bias is not None:
        dbias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        share_heads = problem.bias_share
        if bias.dim() == 4:
            share_batches = problem.sequences // max(bias.shape[0], 1)
            strides = dbias.stride()[:3]
        else:
            strides = (0, *dbias.stride()[:2])
    programs = problem.sequences // max(share_batches, 1) * (problem.heads // share_heads)
    arguments = arguments | {
        "dq": dquery,
        "dbias": dbias,
        "share_batches": share_batches,
        "share_heads": share_heads,
        "programs": programs,
        **dict(zip(("dbias_batch", "dbias_head", "dbias_row"), strides, strict=True)),
    }

    def start(tiles: Tiles) -> None:
        launch(
            row_gradients_kernel,
            programs * blocks(problem.queries, tiles.block_rows),
            arguments,
            WANT_DQ=needs_dq,
            WANT_DBIAS=needs_dbias,
            **_constants(problem, tiles),
        )

    fitting("rows", query, problem.constants["BLOCK_D"], start)
    return dquery, dbias


def _key_gradients(
    problem: Problem, arguments: dict[str, Any], needs_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = problem.inputs
    block_d = problem.constants["BLOCK_D"]
    widest = tiles_of("keys", block_d * inputs.query.itemsize)[0].block_keys
    programs = problem.sequences * problem.kv_heads
    head_parts, row_part_count = _parts(problem, programs * blocks(problem.keys, widest))
    parts = head_parts * row_part_count
    shape = inputs.key.shape
    # Keys that no row keeps are skipped: their gradients stay 0.
    if parts == 1:
        sums = [torch.zeros_like(inputs.key, memory_format=torch.contiguous_format) for _ in "kv"]
    else:
        sums = [inputs.key.new_zeros((parts, *shape), dtype=torch.float32) for _ in "kv"]
    dbias_shape = (row_part_count, problem.batches, problem.heads, problem.total_keys)
    dbias_sums = inputs.query.new_zeros(dbias_shape if needs_dbias else 0, dtype=torch.float32)
    arguments = arguments | {
        "dk": sums[0],
        "dv": sums[1],
        "dbias": dbias_sums,
        "row_parts": row_part_count,
        "part_heads": problem.heads // problem.kv_heads // head_parts,
        "programs": programs,
    }

    def start(tiles: Tiles) -> None:
        launch(
            key_gradients_kernel,
            programs * parts * blocks(problem.keys, tiles.block_keys),
            arguments,
            WANT_DBIAS=needs_dbias,
            **_constants(problem, tiles),
        )

    fitting("keys", inputs.query, block_d, start)
    if parts > 1:
        sums = [t.sum(0).to(inputs.key.dtype) for t in sums]
    if needs_dbias and inputs.bias is not None:
        dbias_sums = _sum_to_bias(dbias_sums.sum(0), inputs.bias).view(inputs.bias.shape)
    return sums[0], sums[1], dbias_sums


def _parts(problem: Problem, block_programs: int) -> tuple[int, int]:
    """Return the number of parts of a key block's work, by heads and by rows.

    Each part has its own sums, so the fewest parts that keep the device busy are best. Query heads
    with their own lists have different key blocks, and are always separate parts.
    """
    group = problem.heads // problem.kv_heads
    device = problem.inputs.query.device
    has_query_head_lists = problem.layout.list_heads > problem.kv_heads
    head_parts = group if has_query_head_lists or block_programs < busy_programs(device) else 1
    return head_parts, row_parts(block_programs * head_parts, device)


def _is_constant_along_keys(problem: Problem) -> bool:
    bias = problem.inputs.bias
    return bias is not None and bias.dim() == 4 and bias.shape[-1] == 1 and problem.keys != 1


def _constant_bias_gradient(problem: Problem, dlse: Tensor | None, lse: Tensor) -> Tensor:
    """Return the gradient of a bias that shifts all scores of a row equally.

    Such a bias changes only lse, by the same amount: the gradients of a row's scores sum to dlse.
    """
    bias = problem.inputs.bias
    assert bias is not None
    if dlse is None:
        return torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    rows = torch.where(lse == -torch.inf, 0.0, dlse.float())
    if bias.shape[2] == 1:
        rows = rows.sum(2, keepdim=True)
    return _sum_to_bias(rows, bias).view(bias.shape)


def _sum_to_bias(gradient: Tensor, bias: Tensor) -> Tensor:
    """Sum a gradient ``(B, H, ...)`` over the dimensions along which a bias is broadcast."""
    heads = bias.shape[-3]
    batch, query_heads, *rest = gradient.shape
    gradient = gradient.view(batch, heads, query_heads // heads, *rest).sum(2)
    if bias.dim() == 4 and bias.shape[0] == 1:
        gradient = gradient.sum(0)
    return gradient


def _constants(problem: Problem, tiles: Tiles) -> dict[str, Any]:
    constants = {n: v for n, v in problem.constants.items() if n != "PAGED"}
    return constants | tiles.constants
