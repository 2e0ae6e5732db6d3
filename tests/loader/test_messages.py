# SPDX-License-Identifier: BSD-3-Clause
"""Every text by which the loader explains itself, compared with its stored form in messages/.

With FDM_WRITE_MESSAGES=1 the stored forms are written anew, for a reader to compare.
"""

import ast
import inspect
import os
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from flash_dmattn import _core
from flash_dmattn.loader import (
    Loader,
    NoPackError,
    candidates,
    elf,
    environment,
    errors,
    facts,
    messages,
    open_pack,
    policy,
    remedies,
    resolver,
    targets,
    verify,
)
from flash_dmattn.loader.facts import Host
from flash_dmattn.loader.report import make_report, render
from pack_files import compile_library, compile_table, real_pack, write_foreign

STORED = Path(__file__).parent / "messages"
SCENARIOS = {}


def scenario(function):
    """Register a function from an installation to the text that a user sees."""
    SCENARIOS[function.__name__] = function
    return function


def error_of(loader, *device):
    with pytest.raises(NoPackError) as caught:
        loader.pack_for(*device)
    return str(caught.value)


def warning_of(loader, *device):
    with pytest.warns(errors.FallbackWarning) as caught:
        loader.pack_for(*device)
    (warning,) = caught
    assert warning.filename == __file__  # it points at the caller, not into the package
    return str(warning.message)


def real_loader(installation, open_file=open_pack, entry_points=()):
    """A loader that opens files as the package does."""
    return Loader(
        installation.facts,
        open_file,
        lambda: _core.PACK_ABI_VERSION,
        lambda: [installation.root],
        lambda: list(entry_points),
        installation.environ,
    )


# --- GPUs and drivers


