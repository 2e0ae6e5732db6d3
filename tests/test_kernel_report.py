# SPDX-License-Identifier: BSD-3-Clause
"""scripts/kernel_report: its parsing of cuobjdump's text, and its failure on spills and lost
operands.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "kernel_report"

# Recorded from cuobjdump on packs of CUDA 13.0, shortened and renamed. The first kernel spills, the
# last keeps an array in local memory, the middle one does neither but has wgmma.
SPILLING = "_ZN3fdm4cuda15spilling_kernelINS0_6ConfigI6__halfLi128ELb0EEEEEvNS0_6ParamsE"
PLAIN = (
    "_ZN3fdm4cuda43_GLOBAL__N__3e4fe6f9_10_combine_cu_87f0ec9f14dq_kernel_sm90ENS0_13ForwardParamsE"
)
ENUMERATOR = "_ZN3fdm4cuda14forward_kernelINS0_9KeyStreamILi64ELNS0_6LookupE1EEEEEvv"
ARRAY = "_ZN3fdm4cuda12array_kernelINS0_6ConfigI6__halfLi128EEEEEvNS0_6ParamsE"


def _elf(arch: str) -> str:
    """Return the start of cuobjdump's output for an arch."""
    return f"""
Fatbin elf code:
================
arch = {arch}
code version = [1,8]
host = linux
compile_size = 64bit
compressed
"""


USAGE = f"""
{_elf("sm_80")}
Resource usage:
 Common:
  GLOBAL:512 CONSTANT[4]:8

{_elf("sm_90a")}
Resource usage:
 Common:
  GLOBAL:512 CONSTANT[4]:8
 Function {SPILLING}:
  REG:255 STACK:32 SHARED:1024 LOCAL:0 CONSTANT[0]:1632 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function {PLAIN}:
  REG:48 STACK:0 SHARED:0 LOCAL:0 CONSTANT[2]:8 CONSTANT[0]:1632 TEXTURE:0 SURFACE:0 SAMPLER:0

{_elf("sm_90a")}
Resource usage:
 Common:
  GLOBAL:512 CONSTANT[4]:8
 Function {ARRAY}:
  REG:168 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:2176 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = f"""
{_elf("sm_90a")}
	code for sm_90
		Function : {SPILLING}
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_ACCELERATORS"
        /*49d0*/                   IMAD.X R251, R0, 0x1, R3 ;  /* 0x0000000100fb7824 */
                                                         /* 0x000fe200078e0603 */
        /*49e0*/                   STL [R1+0x1c], R251 ;  /* 0x00001cfb01007387 */
        /*8670*/                   LDL R36, [R1+0x1c] ;  /* 0x00001c0001247983 */
        /*111b0*/                  LDL.LU R197, [R1] ;  /* 0x0000000001c57983 */
        /*116a0*/                  STL.S16 [R1+0x4], R197 ;  /* 0x000000c501007387 */
        /*12690*/                  STL.64 [R1+0x8], R88 ;  /* 0x0000085801007387 */
        /*126a0*/                  LDSM.16.M88.4 R88, [R4] ;  /* 0x000000000458783b */
        /*126b0*/                  LDG.E R5, desc[UR4][R2.64] ;  /* 0x0000000402057981 */

		Function : {PLAIN}
        /*0000*/                   EXIT ;  /* 0x000000000000794d */

Fatbin elf code:
================
arch = sm_90a

	code for sm_90
		Function : {ARRAY}
        /*3b70*/                   STL.128 [R1], R16 ;  /* 0x0000001001007387 */
        /*4c20*/              @!P0 LDL R18, [R16] ;  /* 0x0000000010128983 */
        /*4c30*/               @P1 LDL R27, [R28] ;  /* 0x000000001c1b9983 */
"""
# A loop whose product reads what ldmatrix loaded before it. {WRITES} is behind the product. R20 and
# the word at 8 are computed; R200 and the word at 0 are copies of the operand.
PRODUCTS = """
        /*0100*/                   LDSM.16.M88.4 R152, [R5] ;
        /*0110*/                   FADD R20, R21, R22 ;
        /*0120*/                   STL [R1+0x8], R20 ;
        /*0130*/                   STL [R1], R152 ;
        /*0140*/                   MOV R200, R152 ;
        /*0150*/                   BRA.DIV UR4, 0x1d0 ;
        /*0160*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R10+URZ+0x18410], R3 ;
        /*0170*/              @!P0 BRA 0x160 ;
        /*0180*/                   HGMMA.64x64x16.F32.BF16 R56, R152, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0190*/                   {WRITES} ;
        /*01a0*/               @P1 BRA 0x160 ;
        /*01b0*/                   EXIT ;
        /*01d0*/                   EXIT ;
"""
FAKE_CUOBJDUMP = """\
#!{python}
import sys
texts = {texts!r}
if sys.argv[1] not in texts:
    sys.exit("cuobjdump fatal   : Unknown option")
if sys.argv[1] == "--dump-sass":
    assert sys.argv[3].split(",") == {disassembled!r}, sys.argv
