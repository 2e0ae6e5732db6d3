# SPDX-License-Identifier: BSD-3-Clause
"""Rules for the whole project: one place for each fact, a reproducible build."""

from __future__ import annotations

import ast
import graphlib
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import flash_dmattn
from flash_dmattn import _core
from release.project import pyproject_value

ROOT = Path(__file__).resolve().parent.parent
TARGETS: dict[str, Any] = json.loads((ROOT / "cmake" / "targets.json").read_text())
SOURCE_SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".c", ".cu", ".cuh", ".cmake", ".toml"}
SKIPPED_FOLDERS = {"build", "dist", "__pycache__"}


def source_files() -> list[Path]:
    def hidden(path: Path) -> bool:
        parts = path.relative_to(ROOT).parts
        return any(part in SKIPPED_FOLDERS or part.startswith(".") for part in parts)

    return [path for path in ROOT.rglob("*") if path.suffix in SOURCE_SUFFIXES and not hidden(path)]


# --- one place for each fact


def test_installed_version_is_the_declared_one() -> None:
    assert metadata.version("flash-dmattn") == pyproject_value("version")
    assert flash_dmattn.__version__ == pyproject_value("version")


@pytest.mark.parametrize("key", ["version", "requires-python"])
def test_value_is_written_once(key: str) -> None:
    value = pyproject_value(key)
    repeats = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if path != ROOT / "pyproject.toml"
        and not path.is_relative_to(ROOT / "tests")  # they fake installations of several versions
        and f'"{value}"' in path.read_text()
    ]
    assert repeats == []


def test_name_is_written_once() -> None:
    assert pyproject_value("name") == "flash-dmattn"
    assert metadata.metadata("flash-dmattn")["Name"] == pyproject_value("name")


def test_stable_abi_is_that_of_the_floor() -> None:
    floor = pyproject_value("requires-python").removeprefix(">=")
    assert pyproject_value("wheel.py-api") == "cp" + floor.replace(".", "")


def test_what_is_required_is_what_the_module_needs() -> None:
    required = [text for text in metadata.requires("flash-dmattn") or [] if "extra ==" not in text]
    is_shared = str(_core.__file__).endswith(("_core.abi3.so", "_core.pyd"))
    assert required == (["nanobind-backend>=1.0"] if is_shared else [])


def test_cuda_sources_have_one_namespace() -> None:
    names = {
        name
        for path in (ROOT / "cpp" / "cuda").rglob("*.cu*")
        for name in re.findall(r"^namespace (\S+) {", path.read_text(), re.MULTILINE)
    }
    assert names == {"fdm::cuda", "fdm::cuda::ptx"}


def test_inline_assembly_is_in_one_folder() -> None:
    """Replacing that folder then replaces all instructions without a C++ equivalent."""
    cuda = ROOT / "cpp" / "cuda"
    folders = {
        path.parent.relative_to(cuda).as_posix()
        for path in cuda.rglob("*")
        if path.is_file() and re.search(r"\basm\b", path.read_text())
    }
    assert folders == {"ptx"}


def test_inline_assembly_is_included_from_an_include_directory() -> None:
    """An earlier include directory can then replace the whole folder."""
    cuda = ROOT / "cpp" / "cuda"
    names = {
        name
        for path in cuda.rglob("*")
        if path.is_file() and path.parent != cuda / "ptx"
        for name in re.findall(r'#include "(.*)"', path.read_text())
    }
    headers = {path.name for path in (cuda / "ptx").iterdir()}
    found = {name for name in names if "ptx" in Path(name).parts}
    assert found == {f"ptx/{header}" for header in headers}


# --- the table of targets


def capabilities_of(arch: str) -> list[str]:
    capabilities: list[str] = TARGETS["archs"][arch]["capabilities"]
    return capabilities


