# SPDX-License-Identifier: BSD-3-Clause
"""Damaged and foreign files that the loader reports."""

import json
import re
from types import ModuleType

import pytest
from scenarios import Scenarios, error_of, real_loader, warning_of

from flash_dmattn import _core
from flash_dmattn.loader import Loader, NoPackError, errors, facts
from pack_files import compile_library, compile_table, real_pack, write_foreign

SCENARIOS = Scenarios()


# --- damaged files


@SCENARIOS.add
def missing_file(installation):
    installation.write("cpu")
    (installation.packs / "libflash_dmattn_cpu.so").unlink()
    return error_of(installation.loader(), "cpu")


@SCENARIOS.add
def text_file(installation):
    installation.write("cpu")
    return error_of(real_loader(installation), "cpu")  # the files of write() hold JSON


@SCENARIOS.add
def truncated_file(installation):
    installation.write("cpu")
    path = installation.packs / "libflash_dmattn_cpu.so"
    path.write_bytes(real_pack().read_bytes()[:4096])
    text = error_of(real_loader(installation), "cpu")
    return re.sub(r"headers tell of \d+", "headers tell of <size>", text)


@SCENARIOS.add
def file_of_another_machine(installation):
    installation.write("cpu")
    write_foreign(installation.packs / "libflash_dmattn_cpu.so", 243)
    text = error_of(real_loader(installation), "cpu")
    return text.replace(facts.Machine().host().machine, "x86_64")


@SCENARIOS.add
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


@SCENARIOS.add
def file_that_needs_a_newer_libc(installation):
    installation.write("cpu")
    text = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found"
    return error_of(real_loader(installation, failing(text)), "cpu")


@SCENARIOS.add
def file_system_that_forbids_code(installation):
    installation.write("cpu")
    text = "failed to map segment from shared object"
    return error_of(real_loader(installation, failing(text)), "cpu")


@SCENARIOS.add
def file_unlike_its_manifest(installation):
    installation.set_up("cpu", "cu13-sm90", gpu="9.0")
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
SCENARIOS["table_of_another_abi"] = core_text(f".abi_version = {_core.PACK_ABI_VERSION + 1}")
SCENARIOS["table_that_is_too_small"] = core_text(".struct_size = 8")
SCENARIOS["table_without_names"] = core_text(".max_head_dim = 64")
SCENARIOS["table_without_entry_points"] = core_text(NAMES)


@SCENARIOS.add
def no_table_at_all(installation):
    installation.write("cpu")
    source = "const void *flash_dmattn_pack(void) { return 0; }"
    compile_library(source, installation.packs / "libflash_dmattn_cpu.so")
    return error_of(real_loader(installation), "cpu")


@SCENARIOS.add
def damaged_pack_with_a_replacement(installation):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").write_text("garbage")
    return warning_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def damaged_pack_whose_replacement_is_forbidden(installation):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").unlink()
    installation.environ["FLASH_DMATTN_FALLBACK"] = "error"
    return error_of(installation.loader(), "cuda", 0)


@SCENARIOS.add
def plain_pytorch(installation):
    installation.set_up("cpu", gpu="7.5")
    with pytest.raises(NoPackError) as caught:
        installation.loader().pack_for("cuda", 0)
    with pytest.warns(errors.FallbackWarning) as warned:
        errors.warn(errors.plain_pytorch_text("cuda:0", caught.value))
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


@SCENARIOS.add
def manifest_of_files_elsewhere(installation):
    installation.write("cpu")
    manifest = installation.packs / "manifest.json"
    content = json.loads(manifest.read_text())
    name = content["packs"][0]["file"]
    good = installation.packs / name  # all names but those of Windows resolve to it or to a folder
    texts = []
    for file in (str(good), f"../packs/{name}", f"./{name}", "..", "", f"C:{name}", f"a\\{name}"):
        content["packs"][0]["file"] = file
        manifest.write_text(json.dumps(content))
        texts.append(error_of(installation.loader(), "cpu"))
        assert not installation.opened
    return "\n\n".join(texts)


@SCENARIOS.add
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
        installation.set_up("cu13-sm90", gpu="9.0")
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
