# SPDX-License-Identifier: BSD-3-Clause
"""The results of scripts/test_peers, on small tests of this project."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drawn.workers import Outcome
from peers import sdpa
from peers.__main__ import checkout, report, unfolded
from peers.accepted import reason_for
from peers.cases import axes_of, has_no_counterpart, work
from peers.shims import NoCounterpartError, attention
from peers.suites import SUITES, suites_of

ROOT = Path(__file__).resolve().parent.parent
# Replaces FlashAttention's test file; it has a test of each kind.
TESTS = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.bert_padding import HELP

@pytest.mark.parametrize("d", [8, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_output(d, causal):
    q, k, v = (torch.randn(2, 5, 2, d, device="cuda") for _ in range(3))
    assert HELP and flash_attn_func(q, k, v, causal=causal).shape == q.shape

@pytest.mark.parametrize("seqlen", list(range(1, 100)))
def test_flash_attn_drawn(seqlen):
    q = torch.ones(1, seqlen, 1, 8, device="cuda")
    torch.testing.assert_close(flash_attn_func(q, q, q), q)

def test_flash_attn_large_heads():
    q = torch.ones(1, 2, 1, 512, device="cuda")
    flash_attn_func(q, q, q)

def test_flash_attn_skipped():
    pytest.skip("no")

def test_with_fixture(tmp_path):
    raise AssertionError("not drawn")
"""
WRONG = """
def test_flash_attn_wrong():
    q = torch.ones(1, 2, 1, 8, device="cuda")
    assert flash_attn_func(q, q, q).sum() == 17
"""
CRASH = """
def test_flash_attn_crash():
    import os
    os.abort()
"""
# Replaces transformers' tests of a model; a CPU run selects the tests by these names.
MODEL_TESTS = """
import torch
import transformers

def run(attention):
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    config = transformers.LlamaConfig(vocab_size=20, **sizes)
    model = transformers.LlamaModel._from_config(config, attn_implementation=attention)
    model(torch.ones(1, 4, dtype=torch.long))
    return model.config._attn_implementation

def test_eager_matches_sdpa_inference_09_fp32_right():
    run("sdpa")

def test_eager_matches_sdpa_inference_09_fp32_of_another_version():
    run("sdpa")
    {}["axial"]

def test_eager_matches_sdpa_inference_09_fp32_wrong():
    {"eager": 1}[run("sdpa")]

def test_eager_matches_sdpa_inference_09_fp32_wrong_in_another_way():
    {}[run("sdpa")]

def test_flash_attention_2_padding_compared():
    run("flash_attention_2")
    assert False, "not close"
"""
NEEDS_A_FILE = "open('fixtures/expected.json')"


