# SPDX-License-Identifier: BSD-3-Clause
"""cpp/pack.h is the contract for separately built libraries: plain C that C++ reads alike."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CPP = Path(__file__).resolve().parent.parent / "cpp"
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]

# Prints the compiler's layout of every struct that crosses the interface.
LAYOUT_PROGRAM = r"""
#include <stdio.h>
#include "pack.h"
#define SIZE(type) printf(#type " %zu\n", sizeof(type))
#define FIELD(type, field) printf(#type "." #field " %zu\n", offsetof(type, field))
int main(void) {
  SIZE(fdm_tensor); SIZE(fdm_buffer); SIZE(fdm_context); SIZE(fdm_problem); SIZE(fdm_forward_args);
  SIZE(fdm_backward_args); SIZE(fdm_selection); SIZE(fdm_mask_blocks);
  SIZE(fdm_plan_layout); SIZE(fdm_pack);
  FIELD(fdm_tensor, stride); FIELD(fdm_tensor, dtype); FIELD(fdm_context, stream);
  FIELD(fdm_problem, scale);
  FIELD(fdm_problem, q); FIELD(fdm_problem, block_table); FIELD(fdm_problem, max_kept);
  FIELD(fdm_forward_args, lse);
  FIELD(fdm_backward_args, dbias); FIELD(fdm_selection, keep); FIELD(fdm_pack, abi_version);
  FIELD(fdm_plan_layout, most_tile_keys); FIELD(fdm_mask_blocks, kept);
  FIELD(fdm_pack, plan_layouts); FIELD(fdm_pack, workspace_bytes); FIELD(fdm_pack, select);
  return 0;
}
"""


def find_compiler(variable: str, names: list[str]) -> str:
    for name in [os.environ.get(variable, ""), *names]:
        path = shutil.which(name) if name else None
        if path:
            return path
    pytest.skip(f"no compiler: set {variable} or install one of {', '.join(names)}")


def compile_program(standard: str, source: str, folder: Path) -> Path:
    """Compile `source` under a standard with -Werror; return the path of the program."""
    if standard.startswith("c++"):
        compiler, suffix = find_compiler("CXX", ["c++", "g++", "clang++"]), ".cpp"
    else:
        compiler, suffix = find_compiler("CC", ["cc", "gcc", "clang"]), ".c"
    file = folder / f"program{suffix}"
    file.write_text(source)
    program = folder / f"program-{standard}"
    command = [compiler, f"-std={standard}", *STRICT, f"-I{CPP}", str(file), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return program


@pytest.mark.parametrize("standard", ["c99", "c11", "c++17"])
def test_header_compiles_alone(standard: str, tmp_path: Path) -> None:
    # The double include tests the guard. As the first include, it must include its own needs.
    source = '#include "pack.h"\n#include "pack.h"\nint main(void) { return FDM_OK; }\n'
    compile_program(standard, source, tmp_path)


def test_c_and_cpp_agree_on_the_layout(tmp_path: Path) -> None:
    layouts = {}
    for standard in ["c99", "c++17"]:
        program = compile_program(standard, LAYOUT_PROGRAM, tmp_path)
        layouts[standard] = subprocess.run(
            [program], capture_output=True, text=True, check=True
        ).stdout
    assert layouts["c99"] == layouts["c++17"]
    assert "fdm_pack.abi_version 0\n" in layouts["c99"]


def test_structs_have_no_hidden_padding(tmp_path: Path) -> None:
    """Implicit padding would hold garbage, and would move when a field is added."""
    source = '#include "pack.h"\nint main(void) { return 0; }\n'
    compiler = find_compiler("CC", ["cc", "gcc", "clang"])
    file = tmp_path / "padding.c"
    file.write_text(source)
    command = [compiler, "-std=c11", "-Wpadded", "-Werror", f"-I{CPP}", "-c", str(file)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "padding.o")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
