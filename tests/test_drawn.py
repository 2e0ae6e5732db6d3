# SPDX-License-Identifier: BSD-3-Clause
"""Drawn calls of all options together against float64, and the judge and runner of them.

scripts/fuzz checks any number of them; this module checks the first ones.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drawn import __main__ as fuzz
from drawn.calls import Call
from drawn.check import check
from drawn.coverage import known_ways, report, report_ways
from drawn.judge import expected
from drawn.lists import draw_listed
from drawn.many import Limits, draw_many
from drawn.problems import Drawn, draw
from drawn.workers import Outcome, outcome_of, run
from routes.library import ARCHS
from support import HALF_TYPES, Target, randn

BLOCK = 50


def blocks(seeds: int, size: int = BLOCK) -> list[Any]:
    """Return the first seed of each block; all but the first half are marked slow."""
    return [
        pytest.param(first, marks=pytest.mark.slow if 2 * first >= seeds else ())
        for first in range(0, seeds, size)
    ]


def check_seeds(first: int, target: Target, draws: Callable[..., Drawn] = draw) -> None:
    for seed in range(first, first + BLOCK):
        drawn = draws(seed, target.dtypes)
        try:
            check(drawn, target)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{drawn.describe()}") from error


@pytest.mark.parametrize("first", range(0, 400, BLOCK))
def test_drawn_calls_are_right(first: int, pack_target: Target) -> None:
    check_seeds(first, pack_target)


def test_drawn_calls_are_right_by_any_backend(target: Target) -> None:
    check_seeds(1000, target)


@pytest.mark.parametrize("first", blocks(200))
def test_drawn_lists_are_right(first: int, pack_target: Target) -> None:
    check_seeds(first, pack_target, draw_listed)


def test_drawn_lists_are_right_by_any_backend(target: Target) -> None:
    check_seeds(1000, target, draw_listed)


@pytest.mark.parametrize("first", blocks(60, 15))
def test_repeated_calls_are_right(first: int, pack_target: Target) -> None:
    for seed in range(first, first + 15):
        outcome = outcome_of(seed, pack_target, small=False, many=True, strict=True)
        assert outcome.kind in ("right", "refused"), f"seed {seed}: {outcome}"


@pytest.mark.parametrize("packed", [False, True])
def test_judge_sees_that_heads_are_exchanged(packed: bool) -> None:
    limits = Limits(elements=1e6, work=1e8, most=40, sms=3)
    names = ("out", "dquery", "dkey", "dvalue")
    for seed in range(200):
        drawn, repeater = draw_many(seed, (torch.float32,), limits)
        if (drawn.call.cu_seqlens_q is not None) != packed or len(drawn.call.wanted) < 5:
            continue
        call = repeater.large("cpu")
        right = call.results()
        if all((right[name] - right[name].roll(1, -2)).abs().max() > 0.1 for name in names):
            break
    want = repeater.expected(call, "cpu")
    want.check(right)
    for name in names:
        with pytest.raises(AssertionError, match=f"^{name}"):
            want.check(right | {name: right[name].roll(1, -2)})


def test_equal_seeds_draw_equal_calls() -> None:
    for seed in range(20):
        one, other = draw(seed), draw(seed)
        assert one.describe() == other.describe()
        for a, b in zip(one.call.tensors(), other.call.tensors(), strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


# --- the judge


def a_call(dtype: torch.dtype, **settings: object) -> Call:
    query, key, value, dout = (
        randn(1, 40, heads, 32, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))
    )
    bias = randn(1, 4, 1, 40, seed=5)
    return Call(query, key, value, dout * 0.2, randn(1, 4, 40), bias=bias, **settings)


def refuses(call: Call, got: dict[str, Tensor], name: str) -> None:
    with pytest.raises(AssertionError, match=f"^{name}"):
        expected(call).check(got)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", ["out", "lse", "dquery", "dkey", "dvalue", "dbias"])
def test_judge_sees_one_wrong_element(name: str, dtype: torch.dtype) -> None:
    call = a_call(dtype, causal=True, softcap=5.0)
    right = call.results()
    expected(call).check(right)
    for value in (torch.nan, torch.inf, 0.0):
        got = {key: tensor.clone() for key, tensor in right.items()}
        got[name].view(-1)[got[name].abs().argmax()] = value
        refuses(call, got, name)


def test_judge_sees_one_key_too_few_and_too_many() -> None:
    call = a_call(torch.bfloat16)
    keep = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    keep[:, :, 7, 9] = False
    masked = dataclasses.replace(call, mask=keep)
    refuses(call, masked.results(), "out|lse")
    refuses(masked, call.results(), "out|lse")


def test_judge_wants_exact_zeros_of_what_is_dropped() -> None:
    call = a_call(torch.float16, mask=torch.arange(40)[None] != 3)
    got = call.results()
    got["dkey"][0, 3, 0, 0] = 1e-7
    refuses(call, got, "dkey")


def test_judge_allows_what_rounding_leaves_of_subnormal_numbers() -> None:
    """The sink leaves 1e-7 of out, which float16 rounds with an error of a third."""
    call = a_call(torch.float16, sink=torch.full((4,), 22.0))
    want = expected(call)
    rounded = want.results["out"].half().double()
    assert 0 < rounded.abs().max() < torch.finfo(torch.float16).smallest_normal
    got = call.results()
    got["dsink"] = -(call.dout * rounded).sum((0, 1, 3)).float()
    want.check(got)
    got["dsink"] += 2e-6
    refuses(call, got, "dsink")


def test_judge_ignores_only_heads_that_keep_poison() -> None:
    """The second pair of heads keeps a key with NaN; the first pair does not."""
    mask = torch.ones(1, 4, 1, 40, dtype=torch.bool)
    mask[:, :2, :, 3] = False
    call = a_call(torch.bfloat16, mask=mask)
    call.value[0, 3] = torch.nan
    call.key[0, 3] = torch.nan
    want = expected(call)
    assert want.ignored["out"][:, :, 2:].all()
    assert not want.ignored["out"][:, :, :2].any()
    assert not want.ignored["dkey"][:, :, 0].any()
    assert not want.ignored["dbias"][:, :2].any()
    got = call.results()
    want.check(got)
    got["out"][0, 0, 0, 0] = torch.nan
    refuses(call, got, "out")


# --- processes


def troubled(seed: int) -> Outcome:
    """Stand in for a check that crashes, hangs, or fails."""
    if seed == 5:
        os.abort()
    if seed == 9:
        time.sleep(600)
    return Outcome(seed, "wrong" if seed == 11 else "right")


def test_crashes_and_hangs_cost_one_seed() -> None:
    outcomes = list(run(iter(range(40)), troubled, workers=2, limit=3, start_limit=60))
    assert sorted(outcome.seed for outcome in outcomes) == list(range(40))
    other = {outcome.seed: outcome for outcome in outcomes if outcome.kind != "right"}
    assert {seed: outcome.kind for seed, outcome in other.items()} == {
        5: "crash",
        9: "hang",
        11: "wrong",
    }
    assert "SIGABRT" in other[5].message


def test_a_run_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fuzz.json"
    common = ["fuzz", "--backend", "reference", "--small", "--output", str(path), "--commit", "abc"]

    def fuzz_run(*more: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", [*common, *more])
        assert fuzz.main() == 0
        content: dict[str, object] = json.loads(path.read_text())
        return content

    assert fuzz_run("--seed", "100", "--cases", "3")["next_seed"] == 103
    content = fuzz_run("--seed", "100", "--cases", "5", "--resume")
    assert content["next_seed"] == 105
    assert content["counts"] == {"right": 5}
    assert content["failures"] == []
    assert "5 cases from seed 100" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*common, "--seed", "7", "--resume"])
    with pytest.raises(SystemExit, match="first_seed 100, now 7"):
        fuzz.main()


# --- which kernels were launched


def test_a_kernel_that_too_few_cases_launch_is_named() -> None:
    names = {"_Za": "forward<64>", "_Zb": "forward<128>", "_Zc": "backward<64>"}
    table, missing = report(names, Counter({"_Za": 7, "_Zc": 2}), least=5)
    assert missing == ["backward was launched by 2 cases, fewer than 5"]
    assert "forward: 2 instantiations, 1 never" in table


def test_a_way_that_too_few_cases_take_is_named() -> None:
    cases = Counter({"forward: boxes": 7, "forward: usual": 2, "_Za": 9})
    known = {"forward: boxes", "forward: usual", "backward: fused"}
    table, missing = report_ways(known, cases, least=5)
    assert missing == [
        "backward: fused was taken by 0 cases, fewer than 5",
        "forward: usual was taken by 2 cases, fewer than 5",
    ]
    assert "7  forward: boxes" in table
    assert "_Za" not in table


@pytest.mark.parametrize("arch", ARCHS)
def test_known_routes_take_many_ways(arch: int) -> None:
    assert len(known_ways(arch)) > 20


def test_cases_tell_which_kernels_they_launch(pack_target: Target) -> None:
    outcome = outcome_of(3, pack_target, small=True, strict=True)
    assert bool(outcome.launched) == (pack_target.device == "cuda")