def run_script(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a checkout that has only these tests of FlashAttention."""
    (folder / "tests").mkdir()
    (folder / "flash_attn").mkdir()
    (folder / "tests" / "test_flash_attn.py").write_text(tests)
    (folder / "flash_attn" / "bert_padding.py").write_text("HELP = True\n")
    return run_suite(folder, "fa2")


def run_suite(folder: Path, suite: str) -> subprocess.CompletedProcess[str]:
    for package in ("einops", "parameterized"):  # the script requires it; these tests do not
        (folder / f"{package}.py").write_text("")
    command = [sys.executable, "-m", "peers", str(folder), "--suites", suite]
    return subprocess.run(
        [*command, "--cases", "16", "--workers", "1"],
        env={"PYTHONPATH": f"{ROOT / 'tests'}:{folder}", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_counts_by_suite(tmp_path: Path) -> None:
    done = run_script(tmp_path, TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fa2: 14 passed, 0 failed, 1 skipped, 1 accepted\n" in done.stdout
    assert "accepted, fa2: head dimensions above 256: 1" in done.stdout


def test_fails_on_what_is_not_accepted(tmp_path: Path) -> None:
    done = run_script(tmp_path, TESTS + WRONG + CRASH)
    assert done.returncode == 1
    assert "fa2::test_flash_attn_wrong[] (--case " in done.stdout
    assert "failed AssertionError" in done.stdout
    assert "crash the process ended: SIGABRT" in done.stdout


def test_models_that_fail_without_flash_dmattn_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("tests/test_modeling_common.py", "src/transformers/testing_utils.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("_TEXT_MODEL_TESTER_DEFAULTS = {}")
    (tmp_path / "utils" / "test_module").mkdir(parents=True)
    for model, tests in (("one", MODEL_TESTS), ("two", NEEDS_A_FILE)):
        file = tmp_path / "tests" / "models" / model / f"test_modeling_{model}.py"
        file.parent.mkdir(parents=True)
        file.write_text(tests)
    done = run_suite(tmp_path, "transformers")
    counts = "transformers: 1 passed, 3 failed, 1 skipped, 1 accepted\n"
    assert counts in done.stdout, done.stdout + done.stderr
    assert "fails with eager attention, too: KeyError: 'axial'" in done.stdout
    for name in ("wrong", "wrong_in_another_way", "compared"):
        assert re.search(
            rf"FAILED transformers::one/test_modeling_one.py::\w+_{name} ", done.stdout
        )


def test_fails_where_nothing_passed(capsys: pytest.CaptureFixture[str]) -> None:
    skipped = Outcome(0, "skipped", "no", "fa2::test")
    assert report([skipped], ["fa2"]) == 1
    assert "nothing passed of: fa2" in capsys.readouterr().out
    assert report([skipped, Outcome(1, "right", "", "fa2::test")], ["fa2"]) == 0


def test_checkouts_are_known_by_their_files(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="has none of these files"):
        checkout(str(tmp_path))
    for suite in SUITES:
        (tmp_path / suite.test).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / suite.test).touch()
        assert suite in suites_of(tmp_path)
    assert checkout(str(tmp_path)) == tmp_path


ONE_KEY = "fa2::test_flash_attn_splitkv[seqlen_q=1, seqlen_k=339, swap_sq_sk=True, dtype=float16]"
SUMS = (
    "AssertionError:  (line 1: assert ({0} - {0}_ref).abs()); dQ max diff: 0.9; dV max diff: {1}; "
    "dK Pytorch max diff: 0.0; dV Pytorch max diff: {2}"
)


@pytest.mark.parametrize(
    ("test", "error", "is_accepted"),
    [
        ("fa4::test_flash_attn_output[d=512]", "NoCounterpartError: head dimension 512", True),
        ("fa4::test_flash_attn_output[d=64]", "AssertionError: head dimension 64", False),
        ("fa3::test_x", "OutOfMemoryError: Tried to allocate 70.00 GiB. GPU 0", True),
        ("fa3::test_x", "OutOfMemoryError: Tried to allocate 7.00 GiB. GPU 0", False),
        ("transformers::llama", "NoCounterpartError: head dimension 512", False),
        (ONE_KEY, SUMS.format("dv", 0.00390625, 0.0), True),
        (ONE_KEY, SUMS.format("dv", 0.3, 0.0), False),
        (ONE_KEY, SUMS.format("dv", 0.00390625, 0.001), False),
        (ONE_KEY, SUMS.format("dk", 0.00390625, 0.0), False),
        (ONE_KEY.replace("float16", "bfloat16"), SUMS.format("dv", 0.00390625, 0.0), False),
        (ONE_KEY.replace("True", "False"), SUMS.format("dv", 0.00390625, 0.0), False),
    ],
)
def test_what_is_accepted(test: str, error: str, is_accepted: bool) -> None:
    assert (reason_for(test, error) is not None) == is_accepted


def test_outcomes_of_models() -> None:
    message = json.dumps([["right", "", "llama/x"], ["failed", "wrong", "llama/y"]])
    passed, failed = unfolded([Outcome(3, "right", message, "llama")])
    assert (passed.kind, passed.problem) == ("right", "transformers::llama/x")
    assert (failed.kind, failed.message) == ("failed", "wrong")
    assert report([passed, failed], ["transformers"]) == 1
    assert report(unfolded([Outcome(4, "hang", "no result")]), []) == 1


def test_parameters_of_a_test() -> None:
    @pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 2), (3, 4)])
    @pytest.mark.parametrize("d", [8])
    def test() -> None: ...

    assert axes_of(test) == [(["d"], [8]), (["seqlen_q", "seqlen_k"], [(1, 2), (3, 4)])]
    assert axes_of(pytest.mark.skipif(True, reason="")(test)) is None
    assert has_no_counterpart({"dropout_p": 0.1})
    assert not has_no_counterpart({"dropout_p": 0.0, "dtype": torch.float16})
    assert work({"seqlen_q": 2, "seqlen_k": 3, "d": 5}) == 30


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keeps: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~keeps, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), v)


@pytest.mark.parametrize("window", [(None, None), (2, 1), (0, None)])
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_chunks_and_padding(window: attention.Window, chunk: int, causal: bool) -> None:
    """The shim's intervals equal a mask that is written out for each pair."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 2, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    used, left = torch.tensor([9, 7]), torch.tensor([0, 2])
    options = attention.Options(causal=causal, window=window, chunk=chunk)
    out, _ = attention.dense(q, k, v, options, used_k=used, left_pad=left)

    j = torch.arange(9)
    here = torch.arange(6)[None, :, None] + used[:, None, None] - 6
    keeps = (j < used[:, None, None]) & (j >= left[:, None, None])
    before, behind = window[0], 0 if causal else window[1]
    if before is not None:
        keeps = keeps & (j >= here - before)
    if behind is not None:
        keeps = keeps & (j <= here + behind)
    if chunk:
        skipped = left[:, None, None]
        keeps = keeps & ((j - skipped) // chunk == (here - skipped) // chunk)
    torch.testing.assert_close(out, by_hand(q, k, v, keeps[:, None]), atol=1e-5, rtol=1e-5)


def test_shim_refuses_what_has_no_counterpart() -> None:
    q = torch.ones(1, 2, 1, 8)
    for given in ({"dropout": 0.1}, {"qv": q}, {"q_descale": q}, {"score_mod": len}):
        with pytest.raises(NoCounterpartError):
            attention.refuse(q, **given)
    attention.refuse(q, dropout=0.0, qv=None, score_mod=None)


def test_lse_counts_the_sink_as_in_flash_attention() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 3, 2, 8)
    sink = torch.randn(2)
    _, lse = attention.dense(q, q, q, attention.Options(sink=sink))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, q) * 8**-0.5
    logits = torch.cat([scores, sink[None, :, None, None].expand(1, 2, 3, 1)], -1)
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-5, rtol=1e-5)