def test_preference_and_capabilities_say_the_same() -> None:
    served = {capability for arch in TARGETS["archs"] for capability in capabilities_of(arch)}
    assert served == set(TARGETS["preference"])
    for capability, archs in TARGETS["preference"].items():
        able = [arch for arch in TARGETS["archs"] if capability in capabilities_of(arch)]
        assert sorted(archs) == sorted(able), capability
        numbers = [int(arch.removeprefix("sm")) for arch in archs]
        assert numbers == sorted(numbers, reverse=True), "the newest arch is the best"


@pytest.mark.parametrize("arch", sorted(TARGETS["archs"]))
def test_arch_and_its_code_agree(arch: str) -> None:
    entry = TARGETS["archs"][arch]
    assert re.fullmatch(rf"{arch.removeprefix('sm')}[af]?", entry["code"])
    assert re.fullmatch(r"\d+\.\d", entry["min_cuda"])
    assert isinstance(entry["required"], bool)


def test_table_is_installed_unchanged() -> None:
    installed = [Path(folder) / "targets.json" for folder in flash_dmattn.__path__]
    found = [path for path in installed if path.is_file()]
    assert len(found) == 1
    assert json.loads(found[0].read_text()) == TARGETS


def test_manifest_lists_the_installed_packs() -> None:
    folders = [Path(folder) / "packs" for folder in flash_dmattn.__path__]
    (folder,) = [folder for folder in folders if (folder / "manifest.json").is_file()]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["version"] == pyproject_value("version")
    header = (ROOT / "cpp" / "pack.h").read_text()
    assert f"#define FDM_PACK_ABI_VERSION {manifest['abi_version']}\n" in header
    assert {pack["file"] for pack in manifest["packs"]} == {
        path.name for path in folder.glob("*.so")
    }
    assert manifest["packs"][0]["name"] == "cpu"
    for pack in manifest["packs"]:
        content = (folder / pack["file"]).read_bytes()
        assert pack["sha256"] == hashlib.sha256(content).hexdigest()
        assert pack["size"] == len(content)


# --- files


def shell_scripts() -> list[Path]:
    files = [path for folder in ["scripts", ".ci"] for path in (ROOT / folder).iterdir()]
    return [path for path in files if path.is_file() and path.suffix == ""]


def test_shell_scripts_are_small_and_strict() -> None:
    assert shell_scripts()
    for path in shell_scripts():
        text = path.read_text()
        assert text.count("\n") <= 60, path.name
        assert re.search(r"^set -e?uo pipefail$", text, re.MULTILINE), path.name


def test_every_source_names_its_license() -> None:
    files = [path for path in source_files() if path.suffix != ".toml"]
    files += [ROOT / "CMakeLists.txt", *shell_scripts()]
    unmarked = [
        str(path.relative_to(ROOT))
        for path in files
        if path.stat().st_size
        and not any(
            "SPDX-License-Identifier: BSD-3-Clause" in line
            for line in path.read_text().splitlines()[:2]
        )
    ]
    assert unmarked == []


def questions(text: str) -> list[str]:
    """Return the lines of a source with a question in a comment."""
    question = re.compile(r"(?:^|\s)(?://|#|\*) .*\?(?: [A-Z`].*| \*/)?$")
    return [line for line in text.splitlines() if question.search(line)]


def test_comments_state_facts() -> None:
    asked = {
        str(path.relative_to(ROOT)): found
        for path in [*source_files(), *shell_scripts()]
        if path != Path(__file__) and (found := questions(path.read_text()))
    }
    assert asked == {}


@pytest.mark.parametrize(
    ("line", "is_question"),
    [
        ("  // Is it the last?", True),
        ("// Does a tile fit? Not with 128 columns.", True),
        ("  bool more; // is there another step?", True),
        ("    keys: Tensor  # bool (B, K): is a key kept?", True),
        ("//   is_filled(p, plan)      may forward read it?", True),
        (" * Is it there? */", True),
        ("// Whether it is the last.", False),
        ("  return a ? b : c; // a fact", False),
        ('"schema(Tensor? mask)"', False),
    ],
)
def test_questions_are_found(line: str, is_question: bool) -> None:
    assert bool(questions(line)) is is_question


