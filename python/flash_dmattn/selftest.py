# SPDX-License-Identifier: BSD-3-Clause
"""Small problems on each device on which calls compute, compared with the formula in float64.

With torch the public functions run, forward and backward, by whatever computes calls that do not
say. With NumPy alone the cpu pack is called through the core.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

__all__ = ["TOLERANCES", "Comparison", "Outcome", "run"]

# Of the largest difference, divided by the largest value of the exact result or by 1. The 16-bit
# ones are some 8 rounding steps of the dtype, since sums over keys are float32 until the end.
TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "float16": 8e-3, "bfloat16": 6e-2}

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 2, 70, 90, 4, 2, 40, 16
DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("float16", "bfloat16")}


@dataclass(frozen=True)
class Comparison:
    """One result of one problem: its largest error, and the largest that is allowed."""

    device: str
    case: str
    dtype: str
    result: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; that of a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Outcome:
    """Every comparison, and why devices were not tested."""

    comparisons: tuple[Comparison, ...]
    untested: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether something was compared, nothing was left out, and everything agreed."""
        return bool(self.comparisons) and not self.untested and not self.failures

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons whose error is too large."""
        return [comparison for comparison in self.comparisons if not comparison.passed]

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as what JSON can hold."""
        rows = [{**asdict(c), "passed": c.passed} for c in self.comparisons]
        return {"passed": self.passed, "comparisons": rows, "untested": list(self.untested)}

    def __str__(self) -> str:
        """Show one line for each problem with its worst result, and the verdict."""
        lines = ["self-test: largest error of out, lse and gradients against float64"]
        worst: dict[tuple[str, str, str], Comparison] = {}
        for row in self.comparisons:
            key = (row.device, row.dtype, row.case)
            if key not in worst or not row.error <= worst[key].error:
                worst[key] = row
        for row in worst.values():
            verdict = "ok" if row.passed else "WRONG"
            lines.append(
                f"  {row.device:7} {row.dtype:9} {row.case:16} {row.result:5} "
                f"{row.error:.1e} of {row.tolerance:.0e}  {verdict}"
            )
        lines += [f"  not tested: {reason}" for reason in self.untested]
        return "\n".join([*lines, f"self-test {'passed' if self.passed else 'FAILED'}"])


def run(served: Iterable[tuple[str, int]], pack_for: Callable[[str, int], Any]) -> Outcome:
    """Test every device, given as its kind and index; without torch, the pack of ``pack_for``.

    Whatever raises, a call would raise too, and is a reason why a device was not tested.
    """
    comparisons: list[Comparison] = []
    untested: list[str] = []
    for kind, index in served:
        device = kind if kind == "cpu" else f"{kind}:{index}"
        try:
            reason = _cannot_test(kind)
            if reason:
                untested.append(f"{device}: {reason}")
            elif importlib.util.find_spec("torch") is not None:
                comparisons += _compare_with_torch(device)
            else:
                from .selftest_numpy import compare

                comparisons += compare(pack_for(kind, index))
        except Exception as error:
            untested.append(f"{device}: {type(error).__name__}: {error}")
    if not comparisons and not untested:
        untested.append("on no device above a call computes")
    return Outcome(tuple(comparisons), tuple(untested))


def _cannot_test(kind: str) -> str:
    """Return what keeps a kind of device from being tested; "" if nothing does."""
    if importlib.util.find_spec("torch") is None:
        if kind != "cpu":
            return "needs PyTorch: python -m pip install 'flash-dmattn[torch]'"
        if importlib.util.find_spec("numpy") is None:
            return "needs PyTorch or NumPy: python -m pip install 'flash-dmattn[torch]'"
        return ""
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the device"
    return ""


def _compare_with_torch(device: str) -> Iterator[Comparison]:
    import torch

    from .interface import flash_dmattn_func
    from .reference import attention_reference

    for dtype in DTYPES["cpu" if device == "cpu" else "gpu"]:
        for case, mask, bias, causal in _cases(device):
            shapes = ((QUERIES, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
            inputs = [_random((BATCH, *s, HEAD_DIM), seed) for seed, s in enumerate(shapes)]
            if bias is not None:
                inputs.append(bias)
            leaves = [t.to(device, getattr(torch, dtype)).requires_grad_() for t in inputs]
            exact = [t.detach().double().requires_grad_() for t in leaves]
            query, key, value, leaf_bias = *leaves[:3], _last(leaves, bias)
            out, lse = cast(
                "tuple[torch.Tensor, torch.Tensor]",
                flash_dmattn_func(
                    query,
                    key,
                    value,
                    mask,
                    leaf_bias,
                    is_causal=causal,
                    return_lse=True,
                ),
            )
            query, key, value, leaf_bias = *exact[:3], _last(exact, bias)
            dout = _random(tuple(out.shape), 9).to(device, out.dtype)
            # Of a scalar: given the gradients of a tensor, torch imports sympy to compare shapes.
            found = torch.autograd.grad((out * dout).sum(), leaves)
            with _one_thread():
                wanted_out, wanted_lse = attention_reference(
                    query, key, value, mask, leaf_bias, causal=causal
                )
                wanted = torch.autograd.grad((wanted_out * dout.double()).sum(), exact)
            pairs = [("out", out, wanted_out), ("lse", lse, wanted_lse)]
            pairs += zip(("dq", "dk", "dv", "dbias"), found, wanted, strict=False)
            for name, result, expected in pairs:
                error = _relative_error(result.detach(), expected.detach())
                yield Comparison(device, case, dtype, name, error, TOLERANCES[dtype])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: in small steps, threads mostly wait for each other, and on a busy
    machine for a turn.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cases(device: str) -> Iterator[tuple[str, Any, torch.Tensor | None, bool]]:
    """Yield name, mask, bias and causality."""
    import torch

    from .masks import IntervalMask

    bias = _random((BATCH, KV_HEADS, 1, KEYS), 3)
    first_row = torch.arange(KEYS, dtype=torch.int32, device=device) - (KEYS - QUERIES)
    window = IntervalMask(
        first_row.clamp(min=0).expand(1, 1, KEYS), (first_row + WINDOW).expand(1, 1, KEYS)
    )
    keys = torch.arange(KEYS, device=device) < torch.tensor([[KEYS], [KEYS // 2]], device=device)
    rows = (_random((BATCH, HEADS, QUERIES, KEYS), 4) > 1).to(device)
    yield "no mask", None, None, False
    yield "causal", None, None, True
    yield "key mask", keys, None, False
    yield "causal window", window, None, True
    yield "boolean mask", rows, None, False
    yield "bias", None, bias, True
    yield "window and bias", window, bias, True


def _last(leaves: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else leaves[-1]


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference over the largest value, or over 1.

    Equal infinities do not differ.
    """
    found = found.double()
    difference = (found - wanted).abs().masked_fill(found == wanted, 0)
    size = wanted.masked_fill(wanted.isinf(), 0).abs().amax().clamp(min=1)
    return float(difference.amax() / size)
