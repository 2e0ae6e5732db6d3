# SPDX-License-Identifier: BSD-3-Clause
"""The expected results of a call in float64, and the error bound of each element.

A kernel rounds the probabilities P and the score gradients dS to the dtype before it multiplies
them by V, dO, K and Q. It reads a rounded out, and rounds its results. Everything else is float32.
So an error is at most about the dtype's eps times the sum of the absolute values of the terms, even
if they cancel; twice that is allowed. The float32 error of scores is added, which matters for large
scores. lse has only that error: one key too many or too few among hundreds exceeds it by far.

The formula and its gradients are written out. It shares with flash_dmattn.reference only the split
of a call into dense problems, so it also judges the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash_dmattn.reference import Sequence, per_query_head, sequences

from . import listed_exact
from .calls import Call
from .listed_rows import Rows
from .parts import Part, Terms
from .source import truth_of

ALLOWED = 2.0
EPS32 = torch.finfo(torch.float32).eps
# Error of a float32 sum over a head dimension, or over keys in any order.
FLOAT32_SUM = 8 * EPS32
LSE_TOLERANCE = 64 * EPS32
# Absolute error of the kernels' tanh.
TANH_ERROR = 4e-7
# Above this, lse has no digits for a sum of exponentials: such rows may lack a gradient.
LARGEST_LSE = 1e30
# A sink that exceeds the row's sum over keys by this factor may count as the whole sum.
MOST_SINK = 2.0**63
# GPU packs clamp a bias to about this value: a lower one is -inf as a base-2 score.
LEAST_SCORE = -2.3e38


def parts(call: Call) -> Iterator[Part]:
    """Split a call into dense problems."""
    if call.indices is not None:
        yield from listed_exact.parts(call)
        return
    for part in sequences(call.inputs(truth_of(call.mask))):
        heads = part.query.shape[2]
        group = heads // part.key.shape[2]
        query, key, value = (t.double().transpose(1, 2) for t in (part.query, part.key, part.value))
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        kept = kept_pairs(call, part)
        empty, dropped = ~kept.any(3).unsqueeze(-1), ~kept.any(2).unsqueeze(-1)
        query = query.masked_fill(empty, 0)
        key, value = key.masked_fill(dropped, 0), value.masked_fill(dropped, 0)
        spoiled = torch.zeros(kept.shape[:2], dtype=torch.bool, device=kept.device)
        for tensor in (query, key, value):
            spoiled |= ~tensor.isfinite().all(3).all(2)
        query, key, value = (t.nan_to_num(0, 0, 0) for t in (query, key, value))
        bias = None
        if part.bias is not None:
            bias = per_query_head(part.bias.detach(), heads, part.key.shape[2]).double()
            bias = torch.where(kept, bias, 0.0)
        if call.cu_seqlens_q is None:
            dout, dlse = call.dout.transpose(1, 2), call.dlse
        else:
            dout = call.dout[part.rows].transpose(0, 1)[None]
            dlse = call.dlse[None, :, part.rows]
        dout = dout.double() if "out" in call.of else torch.zeros_like(dout, dtype=torch.float64)
        dlse = dlse.double() if "lse" in call.of else torch.zeros_like(query[..., 0])
        dout, dlse = dout.masked_fill(empty, 0), dlse.masked_fill(empty.squeeze(-1), 0)
        scale = part.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        sink = None if call.sink is None else call.sink.detach().double()
        yield Part(part, query, key, value, bias, kept, spoiled, dout, dlse, scale, sink)


def visible_pairs(call: Call, part: Sequence) -> Tensor:
    """Return bool (B, H, Q, K): the pairs that mask and causality allow."""
    (batch, queries, heads, _), (_, keys, kv_heads, _) = part.query.shape, part.key.shape
    shape = (batch, heads, queries, keys)
    kept = torch.ones(shape, dtype=torch.bool, device=part.query.device)
    if call.causal:
        kept = kept.tril(keys - queries)
    if part.mask is not None:
        kept = kept & per_query_head(part.mask, heads, kv_heads)
    return kept


def kept_pairs(call: Call, part: Sequence) -> Tensor:
    """Return bool (B, H, Q, K): the visible pairs with a bias above -inf that are selected."""
    kept = visible_pairs(call, part)
    number = kept.cumsum(-1)
    by_place = kept & (number <= call.keep_first)
    if call.keep_last > 0 and kept.numel() > 0:
        by_place |= kept & (number > number[..., -1:] - call.keep_last)
    if part.bias is None:
        return kept if call.window is None else by_place
    bias = per_query_head(part.bias.detach(), part.query.shape[2], part.key.shape[2])
    bias = bias.float().expand(kept.shape)
    kept = kept & (bias != -torch.inf)
    if call.window is None or kept.numel() == 0:
        return kept
    kept = kept & ~bias.isnan()
    ranked = kept & ~by_place
    # The sort is stable, so that ties go to the lower index.
    order = bias.masked_fill(~ranked, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    candidates = ranked.gather(-1, order)
    first = candidates & (candidates.cumsum(-1) <= call.window)
    return (kept & by_place) | torch.zeros_like(kept).scatter_(-1, order, first)


def terms(part: Part, softcap: float, dtype: torch.dtype) -> tuple[Terms, Terms, Tensor]:
    """Return the results of a part, their error bounds, and the probabilities."""
    query, key, value, kept, dout = part.query, part.key, part.value, part.kept, part.dout
    empty = ~kept.any(-1)
    scores = part.scale * (query @ key.transpose(-1, -2))
    error = FLOAT32_SUM * abs(part.scale) * (query.abs() @ key.abs().transpose(-1, -2))
    slope, slope_error = torch.ones((), device=scores.device), 0.0
    if softcap > 0:
        capped = torch.tanh(scores / softcap)
        slope = 1 - capped.square()
        slope_error = TANH_ERROR + 2 * slope * error / softcap
        scores, error = softcap * capped, error * slope + softcap * TANH_ERROR
    if part.bias is not None:
        scores = scores + part.bias
        error = error + 2 * EPS32 * part.bias.abs()
    error = (error + 2 * EPS32 * scores.abs()).masked_fill(~kept, 0)
    scores = scores.masked_fill(~kept, -torch.inf).masked_fill(empty.unsqueeze(-1), 0)
    of_keys = torch.softmax(scores, -1).masked_fill(~kept, 0)
    lse = torch.logsumexp(scores, -1)
    p, sink_p, sink_error = of_keys, torch.zeros_like(lse), torch.zeros_like(lse)
    if part.sink is not None:
        margin = part.sink.unsqueeze(-1) - lse.masked_fill(empty, 0)
        p, sink_p = of_keys * torch.sigmoid(-margin).unsqueeze(-1), torch.sigmoid(margin)
        # The error of the margin scales the smaller of the two shares.
        size = part.sink.abs().unsqueeze(-1) + lse.abs() + margin.abs()
        sink_error = (4 * EPS32 * size).nan_to_num(0, 0, 0)
    lse = lse.masked_fill(empty, -torch.inf)
    finite = lse.masked_fill(empty, 0).abs()
    lse_error = (of_keys * error).sum(-1) + 4 * EPS32 * (1 + finite)
    relative = error + (lse_error + sink_error).unsqueeze(-1)
    eps, tiny = unit(dtype), smallest(dtype)

    out = p @ value
    dp = dout @ value.transpose(-1, -2)
    delta = (dout * out).sum(-1)
    from_lse = of_keys * part.dlse.unsqueeze(-1)
    ds = p * (dp - delta.unsqueeze(-1)) + from_lse
    capped_ds = ds * slope
    exact = Terms(
        out,
        lse,
        part.scale * (capped_ds @ key),
        part.scale * (capped_ds.transpose(-1, -2) @ query),
        p.transpose(-1, -2) @ dout,
        ds,
        -(sink_p * delta).sum((0, 2)),
        p.sum(2),
    )

    least = kept * tiny
    # No product reads the mass, so its P is never rounded to the dtype.
    mass_error = p * (ALLOWED * unit(torch.float32) + relative) + least + of_keys / MOST_SINK
    p_error = p * (ALLOWED * eps + relative) + least
    if part.sink is not None:
        p_error = p_error + of_keys / MOST_SINK
    # If out cancels, its error is that of the sum of its independently rounded terms.
    rounded = eps * (out.abs() + (p.square() @ value.square()).sqrt())
    rounded = rounded + (p * relative) @ value.abs()
    delta_error = (dout.abs() * rounded).sum(-1)
    dp_abs = dout.abs() @ value.abs().transpose(-1, -2)
    if part.sink is not None:
        least = least + of_keys * dp_abs / MOST_SINK
        # A sink may flush small probabilities to 0. A score then loses its gradient from lse, which
        # does not count the sink.
        flushed = smallest(torch.float32) * MOST_SINK
        least = least + kept * flushed * part.dlse.abs().unsqueeze(-1)
    ds_error = (
        ALLOWED * (eps * ds.abs() + p * delta_error.unsqueeze(-1) + eps * from_lse.abs())
        + ALLOWED * eps * p * dp.abs()
        + p * FLOAT32_SUM * dp_abs
        + ds.abs() * relative
        + least
    )
    capped_error = ds_error * slope + ds.abs() * slope_error + least
    scaled = abs(part.scale) * capped_error
    bounds = Terms(
        p_error @ value.abs(),
        torch.maximum(LSE_TOLERANCE * finite.clamp(min=1), 2 * lse_error) * ~empty,
        scaled @ key.abs(),
        scaled.transpose(-1, -2) @ query.abs(),
        p_error.transpose(-1, -2) @ dout.abs(),
        ds_error,
        (
            sink_p * (ALLOWED * delta_error + FLOAT32_SUM * (p * dp_abs).sum(-1))
            + sink_p * delta.abs() * (FLOAT32_SUM + sink_error + lse_error)
            + (of_keys * dp_abs).sum(-1) / MOST_SINK
        ).sum((0, 2))
        + subnormal_error(dtype, sink_p.unsqueeze(-1) * dout, out),
        mass_error.sum(2),
    )
    return exact, bounds, p


def unit(dtype: torch.dtype) -> float:
    """Return the rounding unit of P and dS; for float32, the error of a sum of many terms."""
    return 16 * EPS32 if dtype == torch.float32 else torch.finfo(dtype).eps


def subnormal_error(dtype: torch.dtype, factor: Tensor, rounded: Tensor) -> Tensor:
    """Return for each head the error of products whose ``rounded`` operand is subnormal.

    The errors are independent. A sink may leave only subnormal values in out.
    """
    info = torch.finfo(dtype)
    is_subnormal = rounded.abs() < info.smallest_normal
    step = info.smallest_normal * info.eps
    return 2 * step * (factor * is_subnormal).square().sum((0, 2, 3)).sqrt()


def smallest(dtype: torch.dtype) -> float:
    """Return the error of small P and dS: one subnormal unit in float16, flushing to 0 elsewhere.

    P is relative to a maximum that may be 2^8 too large, and its exponential may be flushed to 0.
    """
    limits = torch.finfo(dtype)
    return limits.smallest_normal * (limits.eps if dtype == torch.float16 else 512)


def ignored(part: Part, lse: Tensor) -> Terms:
    """Return 1 for undefined elements: of heads that keep NaN or whose lse has no digits."""
    spoiled = part.spoiled.double()
    vague = (lse.abs() > LARGEST_LSE) & (lse != -torch.inf)
    no_gradient = (part.spoiled | vague.any(-1)).double()
    queries, keys = part.kept.shape[2:]

    def spread(flags: Tensor, *sizes: int) -> Tensor:
        return flags[(...,) + (None,) * len(sizes)].expand(*flags.shape, *sizes)

    return Terms(
        spread(spoiled, queries, part.value.shape[3]),
        spread(spoiled, queries),
        spread(no_gradient, queries, part.query.shape[3]),
        spread(no_gradient, keys, part.key.shape[3]),
        spread(no_gradient, keys, part.value.shape[3]),
        spread(no_gradient, queries, keys),
        no_gradient.amax(0),
        spread(no_gradient, keys),
    )


def mass_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the key mass."""
    heads, keys = call.query.shape[-2], call.key.shape[-3]
    return (heads, keys) if call.cu_seqlens_q is not None else (call.query.shape[0], heads, keys)


