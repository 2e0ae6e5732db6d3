# SPDX-License-Identifier: BSD-3-Clause
"""The texts of NoPackError, literally."""

import pytest

from flash_dmattn.loader import Loader, NoPackError


def text_for(loader, *device):
    with pytest.raises(NoPackError) as caught:
        loader.pack_for(*device)
    return str(caught.value)


def test_gpu_without_support(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("7.5", driver="580.65.06", runs="13.0")
    installation.use_torch("13.0")
    assert (
        text_for(installation.loader(), "cuda", 0)
        == """\
no kernel pack serves cuda:0 (GPU 7.5, compute capability 7.5)
looked for: a cuda pack for x86_64, flash_dmattn 2.0.0a1, pack ABI 1, NVIDIA driver 580.65.06 \
(CUDA 13.0), torch 2.11.0, CUDA 13.0
found:
  cpu from flash_dmattn: refused: it is for cpu devices
  cu13-sm90 from flash_dmattn: refused: no pack supports compute capability 7.5; supported are \
8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0, 12.1
fix: export FLASH_DMATTN_BACKEND=reference"""
    )


def test_gpu_whose_pack_was_not_built(installation):
    installation.write("cpu", "cu12-sm80")
    installation.gpus("9.0")
    installation.use_torch(None)
    assert (
        text_for(installation.loader(), "cuda", 0)
        == """\
no kernel pack serves cuda:0 (GPU 9.0, compute capability 9.0)
looked for: a cuda pack for x86_64, flash_dmattn 2.0.0a1, pack ABI 1, NVIDIA driver 580.65.06 \
(CUDA 13.0), torch 2.11.0, without CUDA
found:
  cpu from flash_dmattn: refused: it is for cpu devices
  cu12-sm80 from flash_dmattn: refused: sm80 code does not run on compute capability 9.0
fix: python -m pip install --force-reinstall --no-deps --no-binary flash-dmattn \
--config-settings=cmake.define.FLASH_DMATTN_ARCHS=sm90 flash-dmattn==2.0.0a1"""
    )


def test_old_driver(installation):
    installation.write("cpu", "cu12-sm90", "cu13-sm90")
    installation.gpus("9.0", driver="470.256.02", runs="11.4")
    text = text_for(installation.loader(), "cuda", 0)
    assert text.endswith("""\
torch not imported
found:
  cpu from flash_dmattn: refused: it is for cpu devices
  cu12-sm90 from flash_dmattn: refused: CUDA 12 needs NVIDIA driver 525.60.13 or newer, found \
470.256.02 (CUDA 11.4)
  cu13-sm90 from flash_dmattn: refused: CUDA 13 needs NVIDIA driver 580.65.06 or newer, found \
470.256.02 (CUDA 11.4)
fix: install NVIDIA driver 525.60.13 or newer: https://www.nvidia.com/drivers""")


def test_no_driver(installation):
    installation.write("cpu")
    text = text_for(installation.loader(), "cuda", 0)
    assert text.endswith("""\
no NVIDIA driver, torch not imported
found:
  cpu from flash_dmattn: refused: it is for cpu devices
fix: install NVIDIA driver 525.60.13 or newer: https://www.nvidia.com/drivers""")


def test_no_packs_at_all(installation):
    assert (
        text_for(installation.loader(), "cpu")
        == """\
no kernel pack serves cpu
looked for: a cpu pack for x86_64, flash_dmattn 2.0.0a1, pack ABI 1
found:
  nothing
fix: python -m pip install --force-reinstall --no-deps flash-dmattn==2.0.0a1"""
    )


def test_corrupt_file(installation):
    installation.write("cpu")
    path = installation.packs / "libflash_dmattn_cpu.so"
    path.write_text("garbage")
    assert (
        text_for(installation.loader(), "cpu")
        == f"""\
no kernel pack serves cpu
looked for: a cpu pack for x86_64, flash_dmattn 2.0.0a1, pack ABI 1
found:
  cpu from flash_dmattn: refused: it cannot be opened: {path}: dlopen failed: invalid ELF header
fix: python -m pip install --force-reinstall --no-deps flash-dmattn==2.0.0a1"""
    )


def test_distribution_of_another_version(installation):
    installation.write("cpu")
    installation.distribute("flash-dmattn-cu13", "cu13-sm90", version="1.9")
    installation.gpus("9.0")
    text = text_for(installation.loader(), "cuda", 0)
    assert text.endswith("""\
  cu13-sm90 from flash-dmattn-cu13 1.9: refused: it is of version 1.9, flash_dmattn is 2.0.0a1
fix: python -m pip install --force-reinstall --no-deps flash-dmattn-cu13==2.0.0a1""")


def test_forced_arch(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0")
    installation.environ["FLASH_DMATTN_ARCH"] = "80"
    text = text_for(installation.loader(), "cuda", 0)
    assert text.endswith("""\
  cu13-sm90 from flash_dmattn: refused: FLASH_DMATTN_ARCH=80 asks for another arch
fix: unset FLASH_DMATTN_ARCH""")


def test_unknown_kind_of_device(installation):
    installation.write("cpu")
    text = text_for(installation.loader(), "mps", 0)
    assert text.startswith("no kernel pack serves mps:0\n")
    assert text.endswith("fix: export FLASH_DMATTN_BACKEND=reference")


def test_installation_without_its_table(installation):
    installation.write("cu13-sm90")
    installation.gpus("9.0")
    (installation.root / "targets.json").unlink()
    text = text_for(installation.loader(), "cuda", 0)
    assert text.endswith(f"""\
problem: no file {installation.root / "targets.json"}
fix: python -m pip install --force-reinstall --no-deps flash-dmattn==2.0.0a1""")


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        (
            "the nanobind backend module 'nanobind_backend' is not installed",
            "python -m pip install nanobind-backend",
        ),
        (
            "cannot import name '_core'",
            "python -m pip install --force-reinstall --no-deps flash-dmattn==2.0.0a1",
        ),
    ],
)
def test_core_that_cannot_be_imported(installation, reason, fix):
    def abi_version():
        raise ImportError(reason)

    loader = Loader(
        installation.facts, None, abi_version, lambda: [installation.root], list, environ={}
    )
    assert (
        text_for(loader, "cpu")
        == f"""\
no kernel pack serves cpu
looked for: a cpu pack for x86_64, flash_dmattn 2.0.0a1
problem: the extension module flash_dmattn._core cannot be imported: {reason}
fix: {fix}"""
    )
