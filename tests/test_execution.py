# SPDX-License-Identifier: BSD-3-Clause
"""Execution of calls: threads, determinism, fork, SIMD levels, large offsets, fallback, memory."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flash_dmattn import IntervalMask, backends, dynamic_mask, flash_dmattn_func, loader
from support import Target, check, core_without_allocator, rand_bool, randn, simple_problem

CPU = Target("cpu", "cpu")


@pytest.fixture
def _restored_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_restored_threads")
@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals"])
def test_any_number_of_threads(kind: str) -> None:
    # Small calls use one thread, since waking another would take longer.
    problem = simple_problem(queries=550, keys=540, head_dim=64, causal=True)
    problem.bias = randn(1, 2, 1, 540)
    if kind == "keys":
        problem.mask = rand_bool(2, 1, 1, 540)
    elif kind == "rows":
        problem.mask = rand_bool(1, 4, 550, 540)
    elif kind == "intervals":
        problem.mask = dynamic_mask(problem.bias, 120, True, query_length=550)
    dout = randn(*problem.query.shape)
    torch.set_num_threads(1)
    want = problem.results(CPU, dout=dout)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        for name, value in problem.results(CPU, dout=dout).items():
            torch.testing.assert_close(value, want[name], atol=1e-5, rtol=1e-5, msg=name)


def test_calls_from_several_threads(pack_target: Target) -> None:
    problems = [
        simple_problem(pack_target.dtypes[0], queries=40 + n, keys=60, seed=n, causal=True)
        for n in range(6)
    ]
    douts = [randn(*p.query.shape) for p in problems]

    def run(n: int):
        return problems[n].results(pack_target, dout=douts[n])

    alone = [run(n) for n in range(6)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, together in zip([*range(6)] * 4, pool.map(run, [*range(6)] * 4), strict=True):
            for name, value in together.items():
                torch.testing.assert_close(value, alone[n][name])


@pytest.mark.usefixtures("_restored_threads")
@pytest.mark.parametrize("kind", ["none", "keys", "rows", "intervals"])
def test_deterministic_calls_repeat_bit_for_bit(kind: str, pack_target: Target) -> None:
    torch.set_num_threads(3)
    problem = simple_problem(
        pack_target.dtypes[-1], queries=400, keys=380, head_dim=64, causal=True
    )
    problem.bias = randn(1, 1, 1, 380)
    if kind == "keys":
        problem.mask = rand_bool(1, 1, 1, 380)
    elif kind == "rows":
        problem.mask = rand_bool(1, 1, 400, 380)
    elif kind == "intervals":
        problem.mask = IntervalMask.sliding_window(50, 0, 400, 380)
    dout = randn(*problem.query.shape)
    first = problem.results(pack_target, dout=dout, deterministic=True)
    for _ in range(5):
        again = problem.results(pack_target, dout=dout, deterministic=True)
        for name, value in first.items():
            assert torch.equal(again[name], value), name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_works_after_fork() -> None:
    """The child of a process whose thread pool has run can call, as DataLoader workers do.

    The child has none of its parent's threads, and starts as many of its own.
    """
    script = (
        "import os, sys, torch, flash_dmattn\n"
        "def count():\n"
        "    return len(os.listdir('/proc/self/task')) if sys.platform == 'linux' else 0\n"
        "torch.set_num_threads(3)\n"
        "x = torch.randn(1, 600, 4, 32)\n"
        "before = count()\n"
        "want = flash_dmattn.flash_dmattn_func(x, x, x, backend='cpu')\n"
        "helpers = count() - before\n"
        "assert helpers == (2 if sys.platform == 'linux' else 0), helpers\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    before = count()\n"
        "    got = flash_dmattn.flash_dmattn_func(x, x, x, backend='cpu')\n"
        "    started = count() - before\n"
        "    os._exit(1 if not torch.equal(got, want) else 2 if started != helpers else 0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert torch.equal(flash_dmattn.flash_dmattn_func(x, x, x, backend='cpu'), want)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def narrower_levels() -> list[str]:
    """Return the SIMD levels below the machine's; no other test runs at them."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    levels = {"avx2": " avx2", "avx512": " avx512f"}
    return ["baseline", *(level for level, flag in levels.items() if flag in flags)][:-1]