# --- which CUDA packs a build makes


def resolve_archs(**facts: str) -> subprocess.CompletedProcess[str]:
    beside_python = Path(sys.executable).parent / "cmake"
    cmake = str(beside_python) if beside_python.exists() else shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    script = ROOT / "cmake" / "print_cuda_archs.cmake"
    definitions = [f"-D{name}={value}" for name, value in facts.items()]
    return subprocess.run(
        [cmake, *definitions, "-P", str(script)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"MODE": "OFF", "NVCC_VERSION": "13.0", "CAPABILITIES": "9.0"}, ""),
        ({"NVCC_VERSION": "13.0"}, ""),
        ({"CAPABILITIES": "9.0"}, ""),
        ({"NVCC_VERSION": "13.0", "CAPABILITIES": "9.0", "HAVE_SOURCES": "OFF"}, ""),
        ({"NVCC_VERSION": "13.0", "CAPABILITIES": "9.0"}, "sm90"),
        ({"NVCC_VERSION": "13.0", "CAPABILITIES": "8.9;8.0;8.9"}, "sm80 sm89"),
        ({"NVCC_VERSION": "13.0", "CAPABILITIES": "8.7"}, "sm80"),
        ({"NVCC_VERSION": "13.0", "CAPABILITIES": "7.5"}, ""),
        ({"NVCC_VERSION": "12.4", "CAPABILITIES": "10.0"}, ""),
        ({"NVCC_VERSION": "13.0", "CAPABILITIES": "10.3;12.1"}, "sm100 sm120"),
        ({"MODE": "ON", "NVCC_VERSION": "12.4"}, "sm80 sm86 sm89 sm90"),
        ({"MODE": "ON", "NVCC_VERSION": "13.0", "CAPABILITIES": "8.6"}, "sm86"),
        ({"ARCHS": "90;80", "NVCC_VERSION": "13.0"}, "sm80 sm90"),
        ({"ARCHS": "sm_90,8.6 89-real 103", "NVCC_VERSION": "13.0"}, "sm86 sm89 sm90 sm100"),
        ({"ARCHS": "90a", "NVCC_VERSION": "13.0", "CAPABILITIES": "8.0"}, "sm90"),
        ({"ARCHS": "native", "NVCC_VERSION": "13.0", "CAPABILITIES": "8.0"}, "sm80"),
        ({"ARCHS": "all", "NVCC_VERSION": "12.4"}, "sm80 sm86 sm89 sm90"),
        ({"ARCHS": "all", "NVCC_VERSION": "13.0"}, "sm80 sm86 sm89 sm90 sm100 sm110 sm120"),
        ({"AMBIENT": "50-real;80-real;90-real;90-virtual", "NVCC_VERSION": "13.0"}, "sm80 sm90"),
        ({"AMBIENT": "all-major", "NVCC_VERSION": "12.4"}, "sm80 sm86 sm89 sm90"),
        ({"AMBIENT": "80", "ARCHS": "90", "NVCC_VERSION": "13.0"}, "sm90"),
        ({"AMBIENT": "80"}, ""),
    ],
)
def test_resolved_archs(facts: dict[str, str], expected: str) -> None:
    done = resolve_archs(**facts)
    assert done.returncode == 0, done.stderr
    assert f"archs: {expected}\n" in done.stderr
    assert re.search(r"reason: \S+", done.stderr)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"MODE": "ON", "HAVE_SOURCES": "OFF"}, "no CUDA kernels"),
        ({"MODE": "ON"}, "no nvcc was found"),
        ({"ARCHS": "90"}, "no nvcc was found"),
        ({"MODE": "OFF", "ARCHS": "90"}, "FLASH_DMATTN_CUDA is OFF; drop one"),
        ({"ARCHS": "75", "NVCC_VERSION": "13.0"}, 'unknown arch "75"; allowed: sm80, sm86'),
        ({"ARCHS": "hopper", "NVCC_VERSION": "13.0"}, 'unknown arch "hopper"'),
        ({"ARCHS": "90-virtual", "NVCC_VERSION": "13.0"}, 'unknown arch "90-virtual"'),
        ({"ARCHS": "7.5", "NVCC_VERSION": "13.0"}, 'unknown arch "7.5"'),
        ({"ARCHS": "native", "NVCC_VERSION": "13.0"}, "no supported GPU is visible"),
        ({"ARCHS": "100", "NVCC_VERSION": "12.4"}, "sm100, which needs CUDA 12.9 or newer"),
        ({"AMBIENT": "50;75", "NVCC_VERSION": "13.0"}, '("50;75") leaves no arch to build'),
        ({"AMBIENT": "native", "NVCC_VERSION": "13.0"}, "leaves no arch to build"),
        ({"MODE": "ON", "NVCC_VERSION": "13.0", "CAPABILITIES": "7.5"}, "leaves no arch to build"),
    ],
)
def test_unresolvable_archs(facts: dict[str, str], message: str) -> None:
    done = resolve_archs(**facts)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