print(texts[sys.argv[1]])
"""
SPILLING_SOURCE = """\
extern "C" __global__ void crowded(float *x) {
  float held[40];
  for (int i = 0; i < 40; ++i) held[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 40; ++i) x[i * 32 + threadIdx.x] = held[39 - i] * held[i];
}
extern "C" __global__ void roomy(float *x) { x[threadIdx.x] = 0; }
"""


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import kernel_report

    return kernel_report


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "libflash_dmattn_cu13_sm90.so"
    path.touch()
    return path


def fake_cuobjdump(folder: Path, usage: str = USAGE, sass: str = SASS) -> list[str]:
    """Return the arguments that make the script run a program with these outputs."""
    texts = {"--dump-resource-usage": usage, "--dump-sass": sass}
    disassembled = sorted([SPILLING, PLAIN, ARRAY]) if usage == USAGE else [PLAIN]
    path = folder / "cuobjdump"
    path.write_text(
        FAKE_CUOBJDUMP.format(python=sys.executable, texts=texts, disassembled=disassembled)
    )
    path.chmod(0o755)
    return ["--cuobjdump", str(path)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_usage_is_read(report: ModuleType) -> None:
    kernels = report.parse_usage(USAGE, "pack.so")
    found = [(k.arch, k.symbol, k.registers, k.stack, k.static_shared) for k in kernels]
    assert found == [
        ("sm_90a", SPILLING, 255, 32, 1024),
        ("sm_90a", PLAIN, 48, 0, 0),
        ("sm_90a", ARRAY, 168, 16, 1024),
    ]


def test_local_accesses_are_counted_by_their_width(report: ModuleType) -> None:
    functions = report.parse_functions(SASS)
    assert {key: report.count_spills(lines) for key, lines in functions.items()} == {
        ("sm_90a", SPILLING): (4 + 2 + 8, 4 + 4),
        ("sm_90a", PLAIN): (0, 0),
        ("sm_90a", ARRAY): (16, 4 + 4),
    }


@pytest.mark.parametrize(
    ("writes", "lost"),
    [
        ("F2FP.BF16.F32.PACK_AB R153, R15, R22", ["0x180"]),
        ("@!P0 FADD R155, R26, -R76", ["0x180"]),
        ("LDS.128 R152, [R184+0x14a20]", ["0x180"]),
        ("LDS.64 R151, [R184+0x14a20]", ["0x180"]),
        ("DADD R151, R2, R4", ["0x180"]),
        ("HMMA.16816.F32.BF16 R150, R4, R8, RZ", ["0x180"]),
        ("HGMMA.64x64x16.F32.BF16 R124, R40, gdesc[UR4], R124", ["0x180"]),
        ("MOV R152, R20", ["0x180"]),
        ("@P0 IMAD.MOV.U32 R152, RZ, RZ, R20", ["0x180"]),
        ("ATOMS.ADD R152, [R4], R5", ["0x180"]),
        ("LDL R152, [R1+0x8]", ["0x180"]),
        ("LDS.64 R150, [R184+0x14a20]", []),
        ("HGMMA.64x64x16.F32.BF16 R120, R40, gdesc[UR4], R120", []),
        ("FADD R156, R152, R153", []),
        ("ISETP.GE.AND P0, PT, R152, R3, PT", []),
        ("R2P PR, R152", []),
        ("STS [R152], R153", []),
        ("STL [R1+0x8], R152", []),
        ("LDL R152, [R1]", []),
        ("MOV R152, R200", []),
        ("LDSM.16.M88.4 R152, [R4]", []),
        ("LDSM.16.MT88.4 R152, [R4]", []),
    ],
)
def test_operands_overwritten_in_a_loop_are_lost(
    report: ModuleType, writes: str, lost: list[str]
) -> None:
    assert report.lost_operands(PRODUCTS.replace("{WRITES}", writes).splitlines()) == lost


def test_lost_operands_fail_and_are_named(pack: Path) -> None:
    products = PRODUCTS.replace("{WRITES}", "FADD R152, R0, R1")
    sass = SASS.replace("        /*0000*/                   EXIT ;", products)
    usage = USAGE.replace("STACK:32", "STACK:0").replace("STACK:16", "STACK:0")
    done = run(*fake_cuobjdump(pack.parent, usage, sass), pack)
    assert done.returncode == 1
    assert done.stderr.endswith("(sm_90a) lost the left operands of the products at 0x180\n")


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt")
def test_names_are_short(report: ModuleType) -> None:
    assert report.short_names([SPILLING, PLAIN, ENUMERATOR]) == {
        SPILLING: "spilling_kernel<Config<__half, 128, false>>",
        PLAIN: "dq_kernel_sm90",
        ENUMERATOR: "forward_kernel<KeyStream<64, 1>>",
    }


def test_names_without_a_demangler_are_symbols(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.short_names([PLAIN]) == {PLAIN: PLAIN}


def test_unstated_spills_fail_and_are_named(pack: Path) -> None:
    done = run(*fake_cuobjdump(pack.parent), pack)
    assert done.returncode == 1
    complaints = done.stderr.splitlines()
    assert len(complaints) == 2
    assert complaints[0].endswith("(sm_90a) spills 24 bytes, allowed: 0")
    assert "libflash_dmattn_cu13_sm90.so: " in complaints[1]
    assert "spilling_kernel" in complaints[1]
    assert complaints[1].endswith("(sm_90a) spills 22 bytes, allowed: 0")
    assert "dq_kernel_sm90" in done.stdout
    assert "dq_kernel_sm90" not in done.stderr


def test_no_spills_pass(pack: Path) -> None:
    usage = USAGE.replace("STACK:32", "STACK:0").replace("STACK:16", "STACK:0")
    done = run(*fake_cuobjdump(pack.parent, usage), pack.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [line.split()[:6] for line in done.stdout.splitlines() if line.startswith("sm_")]
    assert ["sm_90a", "255", "0", "0", "0", "1024"] in rows


def test_json_holds_every_kernel(pack: Path) -> None:
    done = run(*fake_cuobjdump(pack.parent), "--json", pack)
    assert done.returncode == 1
    content = json.loads(done.stdout)
    rows = {row["symbol"]: row for row in content["kernels"]}
    assert set(rows) == {SPILLING, PLAIN, ARRAY}
    spilling = rows[SPILLING]
    assert spilling["pack"] == "libflash_dmattn_cu13_sm90.so"
    assert (spilling["arch"], spilling["registers"], spilling["stack"]) == ("sm_90a", 255, 32)
    assert (spilling["spill_stores"], spilling["spill_loads"]) == (14, 8)
    assert len(content["excesses"]) == 2


def test_the_first_allowance_that_fits_counts(report: ModuleType) -> None:
    kernel = report.Kernel("pack.so", "sm_90a", "", "forward_kernel<A, 128>", 255, 32, 0, 14, 8)
    exact = report.Allowance("forward_kernel<*, 128>", "sm_90*", 22, "why")
    assert report.excesses([kernel], [exact]) == []
    tight = report.Allowance("forward_kernel<*, 128>", "sm_90*", 21, "why")
    assert len(report.excesses([kernel], [tight, exact])) == 1
    others = [
        report.Allowance("forward_kernel<*, 64>", "sm_90*", 99, "another head dimension"),
        report.Allowance("forward_kernel<*", "sm_80", 99, "another arch"),
    ]
    assert len(report.excesses([kernel], others)) == 1
    assert report.excesses([kernel], [*others, exact]) == []


def test_allowances_give_reasons(report: ModuleType) -> None:
    for entry in report.ALLOWANCES:
        assert entry.spill_bytes > 0
        assert len(entry.reason.split()) > 3


@pytest.mark.parametrize("what", ["empty folder", "no file", "no kernels", "not a library"])
def test_nothing_to_judge_is_an_error(what: str, pack: Path) -> None:
    usage = USAGE.partition(" Function")[0]
    tool = fake_cuobjdump(pack.parent, usage)
    if what == "not a library":
        Path(tool[1]).write_text("#!/bin/sh\necho 'fatal: no device code' >&2\nexit 255\n")
    path = {"empty folder": pack.parent / "empty", "no file": pack.parent / "absent.so"}.get(what)
    if what == "empty folder":
        (pack.parent / "empty").mkdir()
    done = run(*tool, path or pack)
    assert done.returncode == 1
    message = {
        "no kernels": "holds no kernels",
        "not a library": "failed: fatal: no device code",
    }.get(what, "no CUDA pack")
    assert message in done.stderr
    assert done.stdout == ""


def test_without_cuobjdump_it_says_what_to_do(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(report, "CUDA_FOLDERS", (None, str(tmp_path)))
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"no cuobjdump in PATH.*--cuobjdump"):
        report.find_cuobjdump()
    (tmp_path / "bin").mkdir()
    fake_cuobjdump(tmp_path / "bin")
    assert report.find_cuobjdump() == str(tmp_path / "bin" / "cuobjdump")


@pytest.mark.parametrize(("registers", "status"), [(24, 1), (255, 0)])
def test_a_real_kernel(registers: int, status: int, tmp_path: Path, report: ModuleType) -> None:
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    try:
        cuobjdump = report.find_cuobjdump()
    except SystemExit:
        cuobjdump = None
    if nvcc is None or cuobjdump is None:
        pytest.skip("no nvcc or no cuobjdump")
    source, library = tmp_path / "crowded.cu", tmp_path / "libcrowded.so"
    source.write_text(SPILLING_SOURCE)
    flags = ["-arch=sm_80", f"-maxrregcount={registers}", "-shared", "-cudart=none"]
    subprocess.run([nvcc, *flags, "-Xcompiler=-fPIC", "-o", library, source], check=True)
    done = run("--json", library)
    assert done.returncode == status, done.stderr
    content = json.loads(done.stdout)
    stores = {row["name"]: row["spill_stores"] for row in content["kernels"]}
    assert set(stores) == {"crowded", "roomy"}
    assert (stores["crowded"] > 0) == bool(status)
    assert stores["roomy"] == 0
    assert [sentence.split()[1] for sentence in content["excesses"]] == ["crowded"] * status
