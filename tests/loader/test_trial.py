# SPDX-License-Identifier: BSD-3-Clause
"""Self-tests of packs on GPUs without a recorded run: when, how often, and the stored result."""

import json
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch

from flash_dmattn import loader
from flash_dmattn.backends.pack import PackBackend
from flash_dmattn.loader import FallbackWarning, NoPackError, trial
from flash_dmattn.loader.errors import UntestedWarning
from flash_dmattn.loader.facts import Driver
from flash_dmattn.selftest import with_torch


@pytest.fixture
def blackwell(installation):
    """Return a machine with such a GPU and its packs."""
    installation.set_up("cpu", "cu12-sm120", "cu13-sm120", gpu="12.0", torch="13.0")
    return installation


def remembered(installation) -> list[Path]:
    folder = installation.root.parent / "cache"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_the_first_use_tests_and_the_next_process_remembers(blackwell):
    with pytest.warns(UntestedWarning, match="cu13-sm120 on cuda:0 .* never tested on by its"):
        assert blackwell.loader().pack_for("cuda", 0).name == "cu13-sm120"
    assert blackwell.tried == [("cu13-sm120", "cuda:0")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = blackwell.loader()
        assert again.pack_for("cuda", 0).name == "cu13-sm120"
        assert again.pack_for("cuda", 0).name == "cu13-sm120"
    assert len(blackwell.tried) == 1
    assert "its self-test passed here" in str(again.trace_for("cuda", 0))


def test_a_report_tests_nothing(blackwell):
    found = blackwell.loader()
    assert "it serves if its self-test passes on first use" in str(found.trace_for("cuda", 0))
    assert found.trace_for("cuda", 0).pack.name == "cu13-sm120"
    assert blackwell.tried == []
    assert remembered(blackwell) == []


@pytest.mark.parametrize("change", ["pack", "driver", "gpu"])
def test_another_pack_driver_or_gpu_is_tested_anew(change, blackwell):
    with pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)
    if change == "pack":
        path = blackwell.packs / "libflash_dmattn_cu13_sm120.so"
        path.write_text(path.read_text() + " ")
    elif change == "driver":
        blackwell.facts.driver_ = Driver("590.44.01", "13.1")
    else:
        blackwell.gpus("12.1")
    with pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)
    assert len(blackwell.tried) == 2
    assert len(remembered(blackwell)) == 2


def test_a_pack_that_fails_gives_way_to_the_next(blackwell):
    blackwell.on_trial = lambda pack: "wrong" if pack.name == "cu13-sm120" else ""
    found = blackwell.loader()
    with pytest.warns(UntestedWarning, match="cu12-sm120"):
        assert found.pack_for("cuda", 0).name == "cu12-sm120"
    refused = [e for e in found.trace_for("cuda", 0).entries if e.candidate.name == "cu13-sm120"]
    assert refused[0].reason == "its self-test did not pass on this GPU: wrong"
    assert found.pack_for("cuda", 0).name == "cu12-sm120"
    assert len(blackwell.tried) == 2


def test_what_failed_is_remembered(blackwell):
    blackwell.on_trial = lambda pack: "wrong"
    for _ in range(2):
        with pytest.raises(NoPackError, match="did not pass on this GPU: wrong"):
            blackwell.loader().pack_for("cuda", 0)
    assert len(blackwell.tried) == 2  # two packs, in the first process only
    assert blackwell.loader().trace_for("cuda", 0).pack is None


def test_plain_pytorch_computes_where_it_fails_and_says_why(blackwell):
    blackwell.on_trial = lambda pack: "wrong"
    found = blackwell.loader()

    def make(name, device, default):
        return name if name == "reference" else found.pack_for(device.type, device.index)

    device = torch.device("cuda", 0)
    with pytest.warns(FallbackWarning, match="in plain PyTorch") as caught:
        assert found.backend_for("auto", device, make) == "reference"
    assert "its self-test did not pass on this GPU: wrong" in str(caught[0].message)
    blackwell.environ["FLASH_DMATTN_FALLBACK"] = "error"
    with pytest.raises(NoPackError):
        blackwell.loader().pack_for("cuda", 0)


def test_what_a_machine_lacks_at_the_moment_is_not_remembered(blackwell):
    def fail(pack):
        raise torch.OutOfMemoryError("no memory")

    blackwell.on_trial = fail
    with pytest.raises(NoPackError, match="OutOfMemoryError: no memory"):
        blackwell.loader().pack_for("cuda", 0)
    assert remembered(blackwell) == []
    blackwell.on_trial = lambda pack: ""
    with pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)