@pytest.mark.parametrize("level", narrower_levels())
def test_narrower_simd_levels(level: str) -> None:
    """Drawn calls cover all masks, forms, dtypes, head dimensions and selections."""
    tests = Path(__file__).parent
    paths = [str(tests), str(tests.parent / "scripts"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "drawn", "--seed", "20000", "--cases", "200"],
        env={
            **os.environ,
            "FLASH_DMATTN_CPU_SIMD": level,
            "PYTHONPATH": os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "200 right" in done.stdout


def available_memory() -> int:
    try:
        with Path("/proc/meminfo").open() as lines:
            values = dict(line.split(":") for line in lines)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0


@pytest.mark.skipif(available_memory() < 8 << 30, reason="needs address space of 5 GB and more")
def test_offsets_beyond_two_to_the_31() -> None:
    """Rows are 2^30 elements apart; almost no page of the memory is touched."""
    step = (1 << 30) + 64
    base = torch.empty(4 * step, dtype=torch.float16)
    problem = simple_problem(torch.float16, batch=1, queries=4, keys=4, kv_heads=1, group=1)
    far = base.as_strided((1, 4, 1, 16), (0, step, 16, 1))
    near = {"query": problem.query, "key": problem.key, "value": problem.value}
    dout = randn(1, 4, 1, 16, dtype=torch.float16)
    want = problem.results(CPU, dout=dout)
    for name, tensor in near.items():
        far.copy_(tensor)
        tensors = {**near, name: far}
        leaves = {n: t.detach().requires_grad_(n != name) for n, t in tensors.items()}
        out = flash_dmattn_func(**leaves, backend="cpu")
        assert torch.equal(out, want["out"])
        out.backward(dout)
        for other in near.keys() - {name}:
            assert torch.equal(leaves[other].grad, want[f"d{other}"])


@pytest.mark.usefixtures("with_fallbacks")
def test_no_pack_means_the_reference_with_a_warning_or_an_error(
    monkeypatch: pytest.MonkeyPatch, make_loader: Callable[..., loader.Loader]
) -> None:
    make_loader(directories=list)
    x = torch.randn(1, 3, 1, 8, requires_grad=True)
    with pytest.warns(RuntimeWarning, match=r"plain PyTorch(.|\n)*no kernel pack serves") as caught:
        flash_dmattn_func(x, x, x)
    assert [warning.filename for warning in caught] == [__file__]
    backend = backends.select_backend(torch.device("cpu"), "auto")
    assert backend.name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.select_backend(torch.device("cpu"), "auto") is backend
    with pytest.raises(loader.NoPackError, match="no kernel pack serves"):
        backends.select_backend(torch.device("cpu"), "cpu")
    make_loader(directories=list)
    monkeypatch.setenv("FLASH_DMATTN_FALLBACK", "error")
    with pytest.raises(loader.NoPackError, match="no kernel pack serves"):
        backends.select_backend(torch.device("cpu"), "auto")


@pytest.mark.usefixtures("with_fallbacks")
def test_a_core_that_is_absent_means_the_reference_with_a_warning() -> None:
    code = (
        "import sys, torch, warnings, flash_dmattn\n"
        "sys.modules['flash_dmattn._core'] = None\n"
        "x = torch.randn(1, 3, 1, 8)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    print(flash_dmattn.flash_dmattn_func(x, x, x).shape == x.shape)\n"
        "print('._core cannot be imported' in str(caught[0].message), len(caught))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\nTrue 1\n", done.stderr


def test_tensors_reach_the_core_as_numbers_on_an_older_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flash_dmattn.backends import torch_memory

    monkeypatch.setattr(torch_memory, "CORE_READS_TENSORS", False)
    problem = simple_problem(torch.bfloat16, causal=True)
    problem.mask = rand_bool(2, 1, 17, 23)
    problem.bias = randn(1, 2, 1, 23)
    with core_without_allocator() as refused:
        check(problem, CPU)
    assert refused.called


OLDER_TORCH = """
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
from flash_dmattn import dynamic_mask, flash_dmattn_func

def results(backend):
    torch.manual_seed(0)
    query, bias = torch.randn(1, 9, 2, 16), torch.randn(1, 2, 1, 9)
    selection = {"query_length": 9, "backend": backend}
    rows = dynamic_mask(bias, 3, **selection)
    bounds = dynamic_mask(bias, 3, is_causal=True, **selection)
    query.requires_grad_(), bias.requires_grad_()
    options = {"attn_bias": bias, "return_lse": True, "backend": backend}
    out, lse = flash_dmattn_func(query, query, query, is_causal=True, window_size=3, **options)
    masked, _ = flash_dmattn_func(query, query, query, rows, **options)
    gradients = torch.autograd.grad(out.sum() + lse.sum() + masked.square().sum(), (query, bias))
    return out, lse, masked, rows, bounds.to_bool(9), *gradients

for got, want in zip(results(None), results("reference")):
    torch.testing.assert_close(got, want)
"""


def test_a_torch_whose_tensors_the_core_cannot_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OLDER_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


PLAN = """
import time
from pathlib import Path
import torch
from flash_dmattn.backends.torch_memory import _zeros

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

_zeros(1 << 20, torch.device("cpu"))
before, best = resident(), 1.0
for _ in range(5):
    begin = time.perf_counter()
    plan = _zeros(160_000_000, torch.device("cpu"))
    best = min(best, time.perf_counter() - begin)
assert resident() - before < 1 << 20, resident() - before
assert best < 1e-3, best
assert plan.dtype == torch.uint8 and plan.shape == (160_000_000,) and plan.data_ptr() % 64 == 0
plan[123] = 1
assert not plan[:123].any() and not plan[124:1 << 20].any() and not plan[-100:].any()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_large_plan_costs_nothing_before_it_is_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAN], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


PEAK = """
import resource, torch, flash_dmattn
torch.set_num_threads(1)
n = 16384
x = torch.randn(1, n, 1, 16, requires_grad=True)
bias = torch.randn(1, 1, 1, n, requires_grad=True)
flash_dmattn.flash_dmattn_func(x[:, :64], x[:, :64], x[:, :64], backend="cpu").sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mask = torch.ones(1, 1, 1, n, dtype=torch.bool).expand(1, 1, n, n)
out = flash_dmattn.flash_dmattn_func(
    x, x, x, mask, bias, is_causal=True, window_size=64, backend="cpu"
)
out.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_follows_the_keys_and_not_their_square() -> None:
    """Q x K bytes would be 256 MiB here."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 1024, f"{done.stdout.strip()} KiB"
