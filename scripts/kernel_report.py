# SPDX-License-Identifier: BSD-3-Clause
"""Reports registers, stack, spills and static shared memory of the kernels in CUDA packs.

It reads finished libraries with cuobjdump and nvdisasm of the CUDA toolkit. It needs neither a GPU
nor the compiler's log. Spills are counted as by ptxas: each load and store of local memory once, in
bytes per thread. Arrays in local memory count, too. The exit status is 1 if a kernel spills more
than ALLOWANCES permits, or if the compiler lost an operand of wgmma (left_operands.py).

From sm_90 on, static shared memory includes 1024 bytes for the system. Dynamic shared memory is set
by the launch and not recorded in a library: static_asserts in cpp/cuda compare it with the arch's
limit.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from left_operands import lost_operands

FOLDER_PATTERN = "libflash_dmattn_cu*.so"
CUDA_FOLDERS = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")

_ARCH = re.compile(r"arch = (sm_\w+)")
_FUNCTION = re.compile(r"\s*Function (?:: )?([^\s:]+)")
_USAGE = re.compile(r"\b(REG|STACK|SHARED):(\d+)")
# The kernels with wgmma, which only sm_90a has.
_WGMMA_KERNEL = re.compile("sm90|fused_kernel|small_(blocks|forward)_kernel")
_LOCAL_ACCESS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?(LDL|STL)((?:\.\w+)*)\s")
# Omitted in names: namespaces, the result's type, an enumerator's type as in (fdm::cuda::Lookup)1.
_UNSAID = re.compile(r"\(anonymous namespace\)::|\([\w:]+\)(?=\d)|\bfdm::(cuda::)?|^void ")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Allowance:
    """The maximum bytes of spill stores and loads together of some kernels, and the reason."""

    kernel: str  # pattern of the name, as the report prints it
    arch: str  # pattern of the arch
    spill_bytes: int
    reason: str


# The first match applies to a kernel; a kernel without a match must not spill. The numbers are the
# largest seen with CUDA 12.5 (ptxas 12.9), 13.0 and 13.1.
ALLOWANCES = (
    Allowance(
        "*",
        "sm_1?0f",
        1400,
        "tiles of sm80 and sm86, which no such GPU has run",
    ),
    Allowance(
        "forward_kernel<ForwardConfig<*, 96, 128, 64, 4, *, 0>>",
        "*",
        88,
        "32 rows a warp fill 255 registers; 4 accesses are in the loop, beside 192 mma",
    ),
    Allowance(
        "forward_kernel<ForwardConfig<*, 128, 128, 64, 4, *, 0>>",
        "*",
        224,
        "32 rows a warp fill 255 registers; 5 to 31 accesses are in the loop, beside 256 mma",
    ),
    Allowance(
        "forward_kernel<ForwardConfig<*, 4, *, 1>>",
        "*",
        600,
        "32 rows a warp fill 255 registers, and addresses of a bias for each query want more",
    ),
    Allowance(
        "forward_kernel<ForwardConfig<*, 8, 2, 1>>",
        "*",
        192,
        "two blocks of eight warps have 128 registers; they hide the latencies of a bias for each "
        "query better than fewer with more",
    ),
    Allowance("dq_kernel<DqConfig<*, 64, 128, 32, 8, 2, 1>>", "*", 16, "two blocks of 8 warps"),
    Allowance(
        "dkdv_kernel<DkdvConfig<*, 128, 64, 8, 1, *>>",
        "sm_90a",
        960,
        "16 keys a warp fill 255 registers; only a bias for each query runs it",
    ),
    Allowance(
        "fused_kernel<*, 128, 128, 2, 0, 1, 0, *>>",
        "sm_90a",
        344,
        "the words and maps of a mask per query: 344 bytes at D 32, 236 at 64",
    ),
    Allowance(
        "fused_kernel<*, 128, 64, 2, 0, 1, 0, *>>",
        "sm_90a",
        284,
        "the words and maps of a mask per query: 228 bytes at D 128, 284 at 96",
    ),
    Allowance(
        "fused_kernel<*, 64, 64, 2, *, 2, 0, *>>",
        "sm_90a",
        554,
        "sums of the bias gradient, and the maps of a mask",
    ),
    Allowance(
        "fused_kernel<*, 192, 128, 64, 2, *>>",
        "sm_90a",
        116,
        "the sums beside narrow values take 160 registers: 116 bytes of float16, 16 of bfloat16",
    ),
    Allowance("fused_kernel<*>", "sm_90a", 148, "the slope of each score, with a softcap"),
    Allowance(
        "dkdv_kernel_sm90<*, 128, 128, 64, 3, *>>",
        "sm_90a",
        584,
        "the accumulators of 64 keys leave a producer 56 registers: it keeps what it needs once a "
        "step in local memory; with a softcap consumers do too",
    ),
    Allowance(
        "dkdv_kernel_sm90<*, 96, 128, 64, 3, 0, *>>",
        "sm_90a",
        32,
        "the producer has 56 registers, as at head dimension 128",
    ),
    Allowance(
        "dq_kernel_sm90<*>",
        "sm_90a",
        380,
        "three accumulators beside the addresses of a task: 52 bytes at D 128, most at 192",
    ),
    Allowance(
        "forward_kernel_sm90<*<ForwardConfigSm90<*, 256, *>",
        "sm_90a",
        432,
        "the output fills the registers where a tile is written",
    ),
    Allowance("small_blocks_kernel<*, 1>>", "sm_90a", 96, "once a step, for three blocks an SM"),
    Allowance(
        "small_forward_kernel<SmallBoxes<*", "sm_90a", 24, "96 registers for a softcap's tanh"
    ),
    Allowance("schedule_keys", "*", 400, "1024 threads of one block, which runs once, have 64"),
    Allowance("forward_kernel_sm90<*>", "sm_90a", 40, "at a boundary of tiles, or with a softcap"),
    Allowance(
        "decode_kernel<DecodeConfig<*, 64, 8, 2>>",
        "sm_90a",
        8,
        "16 bits, read once for each block of keys",
    ),
    Allowance(
        "all_gradients_kernel<AllGradientsConfig<*, 128, 128, 64, 8, 1, *>>",
        "*",
        132,
        "accumulators of 16 keys and 64 rows fill 255 registers; 0 on sm_80",
    ),
    Allowance(
        "all_gradients_kernel<AllGradientsConfig<*, 256, 64, 32, 8, 1, 2, 1>>",
        "*",
        104,
        "V, and 128 columns of dK and dV, leave 63 registers for scores or a part of dQ",
    ),
    Allowance(
        "dbias_kernel<DbiasConfig<*>>",
        "sm_80",
        706,
        "sums of 64 elements beside products and fragments of both operands fill 255 registers",
    ),
    Allowance("dbias_kernel<DbiasConfig<*>>", "*", 112, "sums of 64 elements: most at D 32"),
    Allowance("list_keys_and_tiles<*>", "*", 8, "one value, kept in local memory over all loops"),
    Allowance("row_bias_kernel<*>", "*", 16, "outside of the loop over columns"),
    Allowance(
        "pair_bias_forward_kernel<*, 32>>",
        "*",
        160,
        "three blocks have 168 registers; addresses of copies, once for each block of 64 keys",
    ),
    Allowance(
        "pair_bias_dq_kernel<*, 32, 2, *>",
        "*",
        152,
        "three blocks have 168 registers; addresses of copies, once for each block of 64 keys",
    ),
    Allowance(
        "pair_bias_dkdv_kernel<*, 64>>",
        "*",
        176,
        "the accumulators of 32 keys fill 255 registers; outside of the loop over a step's rows",
    ),
    Allowance(
        "pair_bias_fused_kernel<*, 64, 1, 0>>",
        "*",
        200,
        "a tile of dbias, two of products and their results fill 224 registers",
    ),
    Allowance(
        "pair_bias_fused_kernel<*, 128, *>>",
        "*",
        1172,
        "a tile of dbias beside two results of 128 columns fills 224 registers; mostly what a "
        "step is told, and outside of the loop over sources",
    ),
    Allowance(
        "pair_bias_fused_kernel<*, 1>>", "*", 140, "a step and exchanges beside a tile of dbias"
    ),
    Allowance(
        "pair_bias_fused_kernel<*>",
        "*",
        40,
        "what a step is told is held beside a tile of dbias and two of products",
    ),
    Allowance(
        "pair_bias_forward_kernel_sm90<*, 64, 2, *>>",
        "*",
        2284,
        "a tile of the bias, one of scores and two of results fill 232 registers; mostly in "
        "the run that knows the rare cases",
    ),
    Allowance(
        "pair_bias_forward_kernel_sm90<*>",
        "*",
        880,
        "a tile of the bias, one of scores and two of results fill 216 registers; mostly in "
        "the run that knows the rare cases, else outside of the loop over keys",
    ),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel of one library; sizes in bytes per thread, shared memory in bytes per block."""

    pack: str
    arch: str
    symbol: str
    name: str
    registers: int
    stack: int
    static_shared: int
    spill_stores: int = 0
    spill_loads: int = 0
    lost_operands: tuple[str, ...] = ()  # addresses of the products that read them

    @property
    def spill_bytes(self) -> int:
        """Stores and loads together."""
        return self.spill_stores + self.spill_loads


