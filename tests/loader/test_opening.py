# SPDX-License-Identifier: BSD-3-Clause
"""Files that are no usable pack, opened by the real core; and what importing does not do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flash_dmattn import _core
from flash_dmattn.loader import Loader, NoPackError

HEADERS = Path(__file__).parents[2] / "cpp"

NOT_A_PACK = "int nothing(void) { return 0; }"
OTHER_ABI = """
#include "pack.h"
const fdm_pack *flash_dmattn_pack(void) {
  static const fdm_pack table = {
    .abi_version = FDM_PACK_ABI_VERSION + 7, .struct_size = sizeof(fdm_pack)};
  return &table;
}
"""


def compile_library(source: str, path: Path) -> None:
    compiler = next(filter(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")), None)
    if compiler is None:
        pytest.skip("no C compiler")
    code = path.with_suffix(".c")
    code.write_text(source)
    subprocess.run(
        [compiler, "-std=c11", "-shared", "-fPIC", f"-I{HEADERS}", code, "-o", path], check=True
    )


def real_loader(installation) -> Loader:
    return Loader(
        installation.facts,
        _core.load_pack,
        lambda: _core.PACK_ABI_VERSION,
        lambda: [installation.root],
        list,
        installation.environ,
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "dlopen failed: "),
        (NOT_A_PACK, "the library is no kernel pack: it has no symbol flash_dmattn_pack"),
        (OTHER_ABI, "the kernel pack has ABI version 8, but this flash_dmattn needs ABI version 1"),
    ],
)
def test_unusable_files_give_their_reason(installation, source, reason):
    installation.write("cpu")
    path = installation.packs / "libflash_dmattn_cpu.so"
    if source is None:
        path.write_bytes(b"\x7fELF" + bytes(range(256)))
    else:
        compile_library(source, path)
    with pytest.raises(NoPackError) as caught:
        real_loader(installation).pack_for("cpu")
    assert f"cpu from flash_dmattn: refused: it cannot be opened: {path}: {reason}" in str(
        caught.value
    )
    assert "\nfix: python -m pip install --force-reinstall --no-deps flash-dmattn==" in str(
        caught.value
    )


def in_a_new_process(code: str, **variables: str) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASH_DMATTN_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_importing_imports_no_torch_and_opens_no_driver():
    printed = in_a_new_process(
        "import json, sys, flash_dmattn, flash_dmattn.loader\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "print(json.dumps(['torch' in sys.modules, 'numpy' in sys.modules,"
        " 'flash_dmattn._core' in sys.modules, 'libcuda' in maps, 'libnvidia-ml' in maps]))"
    )
    assert json.loads(printed) == [False] * 5


def test_the_cpu_is_served_without_torch_and_without_the_driver():
    printed = in_a_new_process(
        "import json, sys, flash_dmattn.loader as loader\n"
        "pack = loader.pack_for('cpu')\n"
        "print(json.dumps([pack.name, loader.pack_for('cpu', 0) is pack, 'torch' in sys.modules,"
        " 'libcuda' in open('/proc/self/maps').read()]))"
    )
    assert json.loads(printed) == ["cpu", True, False, False]