class Totals:
    """Sums of the terms of the parts of a call, in the shapes of its results."""

    def __init__(self, call: Call) -> None:
        self.call, self.packed = call, call.cu_seqlens_q is not None
        device, rows = call.query.device, call.query.shape[:-1]
        lse_shape = (rows[1], rows[0]) if self.packed else (rows[0], rows[2], rows[1])
        shapes = {"out": (*rows, call.value.shape[-1]), "lse": lse_shape}
        if call.key_mass:
            shapes["mass"] = mass_shape(call)
        if call.block_table is None:
            for name in call.wanted:
                tensor = getattr(call, name)
                if tensor is not None:
                    shapes[f"d{name}"] = tensor.shape
        self.sums = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }

    def add(self, part: Part, some: Terms) -> None:
        sequence = part.sequence
        if isinstance(sequence, Rows):
            listed_exact.add(self.sums, self.call, part, some)
            return
        kv_heads = sequence.key.shape[2]
        lse = self.sums["lse"][:, sequence.rows] if self.packed else self.sums["lse"]
        lse += some.lse[0] if self.packed else some.lse
        if "mass" in self.sums and self.packed:
            self.sums["mass"][:, sequence.keys] += some.mass[0]
        elif "mass" in self.sums:
            self.sums["mass"] += some.mass
        for name, tensor, where in (
            ("out", some.out, sequence.rows),
            ("dquery", some.dquery, sequence.rows),
            ("dkey", some.dkey, sequence.keys),
            ("dvalue", some.dvalue, sequence.keys),
        ):
            if name not in self.sums:
                continue
            if name in ("dkey", "dvalue"):
                tensor = summed(tensor, (-1, kv_heads, -1, -1))
            tensor = tensor.transpose(1, 2)
            if self.packed:
                self.sums[name][where] += tensor[0]
            else:
                self.sums[name] += tensor
        if "dsink" in self.sums:
            self.sums["dsink"] += some.dsink
        if "dbias" in self.sums and sequence.bias is not None:
            place, bias = self.sums["dbias"], sequence.bias
            if not self.packed:
                place += summed(some.dbias, tuple(bias.shape)).view(place.shape)
                return
            per_key = place.shape[1] == 1
            keys = sequence.keys
            place = (
                place[:, :, keys] if per_key else place[:, sequence.rows, : keys.stop - keys.start]
            )
            place += summed(some.dbias, (1, place.shape[0], 1 if per_key else -1, -1))[0]


def summed(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Sum (B, H, ., .) to sizes of 1 and over the heads of each group; -1 keeps a dimension."""
    heads = sizes[1]
    if 1 < heads < tensor.shape[1]:
        tensor = tensor.unflatten(1, (heads, -1)).sum(2)
    for dimension, size in enumerate(sizes):
        if size == 1:
            tensor = tensor.sum(dimension, keepdim=True)
    return tensor
