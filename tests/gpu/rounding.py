# SPDX-License-Identifier: BSD-3-Clause
"""How far 16-bit results may be from exact ones, element by element, derived from their rounding.

A kernel rounds the probabilities P and the gradients of scores dS to the dtype before it multiplies
them by V, dO, K and Q, reads an out that is rounded, and rounds its results; everything else is
float32. So an error is at most about the dtype's eps times the sum of the absolute values of the
terms, however much of them cancels; twice that is allowed. The log-sum-exp has no such rounding: a
single key too many or too few among hundreds is far more than its error.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from drawn.calls import Call
from flash_dmattn import IntervalMask, dynamic_mask
from flash_dmattn.reference import Sequence, attend, computing_inputs, sequences

ALLOWED = 2.0
# Of scores up to about 10, which are float32 sums over the head dimension.
LSE_TOLERANCE = 64 * torch.finfo(torch.float32).eps


@dataclasses.dataclass
class Expected:
    """What a call should give, and by how much each element may differ."""

    results: dict[str, Tensor]
    bounds: dict[str, Tensor]

    def check(self, got: dict[str, Tensor], times: float = 1.0) -> None:
        assert got.keys() == self.results.keys()
        for name, value in got.items():
            want = self.results[name].double()
            value = value.to(want.device).double()
            bound = times * self.bounds[name].to(want.device)
            assert value.shape == want.shape, name
            infinite = want.isinf()
            assert torch.equal(value[infinite], want[infinite]), f"{name}: infinities differ"
            error = (value - want).abs().masked_fill(infinite, 0)
            # Not ">": that of a NaN is false.
            wrong = ~(error <= bound)
            if wrong.any():
                place = tuple(wrong.nonzero()[0].tolist())
                raise AssertionError(
                    f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first "
                    f"at {place}: {value[place].item():.6g} instead of {want[place].item():.6g}, "
                    f"allowed {bound[place].item():.3g}; largest error {error.max().item():.3g}"
                )


def expected(call: Call, backend: str = "cpu") -> Expected:
    """Compute a call in float32, by the cpu pack unless told otherwise, and its bounds."""
    exact = call.to("cpu" if backend == "cpu" else call.query.device.type, torch.float32)
    return Expected(exact.results(backend=backend), bounds(call, exact))


def bounds(call: Call, exact: Call) -> dict[str, Tensor]:
    """Return the bounds of a call, whose float32 form is exact, in the shapes of its results."""
    eps = torch.finfo(call.query.dtype).eps
    # Half the spacing of subnormal float16 numbers, which small P and dS are rounded to.
    tiny = torch.finfo(call.query.dtype).smallest_normal * eps
    total = Totals(exact)
    for part in total.parts():
        query, key, value, _, _ = computing_inputs(part, exact.causal)
        attended = attend(part, part.query.shape[-1] ** -0.5, exact.causal, exact.softcap)
        p = attended.probabilities
        dout, dlse = total.cotangents(part)
        # The error of an out that cancels is that of the sum of its terms, rounded independently.
        out = attended.out.abs() + (p.square() @ value.square()).sqrt()
        delta = (dout.abs() * out).sum(-1) + dlse.abs()
        ds = p * ((dout @ value.transpose(-1, -2)).abs() + delta.unsqueeze(-1))
        kept = (p > 0) * tiny
        p_error, ds_error = ALLOWED * eps * p + kept, ALLOWED * eps * ds + kept
        ds_scaled = query.shape[-1] ** -0.5 * ds_error
        total.add(
            part,
            p_error @ value.abs(),
            attended.lse.isfinite() * LSE_TOLERANCE * attended.lse.abs().clamp(min=1),
            ds_scaled @ key.abs(),
            ds_scaled.transpose(-1, -2) @ query.abs(),
            p_error.transpose(-1, -2) @ dout.abs(),
            ds_error,
        )
    return {name: bound.nan_to_num(nan=0) + tiny for name, bound in total.sums.items()}


class Totals:
    """Sums of the parts of a call, which is one dense problem or one for each packed sequence."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.packed = call.cu_seqlens_q is not None
        rows = call.query.shape[:-1]
        lse_shape = (rows[1], rows[0]) if self.packed else (rows[0], rows[2], rows[1])
        self.sums = {"out": torch.zeros_like(call.query), "lse": call.query.new_zeros(lse_shape)}
        if call.block_table is None:
            for name in ("query", "key", "value", "bias"):
                tensor = getattr(call, name)
                if tensor is not None:
                    self.sums[f"d{name}"] = torch.zeros(tensor.shape, device=tensor.device)

    def parts(self):
        call = self.call
        return sequences(
            call.query,
            call.key,
            call.value,
            selected(call),
            call.bias,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.block_table,
        )

    def cotangents(self, part: Sequence) -> tuple[Tensor, Tensor]:
        """Return those of out (B, H, Q, D) and lse (B, H, Q)."""
        if self.packed:
            rows = part.rows
            return self.call.dout[rows].transpose(0, 1)[None], self.call.dlse[None, :, rows]
        return self.call.dout.transpose(1, 2), self.call.dlse

    def add(
        self,
        part: Sequence,
        out: Tensor,
        lse: Tensor,
        dquery: Tensor,
        dkey: Tensor,
        dvalue: Tensor,
        dbias: Tensor,
    ) -> None:
        """Add what a part gives, all with the dimensions (B, H, rows, ...) of query heads."""
        kv_heads = part.key.shape[2]
        rows, keys = part.rows, part.keys
        self._place("out", rows, out.transpose(1, 2))
        lse_rows = self.sums["lse"][:, rows] if self.packed else self.sums["lse"]
        lse_rows += lse[0] if self.packed else lse
        if "dquery" not in self.sums:
            return
        self._place("dquery", rows, dquery.transpose(1, 2))
        for name, gradient in (("dkey", dkey), ("dvalue", dvalue)):
            self._place(name, keys, summed(gradient, (-1, kv_heads, -1, -1)).transpose(1, 2))
        if "dbias" not in self.sums:
            return
        place = self.sums["dbias"]
        if self.packed:
            per_key = place.shape[1] == 1
            place = place[:, :, keys] if per_key else place[:, rows, : keys.stop - keys.start]
            place += summed(dbias, (1, *place.shape[:1], 1 if per_key else -1, -1))[0]
        else:
            place += summed(dbias, tuple(place.shape))

    def _place(self, name: str, where: slice, value: Tensor) -> None:
        if self.packed:
            self.sums[name][where] += value[0]
        else:
            self.sums[name] += value


def summed(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Sum (B, H, ., .) to sizes of 1, and over the heads of each group; -1 keeps a dimension."""
    heads = sizes[1]
    if 1 < heads < tensor.shape[1]:
        tensor = tensor.unflatten(1, (heads, -1)).sum(2)
    for dimension, size in enumerate(sizes):
        if size == 1:
            tensor = tensor.sum(dimension, keepdim=True)
    return tensor


def selected(call: Call) -> Tensor | IntervalMask | None:
    """Return the mask of a call, which its window may choose."""
    if call.window is None:
        return call.mask
    sizes = (
        {
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_k": call.cu_seqlens_k,
            "max_seqlen_q": call.longest[0],
            "max_seqlen_k": call.longest[1],
        }
        if call.cu_seqlens_q is not None
        else {"query_length": call.query.shape[1], "key_length": call.key.shape[1]}
    )
    return dynamic_mask(
        call.bias,
        call.window,
        call.causal,
        call.mask,
        num_heads=call.query.shape[-2],
        num_kv_heads=call.key.shape[-2],
        backend="reference",
        **sizes,
    )
