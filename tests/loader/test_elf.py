# SPDX-License-Identifier: BSD-3-Clause
"""Files that must not reach the system's loader: some would kill the process."""

import subprocess

import pytest

from flash_dmattn.loader import elf, open_pack
from flash_dmattn.loader.errors import LibraryFileError
from flash_dmattn.loader.facts import Machine
from pack_files import compile_library, real_pack, write_foreign

HERE = Machine().host().machine


def test_the_packs_of_this_installation_are_whole():
    elf.check(str(real_pack()), HERE)


def test_any_library_of_this_machine_passes(tmp_path):
    library = compile_library("int nothing(void) { return 0; }", tmp_path / "lib.so")
    elf.check(str(library), HERE)
    subprocess.run(["strip", library], check=True)
    elf.check(str(library), HERE)


@pytest.mark.parametrize("part", [0.0002, 0.01, 0.25, 0.5, 0.75, 0.999999])
def test_a_file_that_was_cut_off_is_refused(tmp_path, part):
    content = real_pack().read_bytes()
    path = tmp_path / "cut.so"
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(LibraryFileError, match=r"cut\.so: it is truncated: it has \d+ bytes"):
        open_pack(str(path))


def test_without_section_headers_the_segments_tell(tmp_path):
    content = bytearray(real_pack().read_bytes())
    content[40:48] = bytes(8)  # e_shoff
    content[60:62] = bytes(2)  # e_shnum
    path = tmp_path / "no_sections.so"
    path.write_bytes(content)
    elf.check(str(path), HERE)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(LibraryFileError, match="truncated"):
        elf.check(str(path), HERE)


@pytest.mark.parametrize(
    "content", [b"", b"\x7fEL", b"not a library\n", b"\x7fELF\x01\x01" + bytes(100)]
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.so"
    path.write_bytes(content)
    with pytest.raises(LibraryFileError, match="it is no shared library of a 64-bit Linux"):
        open_pack(str(path))


@pytest.mark.parametrize(
    ("machine", "name"), [(62, "x86_64"), (183, "aarch64"), (243, "ELF machine 243")]
)
def test_another_machine_is_named(tmp_path, machine, name):
    path = write_foreign(tmp_path / "foreign.so", machine)
    if name == HERE:
        elf.check(str(path), HERE)
        return
    with pytest.raises(LibraryFileError) as caught:
        elf.check(str(path), HERE)
    assert str(caught.value) == f"{path}: it was built for {name}, this machine is {HERE}"


def test_a_folder_and_an_absent_file_are_system_errors(tmp_path):
    for path in (tmp_path, tmp_path / "absent.so"):
        with pytest.raises(OSError, match=str(path)):
            open_pack(str(path))