@scenario
def gpu_without_support(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("7.5")
    installation.use_torch("13.0")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def gpu_whose_pack_was_not_built(installation):
    installation.write("cpu", "cu12-sm80")
    installation.gpus("9.0")
    installation.use_torch(None)
    return error_of(installation.loader(), "cuda", 0)


@scenario
def newer_gpu_whose_pack_was_not_built(installation):
    installation.write("cpu", "cu12-sm90", "cu13-sm90")
    installation.gpus("10.0")
    installation.use_torch("13.0")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def gpu_without_any_gpu_pack(installation):
    installation.write("cpu")
    installation.gpus("8.9")
    installation.use_torch("12.8")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def old_driver(installation):
    installation.write("cpu", "cu12-sm90", "cu13-sm90")
    installation.gpus("9.0", driver="470.256.02", runs="11.4")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def driver_for_cuda_12_and_packs_for_13(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0", driver="550.54.15", runs="12.4")
    installation.use_torch("12.4")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def no_driver(installation):
    installation.write("cpu", "cu13-sm90")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def no_driver_and_no_gpu_pack(installation):
    installation.write("cpu")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def hidden_gpu(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0")
    return error_of(installation.loader(), "cuda", 1)


@scenario
def unknown_kind_of_device(installation):
    installation.write("cpu")
    return error_of(installation.loader(), "mps", 0)


# --- packs that do not fit


@scenario
def no_packs_at_all(installation):
    return error_of(installation.loader(), "cpu")


@scenario
def other_machine(installation):
    installation.write("cpu")
    installation.facts.host_ = Host("aarch64", "glibc 2.35")
    return error_of(installation.loader(), "cpu")


@scenario
def unknown_cuda(installation):
    installation.distribute("flash-dmattn-cu14", "cu14-sm90")
    installation.gpus("9.0")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def other_pack_abi(installation):
    installation.write("cpu", abi_version=2)
    return error_of(installation.loader(), "cpu")


@scenario
def distribution_of_another_version(installation):
    installation.write("cpu")
    installation.distribute("flash-dmattn-cu13", "cu13-sm90", version="1.9")
    installation.gpus("9.0")
    return error_of(installation.loader(), "cuda", 0)


@scenario
def what_is_worth_knowing_of_accepted_packs(installation):
    installation.write("cpu", "cu12-sm86")
    installation.distribute("flash-dmattn-cu12", "cu12-sm86", "cu12-sm80")
    installation.gpus("8.9")
    installation.use_torch("13.0")
    return str(installation.loader().trace_for("cuda", 0))


# --- variables


@scenario
def forced_arch(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0")
    installation.environ["FLASH_DMATTN_ARCH"] = "80"
    return error_of(installation.loader(), "cuda", 0)


@scenario
def forced_cuda(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0")
    installation.environ["FLASH_DMATTN_CUDA"] = "12"
    return error_of(installation.loader(), "cuda", 0)


@scenario
def forced_file_that_is_absent(installation):
    installation.write("cpu")
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(installation.root / "absent.so")
    return error_of(installation.loader(), "cpu")


@scenario
def forced_file_that_is_no_pack(installation):
    installation.write("cpu")
    path = compile_library("int nothing(void) { return 0; }", installation.root / "other.so")
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(path)
    return error_of(real_loader(installation), "cpu")


@scenario
def forced_file_of_another_version(installation):
    installation.write("cpu", "cu13-sm90")
    folder = installation.distribute("development", "cu12-sm90", version="1.0")
    installation.entry_points.clear()
    path = folder / "libflash_dmattn_cu12_sm90.so"
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(path)
    installation.gpus("9.0")
    return str(installation.loader().trace_for("cuda", 0))


@scenario
def value_that_is_not_allowed(installation):
    installation.environ["FLASH_DMATTN_BACKEND"] = "refrence"
    with pytest.raises(environment.InvalidVariableError) as caught:
        environment.get("FLASH_DMATTN_BACKEND", installation.environ)
    return str(caught.value)


@scenario
def unknown_variable(installation):
    installation.write("cpu")
    installation.environ["FLASH_DMATTN_ARHC"] = "80"
    with pytest.warns(environment.UnknownVariableWarning) as caught:
        installation.loader().pack_for("cpu")
    return str(caught[0].message)


# --- damaged files


@scenario
def missing_file(installation):
    installation.write("cpu")
    (installation.packs / "libflash_dmattn_cpu.so").unlink()
    return error_of(installation.loader(), "cpu")


@scenario
def text_file(installation):
    installation.write("cpu")
    return error_of(real_loader(installation), "cpu")  # the files of write() hold JSON


@scenario
def truncated_file(installation):
    installation.write("cpu")
    path = installation.packs / "libflash_dmattn_cpu.so"
    path.write_bytes(real_pack().read_bytes()[:4096])
    text = error_of(real_loader(installation), "cpu")
    return re.sub(r"headers tell of \d+", "headers tell of <size>", text)


@scenario
def file_of_another_machine(installation):
    installation.write("cpu")
    write_foreign(installation.packs / "libflash_dmattn_cpu.so", 243)
    text = error_of(real_loader(installation), "cpu")
    return text.replace(facts.Machine().host().machine, "x86_64")


@scenario
def file_that_needs_an_absent_library(installation):
    installation.write("cpu")
    (installation.root / "here").mkdir()
    needed = compile_library(
        "int f(void) { return 0; }",
        installation.root / "here" / "libcudart.so.99",
        "-Wl,-soname,libcudart.so.99",
    )
    path = installation.packs / "libflash_dmattn_cpu.so"
    source = "int f(void); int g(void) { return f(); }"
    compile_library(source, path, str(needed), "-Wl,--no-as-needed")
    needed.unlink()
    return error_of(real_loader(installation), "cpu")


def failing(text):
    def opening(path):
        raise RuntimeError(f"{path}: dlopen failed: {path.rpartition('/')[2]}: {text}")

    return opening


@scenario
def file_that_needs_a_newer_libc(installation):
    installation.write("cpu")
    text = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found"
    return error_of(real_loader(installation, failing(text)), "cpu")


@scenario
def file_system_that_forbids_code(installation):
    installation.write("cpu")
    text = "failed to map segment from shared object"
    return error_of(real_loader(installation, failing(text)), "cpu")


@scenario
def file_unlike_its_manifest(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0")
    path = installation.packs / "libflash_dmattn_cu13_sm90.so"
    path.write_text(path.read_text().replace('"arch": 90', '"arch": 80'))
    return error_of(installation.loader(), "cuda", 0)


def core_text(fields):
    def give(installation):
        installation.write("cpu")
        compile_table(fields, installation.packs / "libflash_dmattn_cpu.so")
        return error_of(real_loader(installation), "cpu")

    return give


NAMES = '.name = "cpu", .version = "1", .compiler = "c", .features = ""'
SCENARIOS["table_of_another_abi"] = core_text(".abi_version = 9")
SCENARIOS["table_that_is_too_small"] = core_text(".struct_size = 8")
SCENARIOS["table_without_names"] = core_text(".max_head_dim = 64")
SCENARIOS["table_without_entry_points"] = core_text(NAMES)


@scenario
def no_table_at_all(installation):
    installation.write("cpu")
    source = "const void *flash_dmattn_pack(void) { return 0; }"
    compile_library(source, installation.packs / "libflash_dmattn_cpu.so")
    return error_of(real_loader(installation), "cpu")


@scenario
def damaged_pack_with_a_replacement(installation):
    installation.write("cu12-sm90", "cu13-sm90")
    installation.gpus("9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").write_text("garbage")
    return warning_of(installation.loader(), "cuda", 0)


@scenario
def damaged_pack_whose_replacement_is_forbidden(installation):
    installation.write("cu12-sm90", "cu13-sm90")
    installation.gpus("9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").unlink()
    installation.environ["FLASH_DMATTN_FALLBACK"] = "error"
    return error_of(installation.loader(), "cuda", 0)


@scenario
def plain_pytorch(installation):
    installation.write("cpu")
    installation.gpus("7.5")
    with pytest.raises(NoPackError) as caught:
        installation.loader().pack_for("cuda", 0)
    with pytest.warns(errors.FallbackWarning) as warned:
        errors.warn_of_plain_pytorch("cuda:0", caught.value)
    return str(warned[0].message)


# --- manifests and entry points


def manifest_text(content):
    def give(installation):
        installation.write("cpu")
        (installation.packs / "manifest.json").write_text(content)
        return error_of(installation.loader(), "cpu")

    return give


SCENARIOS["manifest_of_another_schema"] = manifest_text('{"schema": 2}')
SCENARIOS["manifest_without_packs"] = manifest_text('{"schema": 1}')
SCENARIOS["manifest_that_is_not_json"] = manifest_text("{")


@scenario
def entry_points_that_fail(installation):
    def broken():
        raise AttributeError("no such thing")

    installation.add_entry_point("broken", broken)
    installation.add_entry_point("number", lambda: 3)
    module = ModuleType("frozen")
    module.__file__ = None
    installation.add_entry_point("without-file", lambda: module)
    installation.add_entry_point("without-manifest", lambda: installation.root / "nothing")
    return error_of(installation.loader(), "cpu")


# --- the core and the table


def core_that_fails(reason):
    def give(installation):
        def abi_version():
            raise ImportError(reason)

        directories = [installation.root]
        loader = Loader(
            installation.facts, None, abi_version, lambda: directories, list, environ={}
        )
        return error_of(loader, "cpu")

    return give


SCENARIOS["core_without_its_backend"] = core_that_fails(
    "the nanobind backend module 'nanobind_backend' is not installed"
)
SCENARIOS["core_that_is_absent"] = core_that_fails("cannot import name '_core'")


def targets_text(content):
    def give(installation):
        installation.write("cu13-sm90")
        installation.gpus("9.0")
        path = installation.root / "targets.json"
        path.unlink()
        if content is not None:
            path.write_text(content)
        return error_of(installation.loader(), "cuda", 0)

    return give


SCENARIOS["table_of_targets_that_is_absent"] = targets_text(None)
SCENARIOS["table_of_targets_that_is_not_json"] = targets_text("[")
SCENARIOS["table_of_targets_of_another_schema"] = targets_text('{"schema": 7}')
SCENARIOS["table_of_targets_without_its_fields"] = targets_text('{"schema": 1}')


# --- python -m flash_dmattn


@scenario
def report_with_a_warning(installation):
    installation.write("cpu", "cu12-sm90", "cu13-sm90")
    installation.gpus("9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").write_text("garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a report warns in its text alone
        report = make_report(installation.loader(), {})
    report["versions"] = dict.fromkeys(report["versions"], "1.0")
    report["host"]["system"] = "Linux"
    return render(report)


@scenario
def verification(installation):
    folder = installation.root / "files"
    folder.mkdir()
    rows = []
    for name in ("whole", "changed", "resized", "gone", "folder"):
        (folder / name).write_text(name)
        size = len(name) + (name == "resized")
        digest = verify.hashlib.sha256(b"whole").hexdigest()
        rows.append(verify.Recorded(str(folder / name), "RECORD", "sha256", digest, size))
    (folder / "gone").unlink()
    (folder / "folder").unlink()
    (folder / "folder").mkdir()
    rows[-1] = verify.Recorded(rows[-1].path, "RECORD", "sha256", "", None)
    (folder / "unrecorded").touch()
    found = [
        candidates.Candidate("new", str(folder / "unrecorded"), "flash_dmattn", device="cpu"),
        *candidates.manifest_candidates(folder / "nothing", "flash_dmattn"),
    ]
    return verify.render(verify.verify(found, lambda distribution: rows))


# --- the checks


@pytest.mark.parametrize("name", SCENARIOS)
def test_text(installation, name):
    text = SCENARIOS[name](installation).replace(str(installation.root.parent), "<folder>") + "\n"
    path = STORED / f"{name}.txt"
    if os.environ.get("FDM_WRITE_MESSAGES") == "1":
        path.write_text(text)
        pytest.fail("written anew, not compared")
    assert text == path.read_text()


def stored_texts() -> str:
    return "\n".join(path.read_text() for path in sorted(STORED.glob("*.txt")))


def test_no_stored_text_is_left_over():
    assert {path.stem for path in STORED.glob("*.txt")} == set(SCENARIOS)


@pytest.mark.parametrize("name", messages.catalogue())
def test_every_text_has_a_stored_example(name):
    parts = re.split(r"\{\w+\}", messages.catalogue()[name])
    assert re.search(".+?".join(map(re.escape, parts)), stored_texts()), messages.catalogue()[name]


def test_every_text_of_the_core_has_a_stored_example():
    source = (Path(__file__).parents[2] / "cpp" / "core" / "library.cpp").read_text()
    calls = re.findall(r"refuse\(path_?, (.*?)\);", source, re.DOTALL)
    assert len(calls) >= 7
    for call in calls:
        longest = max(re.findall(r'"((?:[^"\\]|\\.)*)"', call), key=len)
        if longest != "no reason given":  # what dlerror() never leaves out
            assert longest in stored_texts(), call


@pytest.mark.parametrize("make", ["build", "install_wheel", "reinstall", "install_backend"])
def test_every_command_that_is_offered_is_one_of_pip(make):
    arguments = {"build": ("sm90", "2.0"), "install_backend": ()}.get(make, ("2.0",))
    assert getattr(remedies, make)(*arguments).startswith("python -m pip install ")


@pytest.mark.parametrize("module", [candidates, elf, errors, policy, resolver, targets, verify])
def test_no_text_stands_outside_of_the_catalogue(module):
    """A sentence is a literal with two spaces; docstrings and log formats are for no user."""
    tree = ast.parse(inspect.getsource(module))
    exempt = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            exempt.add(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "logger":
                exempt.update(node.args)
    sentences = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in exempt
        and node.value.strip().count(" ") >= 2
    ]
    assert sentences == []


def test_a_distribution_without_a_record_has_nothing_to_verify():
    assert list(verify.records_of("no-such-distribution")) == []
