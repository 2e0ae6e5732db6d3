# SPDX-License-Identifier: BSD-3-Clause
"""Machines, installations and variables that the loader reports."""

import json
import subprocess
import sys

import pytest
from scenarios import Scenarios, error_of, real_loader

from flash_dmattn import _core
from flash_dmattn.loader import environment, errors, messages, trial
from flash_dmattn.loader.facts import Host, Torch
from flash_dmattn.selftest import Comparison
from pack_files import compile_library

SCENARIOS = Scenarios()


# --- GPUs and drivers


@SCENARIOS.add
def gpu_without_support(installation):
    installation.set_up("cpu", "cu13-sm90", gpu="7.5", torch="13.0")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def gpu_whose_pack_was_not_built(installation):
    installation.set_up("cpu", "cu12-sm80", gpu="9.0", torch=None)
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def newer_gpu_whose_pack_was_not_built(installation):
    installation.set_up("cpu", "cu12-sm90", "cu13-sm90", gpu="10.0", torch="13.0")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def gpu_on_which_no_pack_was_run(installation):
    installation.forget_runs("10.0")
    installation.set_up("cpu", "cu12-sm100", "cu13-sm100", gpu="10.0", torch="13.0")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def gpu_on_which_no_pack_was_run_and_one_is_asked_for(installation):
    installation.set_up("cpu", "cu13-sm120", gpu="12.0", torch="13.0")
    installation.environ["FLASH_DMATTN_UNTRIED"] = "1"
    return str(installation.loader().trace_for("cuda", 0))


@SCENARIOS.add
def gpu_whose_self_test_passes(installation):
    installation.set_up("cpu", "cu12-sm120", "cu13-sm120", gpu="12.0", torch="13.0")
    loader = installation.loader()
    before = str(loader.trace_for("cuda", 0))
    with pytest.warns(errors.UntestedWarning) as caught:
        loader.pack_for("cuda", 0)
    return "\n\n".join((before, str(caught[0].message), str(loader.trace_for("cuda", 0))))


def failing(installation, outcome):
    installation.set_up("cpu", "cu13-sm120", gpu="12.0", torch="13.0")
    installation.on_trial = outcome
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def gpu_whose_self_test_finds_a_wrong_result(installation):
    row = Comparison("cuda:0", "causal", "float16", "dq", 0.5, 8e-3)
    return failing(installation, lambda pack: messages.TRIAL_DIFFERS.format(row=row))


@SCENARIOS.add
def gpu_whose_self_test_raises(installation):
    def fail(pack):
        raise RuntimeError("no kernel image is available")

    return failing(installation, fail)


@SCENARIOS.add
def gpu_whose_first_use_is_captured(installation):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_is_captured", lambda: True)
        return failing(installation, lambda pack: "")


@SCENARIOS.add
def gpu_whose_self_test_ended_the_process(installation):
    def end(pack):
        (started,) = (installation.root.parent / "cache").iterdir()
        left = json.loads(started.read_text()) | {"process": child_that_ended()}
        # A run that ends this way leaves only the note of its start.
        installation.left = started, json.dumps(left)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing(installation, end)
    path, content = installation.left
    assert not path.exists()
    path.write_text(content)
    return error_of(installation.loader(), "cuda", 0)