class RoundedAttention(torch.autograd.Function):
    """Attention with a mask that rounds to bfloat16 where GPU kernels round."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keeps: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
        p = (q @ k.mT * scale).masked_fill(~keeps, -torch.inf).softmax(-1)
        out = (p.bfloat16().float() @ v).bfloat16()
        ctx.save_for_backward(q, k, v, p, out)
        ctx.scale = scale
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, p, out = ctx.saved_tensors
        dout = dout.float().transpose(1, 2)
        ds = (p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))).bfloat16().float()
        dq, dk, dv = ctx.scale * ds @ k, ctx.scale * ds.mT @ q, p.bfloat16().float().mT @ dout
        return *(x.bfloat16().transpose(1, 2) for x in (dq, dk, dv)), None, None


@pytest.mark.parametrize("scale", [1.0, 1.05])
def test_samples_of_sdpa_are_judged_by_the_terms_of_each_element(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with nearly all weight on one key round worse than PyTorch's, but are not wrong."""

    def attention(q: Tensor, k: Tensor, v: Tensor, keeps: Any, _: Any, usual: float) -> Any:
        return RoundedAttention.apply(q, k, v, keeps, usual * scale)

    monkeypatch.setattr(sdpa, "flash_dmattn_func", attention)
    for seed in range(50):
        torch.manual_seed(seed)
        # Drawn as in PyTorch; all batch elements share the queries.
        q, *kv = (18 * torch.rand(shape) - 9 for shape in ((4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8)))
        inputs = [x.bfloat16() for x in (q, *kv)]
        sample = SimpleNamespace(input=inputs[0], args=inputs[1:], kwargs={"is_causal": True})
        if scale == 1:
            sdpa.check(sample, torch.bfloat16)
        else:
            with pytest.raises(AssertionError, match="elements are wrong"):
                sdpa.check(sample, torch.bfloat16)