def parse_usage(text: str, pack: str) -> list[Kernel]:
    """Return the kernels that `cuobjdump --dump-resource-usage` lists, spills not yet counted."""
    kernels = []
    arch = symbol = ""
    for line in text.splitlines():
        if found := _ARCH.match(line):
            arch = found[1]
        elif found := _FUNCTION.match(line):
            symbol = found[1]
        elif symbol:
            sizes = {key: int(value) for key, value in _USAGE.findall(line)}
            kernels.append(
                Kernel(pack, arch, symbol, symbol, sizes["REG"], sizes["STACK"], sizes["SHARED"])
            )
            symbol = ""
    return kernels


def parse_functions(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the lines of `cuobjdump --dump-sass` by arch and symbol."""
    functions: dict[tuple[str, str], list[str]] = {}
    arch = ""
    lines: list[str] = []  # what precedes the first function is not kept
    for line in text.splitlines():
        if found := _ARCH.match(line):
            arch = found[1]
        elif found := _FUNCTION.match(line):
            key = (arch, found[1])
            if key in functions:
                raise SystemExit(f"kernel_report: {found[1]} is twice in the code of {arch}")
            lines = functions[key] = []
        else:
            lines.append(line)
    return functions


def count_spills(lines: Iterable[str]) -> tuple[int, int]:
    """Return the bytes that a disassembled function stores to local memory and loads from it."""
    stores = loads = 0
    for line in lines:
        if found := _LOCAL_ACCESS.match(line):
            width = next((_WIDTHS[part] for part in found[2].split(".") if part in _WIDTHS), 4)
            is_store = found[1] == "STL"
            stores, loads = stores + width * is_store, loads + width * (not is_store)
    return stores, loads


def short_names(symbols: Iterable[str]) -> dict[str, str]:
    """Return readable names: without the project's namespace, the result's type and parameters."""
    unique = sorted(set(symbols))
    text = "\n".join(unique)
    if (demangler := shutil.which("c++filt")) is not None:
        text = _run([demangler], text)
    names = {}
    for symbol, name in zip(unique, text.splitlines(), strict=True):
        names[symbol] = re.sub(r"\(.*", "", _UNSAID.sub("", name)).replace("> >", ">>")
    return names


def report_library(library: Path, cuobjdump: str) -> list[Kernel]:
    """Return the kernels of one library, in order of their names."""
    usage = _run([cuobjdump, "--dump-resource-usage", str(library)])
    kernels = parse_usage(usage, library.name)
    if not kernels:
        raise SystemExit(f"kernel_report: {library} holds no kernels")
    # Without a stack there are no spills, and without wgmma no lost operands; disassembling
    # everything would take minutes.
    suspects = sorted(
        {
            k.symbol
            for k in kernels
            if k.stack or (k.arch == "sm_90a" and _WGMMA_KERNEL.search(k.symbol))
        }
    )
    functions: dict[tuple[str, str], list[str]] = {}
    if suspects:
        sass = _run([cuobjdump, "--dump-sass", "--function", ",".join(suspects), str(library)])
        functions = parse_functions(sass)
    names = short_names(kernel.symbol for kernel in kernels)
    counted = []
    for kernel in kernels:
        key = kernel.arch, kernel.symbol
        lines = functions[key] if kernel.symbol in suspects else []
        stores, loads = count_spills(lines) if kernel.stack else (0, 0)
        counted.append(
            replace(
                kernel,
                name=names[kernel.symbol],
                spill_stores=stores,
                spill_loads=loads,
                lost_operands=tuple(lost_operands(lines)),
            )
        )
    return sorted(counted, key=lambda kernel: (kernel.name, kernel.arch))


def allowance_for(kernel: Kernel, allowances: Sequence[Allowance]) -> int:
    """Return how many bytes this kernel may spill."""
    for entry in allowances:
        if fnmatch.fnmatchcase(kernel.name, entry.kernel) and fnmatch.fnmatchcase(
            kernel.arch, entry.arch
        ):
            return entry.spill_bytes
    return 0


def excesses(kernels: Iterable[Kernel], allowances: Sequence[Allowance]) -> list[str]:
    """Return a sentence for each kernel that spills more than it may, or lost an operand."""
    sentences = []
    for kernel in kernels:
        name = f"{kernel.pack}: {kernel.name} ({kernel.arch})"
        if kernel.spill_bytes > (allowed := allowance_for(kernel, allowances)):
            sentences.append(f"{name} spills {kernel.spill_bytes} bytes, allowed: {allowed}")
        if kernel.lost_operands:
            products = ", ".join(kernel.lost_operands)
            sentences.append(f"{name} lost the left operands of the products at {products}")
    return sentences


def table(kernels: Sequence[Kernel]) -> str:
    """Return the report as a text table."""
    lines = ["arch    registers  stack  spill stores  loads  static shared  kernel"]
    pack = ""
    for kernel in kernels:
        if kernel.pack != pack:
            pack = kernel.pack
            lines.append(pack)
        lines.append(
            f"{kernel.arch:<8}{kernel.registers:>9}{kernel.stack:>7}{kernel.spill_stores:>14}"
            f"{kernel.spill_loads:>7}{kernel.static_shared:>15}  {kernel.name}"
        )
    return "\n".join(lines)


def find_cuobjdump() -> str:
    """Return the cuobjdump on the PATH, in a CUDA toolkit or in the triton package."""
    places = [Path(folder) / "bin" for folder in CUDA_FOLDERS if folder]
    if (triton := importlib.util.find_spec("triton")) and triton.submodule_search_locations:
        places.append(Path(triton.submodule_search_locations[0]) / "backends" / "nvidia" / "bin")
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)])
    if (found := shutil.which("cuobjdump", path=search)) is None:
        raise SystemExit(
            "kernel_report: no cuobjdump in PATH, CUDA_HOME or /usr/local/cuda, nor in triton; "
            "name it with --cuobjdump"
        )
    return found


def find_libraries(paths: Iterable[Path]) -> list[Path]:
    """Return the named libraries, and the CUDA packs in the named folders."""
    libraries = []
    for path in paths:
        found = sorted(path.glob(FOLDER_PATTERN)) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise SystemExit(f"kernel_report: no CUDA pack: {path}")
        libraries += found
    return libraries


def _run(command: list[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"kernel_report: {command[0]} failed: {last}")
    return done.stdout


def main() -> int:
    """Parse the command line, print the report, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packs", nargs="+", type=Path, help="libraries, or folders of packs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cuobjdump", help="the program to use; searched for by default")
    options = parser.parse_args()
    cuobjdump = options.cuobjdump or find_cuobjdump()
    kernels = [
        kernel
        for library in find_libraries(options.packs)
        for kernel in report_library(library, cuobjdump)
    ]
    spilled = excesses(kernels, ALLOWANCES)
    if options.json:
        rows = [asdict(kernel) for kernel in kernels]
        print(json.dumps({"kernels": rows, "excesses": spilled}, indent=1))
    else:
        print(table(kernels))
    for sentence in spilled:
        print(f"kernel_report: {sentence}", file=sys.stderr)
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