def child_that_ended():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@SCENARIOS.add
def gpu_without_any_gpu_pack(installation):
    installation.set_up("cpu", gpu="8.9", torch="12.8")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def old_driver(installation):
    installation.write("cpu", "cu12-sm90", "cu13-sm90")
    installation.gpus("9.0", driver="470.256.02", runs="11.4")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def driver_for_cuda_12_and_packs_for_13(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0", driver="550.54.15", runs="12.4")
    installation.use_torch("12.4")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def no_driver(installation):
    installation.write("cpu", "cu13-sm90")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def no_driver_and_no_gpu_pack(installation):
    installation.write("cpu")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def hidden_gpu(installation):
    installation.set_up("cpu", "cu13-sm90", gpu="9.0")
    return error_of(installation.loader(), "cuda", 1)


@SCENARIOS.add
def torch_for_rocm(installation):
    installation.write("cpu", "cu12-sm90", "cu13-sm90")
    installation.facts.torch_ = Torch("2.11.0", None, rocm="6.4.43484")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def torch_for_rocm_and_no_gpu_pack(installation):
    installation.write("cpu")
    installation.facts.torch_ = Torch("2.11.0", None, rocm="6.4.43484")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def torch_for_xpu(installation):
    installation.write("cpu", "cu13-sm90")
    installation.facts.torch_ = Torch("2.11.0", None, xpu="20250101")
    return error_of(installation.loader(), "xpu", 0)


@SCENARIOS.add
def unknown_kind_of_device(installation):
    installation.write("cpu")
    return error_of(installation.loader(), "mps", 0)


# --- packs that do not fit


@SCENARIOS.add
def no_packs_at_all(installation):
    return error_of(installation.loader(), "cpu")


@SCENARIOS.add
def other_machine(installation):
    installation.write("cpu")
    installation.facts.host_ = Host("aarch64", "glibc 2.35")
    return error_of(installation.loader(), "cpu")


@SCENARIOS.add
def unknown_cuda(installation):
    installation.distribute("flash-dmattn-cu14", "cu14-sm90")
    installation.gpus("9.0")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def other_pack_abi(installation):
    installation.write("cpu", abi_version=_core.PACK_ABI_VERSION + 1)
    return error_of(installation.loader(), "cpu")


@SCENARIOS.add
def distribution_of_another_version(installation):
    installation.write("cpu")
    installation.distribute("flash-dmattn-cu13", "cu13-sm90", version="1.9")
    installation.gpus("9.0")
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def what_is_worth_knowing_of_accepted_packs(installation):
    installation.write("cpu", "cu12-sm86")
    installation.distribute("flash-dmattn-cu12", "cu12-sm86", "cu12-sm80")
    installation.gpus("8.9")
    installation.use_torch("13.0")
    return str(installation.loader().trace_for("cuda", 0))


# --- variables


@SCENARIOS.add
def forced_arch(installation):
    installation.set_up("cpu", "cu13-sm90", gpu="9.0")
    installation.environ["FLASH_DMATTN_ARCH"] = "80"
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def forced_cuda(installation):
    installation.set_up("cpu", "cu13-sm90", gpu="9.0")
    installation.environ["FLASH_DMATTN_CUDA"] = "12"
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def forced_file_that_is_absent(installation):
    installation.write("cpu")
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(installation.root / "absent.so")
    return error_of(installation.loader(), "cpu")


@SCENARIOS.add
def forced_file_that_is_no_pack(installation):
    installation.write("cpu")
    path = compile_library("int nothing(void) { return 0; }", installation.root / "other.so")
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(path)
    return error_of(real_loader(installation), "cpu")


@SCENARIOS.add
def forced_file_of_another_version(installation):
    installation.write("cpu", "cu13-sm90")
    folder = installation.distribute("development", "cu12-sm90", version="1.0")
    installation.entry_points.clear()
    path = folder / "libflash_dmattn_cu12_sm90.so"
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(path)
    installation.gpus("9.0")
    return str(installation.loader().trace_for("cuda", 0))


@SCENARIOS.add
def value_that_is_not_allowed(installation):
    installation.environ["FLASH_DMATTN_BACKEND"] = "refrence"
    with pytest.raises(environment.InvalidVariableError) as caught:
        environment.get("FLASH_DMATTN_BACKEND", installation.environ)
    return str(caught.value)


@SCENARIOS.add
def level_that_the_cpu_lacks(installation):
    with pytest.raises(environment.InvalidVariableError) as caught:
        environment.check_cpu_simd("avx2", {"FLASH_DMATTN_CPU_SIMD": "avx512"})
    return str(caught.value)


@SCENARIOS.add
def unknown_variable(installation):
    installation.write("cpu")
    installation.environ["FLASH_DMATTN_ARHC"] = "80"
    with pytest.warns(environment.UnknownVariableWarning) as caught:
        installation.loader().pack_for("cpu")
    return str(caught[0].message)