def test_a_test_that_goes_on_elsewhere_is_no_failure(blackwell):
    """Ranks of a job start together: each runs its own test."""

    def begin_twice(pack):
        if len(blackwell.tried) == 1:
            with pytest.warns(UntestedWarning):
                blackwell.loader().pack_for("cuda", 0)
        return ""

    blackwell.on_trial = begin_twice
    with pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)
    assert len(blackwell.tried) == 2


@pytest.mark.parametrize("content", ["", "[]", "{", '{"process": 1}'])
def test_a_note_that_makes_no_sense_counts_for_nothing(content, blackwell):
    with pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)
    (path,) = remembered(blackwell)
    path.write_text(content)
    with pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)


def test_without_a_folder_it_is_tested_in_every_process(blackwell):
    (blackwell.root.parent / "cache").write_text("a file")
    for _ in range(2):
        with pytest.warns(UntestedWarning):
            blackwell.loader().pack_for("cuda", 0)
    assert len(blackwell.tried) == 2


@pytest.mark.parametrize("variables", [{"FLASH_DMATTN_UNTRIED": "1"}, {}])
def test_who_asks_for_a_pack_gets_it_untested(variables, blackwell):
    path = blackwell.packs / "libflash_dmattn_cu13_sm120.so"
    blackwell.environ |= variables or {"FLASH_DMATTN_LIBRARY_PATH": str(path)}
    assert blackwell.loader().pack_for("cuda", 0).name == "cu13-sm120"
    assert blackwell.tried == []


@pytest.mark.parametrize(("capability", "arch"), [("9.0", "sm90"), ("8.0", "sm80")])
def test_gpus_that_are_known_are_not_tested(capability, arch, installation):
    installation.write("cpu", f"cu13-{arch}")
    installation.gpus(capability)
    assert installation.loader().pack_for("cuda", 0).name == f"cu13-{arch}"
    assert installation.tried == []


def test_kernels_that_no_gpu_ever_ran_are_not_tested_either(installation):
    installation.forget_runs("10.0")
    installation.set_up("cpu", "cu13-sm100", gpu="10.0")
    with pytest.raises(NoPackError, match="FLASH_DMATTN_UNTRIED=1 lets it serve"):
        installation.loader().pack_for("cuda", 0)
    assert installation.tried == []


def test_no_mode_of_the_caller_reaches_it(blackwell):
    def look(pack):
        torch.ones(1, requires_grad=True).sum().backward()
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        return ""

    blackwell.on_trial = look
    with torch.inference_mode(), pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)


def test_other_threads_may_ask_meanwhile(blackwell):
    blackwell.gpus("12.0", "9.0")
    blackwell.write("cpu", "cu13-sm120", "cu13-sm90")
    found = blackwell.loader()
    names = []

    def ask(pack):
        other = threading.Thread(target=lambda: names.append(found.pack_for("cuda", 1).name))
        other.start()
        other.join(10)
        return ""

    blackwell.on_trial = ask
    with pytest.warns(UntestedWarning):
        found.pack_for("cuda", 0)
    assert names == ["cu13-sm90"]


def test_the_folder_is_that_of_the_users_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert trial.cache_folder() == tmp_path / "flash_dmattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert trial.cache_folder() == tmp_path / ".cache" / "flash_dmattn"


def test_a_note_is_of_this_process(blackwell):
    def look(pack):
        (note,) = remembered(blackwell)
        assert json.loads(note.read_text())["process"] == os.getpid()
        return ""

    blackwell.on_trial = look
    with pytest.warns(UntestedWarning):
        blackwell.loader().pack_for("cuda", 0)
    (note,) = remembered(blackwell)
    assert json.loads(note.read_text()) == {"failure": ""}


# --- the test itself, by the installed pack


def test_it_compares_what_the_pack_computes():
    """Results and all gradients equal those of public calls; the loader is not asked."""
    backend = PackBackend(loader.pack_for("cpu"))
    found = list(with_torch.compare("cpu", with_torch.by_backend(backend)))
    assert found == list(with_torch.compare("cpu"))
    assert {row.result for row in found} == {"out", "lse", "dq", "dk", "dv", "dbias"}
    assert all(row.passed for row in found)


def test_it_finds_a_wrong_result(monkeypatch):
    pack = loader.pack_for("cpu")
    assert trial._compare(pack, "cpu") == ""
    right = PackBackend.differentiate

    def wrong(self, *arguments):
        first, *others = right(self, *arguments)
        return first + 1, *others

    monkeypatch.setattr(PackBackend, "differentiate", wrong)
    assert trial._compare(pack, "cpu").startswith("dq of float32, no mask, differs by ")