# --- tiles of another arch, for tests


def test_stand_ins_are_other_archs() -> None:
    assert list(TARGETS["stands_in_for"]) == list(TARGETS["archs"])
    for arch, others in TARGETS["stands_in_for"].items():
        assert set(others) <= set(TARGETS["archs"]) - {arch}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"ARCHS": "90", "TILES": ""}, ""),
        ({"ARCHS": "90", "TILES": "86"}, "sm86"),
        ({"ARCHS": "90", "TILES": "sm_89"}, "sm89"),
        ({"ARCHS": "80;90", "TILES": "sm86"}, "sm86"),
    ],
)
def test_resolved_tiles(facts: dict[str, str], expected: str) -> None:
    done = resolve_archs(NVCC_VERSION="13.0", **facts)
    assert done.returncode == 0, done.stderr
    assert f"tiles: {expected}\n" in done.stderr


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"MODE": "OFF", "TILES": "86"}, 'TILES is "86" but no CUDA pack is built'),
        ({"ARCHS": "90", "TILES": "75"}, "a pack of sm90 can use the tiles of: sm80, sm86, sm89"),
        ({"ARCHS": "90", "TILES": "90"}, 'TILES is "90"; a pack of sm90'),
        ({"ARCHS": "90", "TILES": "80;86"}, 'TILES is "80;86"; a pack of sm90'),
        ({"ARCHS": "90", "TILES": "native"}, 'TILES is "native"; a pack of sm90'),
        ({"ARCHS": "86;90", "TILES": "80"}, 'TILES is "80"; a pack of sm86 can use'),
        ({"ARCHS": "80", "TILES": "90"}, "a pack of sm80 can use the tiles of: sm86, sm89, sm120"),
    ],
)
def test_unresolvable_tiles(facts: dict[str, str], message: str) -> None:
    done = resolve_archs(NVCC_VERSION="13.0", **facts)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


# --- modules


PACKAGE = ROOT / "python" / "flash_dmattn"


def package_modules() -> dict[str, Path]:
    """Return the package's modules without the package itself, which resolves its names lazily."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[PACKAGE.name]
    return found


def imported_modules(name: str, modules: dict[str, Path]) -> set[str]:
    """Return the given modules that a module imports, also within its functions."""
    here = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), here)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in modules else base)
    return (found & modules.keys()) - {name}


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = package_modules()
    needs = {name: imported_modules(name, modules) for name in modules}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
    graphlib.TopologicalSorter(needs).prepare()


@pytest.mark.parametrize("package", [".", "loader", "backends", "selftest"])
def test_an_init_file_holds_names_alone(package: str) -> None:
    """It may also hold the lazy lookup of names, in the functions that Python calls for it."""
    tree = ast.parse((PACKAGE / package / "__init__.py").read_text())
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions in ([], ["__getattr__", "__dir__"])
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.FunctionDef, ast.If)
    assert [node for node in tree.body if not isinstance(node, allowed)] == []
