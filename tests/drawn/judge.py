# SPDX-License-Identifier: BSD-3-Clause
"""The judge of results: the bound of each element, and the accuracy of plain PyTorch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .calls import Call
from .exact import EPS32, LEAST_SCORE, Part, Terms, Totals, ignored, parts, smallest, terms
from .listed_exact import widen


@dataclasses.dataclass
class Expected:
    """The expected results of a call, their bounds, and the undefined elements."""

    call: Call
    results: dict[str, Tensor]
    bounds: dict[str, Tensor]
    ignored: dict[str, Tensor]
    probabilities: list[tuple[Part, Tensor]]

    def judged(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return a result's expected values, its bounds, and its undefined elements."""
        want, bound = (self.repeated(name, of[name]) for of in (self.results, self.bounds))
        return want, bound, self.repeated(name, self.ignored[name]) > 0

    def eager_errors(self) -> dict[str, float]:
        """Return the largest error of each result of plain PyTorch in the dtype of the call."""
        errors = {}
        for name, plain in eager(self.call).items():
            want = self.results[name]
            error = (plain.double() - want).abs().nan_to_num(torch.inf)
            error = self.repeated(name, error.masked_fill(self.ignored[name] | want.isinf(), 0))
            errors[name] = error.max().item() if error.numel() else 0.0
        return errors

    def repeated(self, name: str, small: Tensor) -> Tensor:
        """Return the values of a call for each element of a result; here they are the same."""
        return small

    def check(self, got: dict[str, Tensor], *, clamps: bool | None = None) -> None:
        """Raise AssertionError with the worst element unless all are within their bounds.

        Args:
            got: what the call gave, by name.
            clamps: whether its kernels raise scores near the least float32, as those of GPUs do;
                by default whether it ran on one.
        """
        assert got.keys() == self.results.keys(), f"{list(got)} instead of {list(self.results)}"
        names, found = [], []
        for name, value in got.items():
            shape = self.shape(name)
            assert value.shape == shape, f"{name} has shape {tuple(value.shape)}"
            if value.numel() > 0:
                names.append(name)
                found.append(self._compare(name, value, clamps).summary())
        if not found:
            return
        # Wait once for all results: other processes may hold the GPU during each wait.
        rows = zip(names, torch.stack(found).tolist(), strict=True)
        far = []
        for name, (is_wrong, error, largest) in rows:
            if is_wrong:
                raise AssertionError(self._compare(name, got[name], clamps).describe(name))
            floor = self.floor(name, largest)
            if error > floor:
                far.append((name, error, floor))
        if far:
            self._compare_with_eager(far)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a result."""
        return self.results[name].shape

    def _compare(self, name: str, value: Tensor, clamps: bool | None) -> Comparison:
        want, bound, ignored = self.judged(name)
        counts = ~ignored
        infinite = want.isinf()
        is_raised = value.is_cuda if clamps is None else clamps
        most = torch.finfo(value.dtype).max
        value = value.to(want.device).double()
        # Values beyond the dtype's range are infinite.
        overflows = value.isinf() & (want.abs() + bound > most) & (value.sign() == want.sign())
        value = torch.where(overflows, want, value)
        if name == "lse" and is_raised:
            want, value = _raised(want), _raised(value)
        wrong = infinite & (value != want)
        error = (value - want).masked_fill(infinite, 0).abs().masked_fill(~counts, 0)
        # Not ">": a NaN error must count as wrong.
        wrong = counts & (wrong | ~(error <= bound))
        return Comparison(value, want, bound, error, wrong, counts & ~infinite)

    def floor(self, name: str, largest: float) -> float:
        """Return the allowed error of small problems, in which the formula may round luckily.

        It is 4 units in the last place of the dtype (for gradients that of out, which the backward
        pass reads), and 64 of float32, relative to the largest value or to 1.
        """
        eps = EPS32 if name in ("lse", "mass") else torch.finfo(self.call.query.dtype).eps
        if name == "mass":  # kernels compute it from lse, which has only float32 precision
            lse = self.results["lse"]
            finite = lse[~lse.isinf()].abs()
            largest *= max(1.0, finite.max().item() if len(finite) else 0.0)
        return (4 * eps + 64 * EPS32) * max(1.0, largest)

    def _compare_with_eager(self, far: list[tuple[str, float, float]]) -> None:
        errors = self.eager_errors()
        for name, error, floor in far:
            assert error <= 2 * errors[name] + floor, (
                f"{name}: error {error:.3g} above twice the eager {errors[name]:.3g} plus "
                f"{floor:.3g}"
            )


def _raised(lse: Tensor) -> Tensor:
    """Return lse clamped to the least base-2 score; -inf stays."""
    return torch.where(lse.isinf(), lse, lse.clamp(min=LEAST_SCORE))


class Comparison(NamedTuple):
    """A result and its expected values."""

    value: Tensor
    want: Tensor
    bound: Tensor
    error: Tensor
    wrong: Tensor
    known: Tensor

    def summary(self) -> Tensor:
        """Return whether an element is wrong, the largest error, and the largest value."""
        largest = self.want.masked_fill(~self.known, 0).abs().max()
        return torch.stack([self.wrong.any().double(), self.error.max(), largest])

    def describe(self, name: str) -> str:
        """Return a line about the wrong elements."""
        first = tuple(self.wrong.nonzero()[0].tolist())
        value, want, bound = (t[first].item() for t in (self.value, self.want, self.bound))
        return (
            f"{name}: {int(self.wrong.sum())} of {self.wrong.numel()} elements are wrong, the "
            f"first at {first}: {value:.6g} instead of {want:.6g}, allowed {bound:.3g}; largest "
            f"error {self.error.max().item():.3g}"
        )


def expected(call: Call) -> Expected:
    """Compute a call in float64 on its own device, and the bounds for its dtype."""
    results, bounds, skipped, added = (Totals(call) for _ in range(4))
    dtype = call.query.dtype
    probabilities = []
    for part in parts(call):
        exact, errors, p = terms(part, call.softcap, dtype)
        results.add(part, exact)
        bounds.add(part, errors)
        if call.indices is not None:
            added.add(part, Terms(*(error.ne(0).double() for error in errors)))
        skipped.add(part, ignored(part, exact.lse))
        probabilities.append((part, p))
    if call.indices is not None:
        widen(bounds.sums, added.sums, dtype)
    least = smallest(dtype)
    # Without any term, as for a dropped key's gradient, the result must be exactly 0.
    allowed = {name: bound + least * (bound > 0) for name, bound in bounds.sums.items()}
    return Expected(
        call,
        results.sums,
        allowed,
        {name: count > 0 for name, count in skipped.sums.items()},
        probabilities,
    )


def eager(call: Call) -> dict[str, Tensor]:
    """Return the results of the same formula by PyTorch operations in the inputs' dtype."""
    dtype = call.query.dtype
    totals = Totals(call)
    for part in parts(call):
        leaves = [t.to(dtype).requires_grad_() for t in (part.query, part.key, part.value)]
        query, key, value = leaves
        kept = part.kept
        bias = torch.zeros_like(kept, dtype=torch.float64) if part.bias is None else part.bias
        bias_dtype = dtype if call.bias is None else call.bias.dtype
        leaves.append(bias.to(bias_dtype).requires_grad_())
        sink = torch.full(kept.shape[1:2], -torch.inf) if part.sink is None else part.sink
        sink_dtype = dtype if call.sink is None else call.sink.dtype
        leaves.append(sink.to(kept.device, sink_dtype).requires_grad_())
        scores = (query @ key.transpose(-1, -2)) * part.scale
        if call.softcap > 0:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = (scores + leaves[3]).to(dtype)
        empty = ~kept.any(-1, keepdim=True)
        scores = scores.masked_fill(~kept, -torch.inf).masked_fill(empty, 0)
        sinks = leaves[4].to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].masked_fill(~kept, 0)
        lse = torch.logsumexp(scores, -1).masked_fill(empty.squeeze(-1), -torch.inf)
        out = p @ value
        gradients = torch.autograd.grad(
            (out, lse), leaves, (part.dout.to(dtype), part.dlse.to(dtype))
        )
        # Sums over the rows that list a key are float32, like those of a matrix product.
        wide = torch.float64 if call.indices is None else torch.float32
        found = (t.detach().to(wide) for t in (out, lse, *gradients, p.float().sum(2)))
        totals.add(part, Terms(*found))
    return {
        name: total if name in ("lse", "mass") else total.to(dtype)
        for name, total in totals.sums.items()
    }
