# SPDX-License-Identifier: BSD-3-Clause
"""Every text by which the loader explains itself; docs/install.md tells cause and fix of
each.

They stand in one place so that tests can compare each of them with the page and with a stored
example. What is in braces is filled in.
"""

from __future__ import annotations

__all__ = ["catalogue"]

# --- the heading of an error, and warnings

NO_PACK = "no kernel pack serves {device}"
PLAIN_PYTORCH = (
    "flash_dmattn runs on {device} in plain PyTorch, slowly and with Q x K memory, because no "
    "kernel pack serves the device. Set FLASH_DMATTN_FALLBACK=error to make this an error."
)
PASSED_OVER = (
    "flash_dmattn uses the kernel pack {chosen} on {device}, because a better one is damaged. Set "
    "FLASH_DMATTN_FALLBACK=error to make this an error."
)

# --- why a pack cannot serve a device

DEVICE_KIND = "it is for {device} devices"
NO_DRIVER = "there is no NVIDIA driver"
NOT_NVIDIA = "it is for NVIDIA GPUs, torch is built for {platform}"
NO_DEVICE = "the NVIDIA driver shows no device {device}"
NO_ARCH = "no pack supports compute capability {capability}; supported are {supported}"
WRONG_ARCH = "{arch} code does not run on compute capability {capability}"
WRONG_MACHINE = "it was built for {built}, this machine is {machine}"
OLD_DRIVER = "CUDA {major} needs NVIDIA driver {floor} or newer, found {driver}"
UNKNOWN_CUDA = "CUDA {major} is unknown to this flash_dmattn"
WRONG_ABI = "it has pack ABI {found}, this flash_dmattn needs {wanted}"
WRONG_VERSION = "it is of version {found}, flash_dmattn is {wanted}"
OTHER_FILE = "FLASH_DMATTN_LIBRARY_PATH={path} names another file"
OTHER_CUDA = "FLASH_DMATTN_CUDA={major} asks for another CUDA"
OTHER_ARCH = "FLASH_DMATTN_ARCH={arch} asks for another arch"
FALLBACK_FORBIDDEN = "FLASH_DMATTN_FALLBACK=error lets nothing replace {name}"

# --- what is wrong with a file

FILE_MISSING = "the file is missing"
CANNOT_OPEN = "it cannot be opened: {error}"
NOT_ELF = "{path}: it is no shared library of a 64-bit Linux"
TRUNCATED = "{path}: it is truncated: it has {size} bytes, its headers tell of {needed}"
FOREIGN_ELF = "{path}: it was built for {built}, this machine is {machine}"
ELF_MACHINE = "ELF machine {number}"
DIFFERENCE = "its manifest says {what} {said}, the file says {found}"
MANIFEST = "the manifest cannot be used: {error}"
MANIFEST_LACKS = "the manifest cannot be used: it lacks {key}"
MANIFEST_SCHEMA = "schema {found}, but this flash_dmattn reads {known}"
ENTRY_POINT = "its entry point cannot be loaded: {kind}: {error}"
ENTRY_POINT_TYPE = "it must give a module or a path, got {kind}"
ENTRY_POINT_FILE = "the module {name} has no file"

# --- why nothing can be decided

NO_CORE = "the extension module flash_dmattn._core cannot be imported: {error}"
NO_TABLE = "no file {paths}"
TABLE_JSON = "{path} is not JSON: {error}"
TABLE_SCHEMA = "targets.json has schema {found}, this flash_dmattn reads {known}"
TABLE_FIELDS = "targets.json cannot be understood: {error}"

# --- environment variables

BAD_VALUE = "{name} must be one of {allowed}, got {value}."
NO_SIMD = "{name} must be one of {allowed}, which this CPU has, got {value}."
UNKNOWN_VARIABLE = "unknown environment variable {name}."
DID_YOU_MEAN = " Did you mean {near}?"

# --- what FLASH_DMATTN_BACKEND makes of a device, in python -m flash_dmattn

COMPUTED_BY = "are computed by FLASH_DMATTN_BACKEND={backend}"
LEFT_ASIDE = "raise an error: FLASH_DMATTN_BACKEND={backend} is for {backend} tensors"
CALLS_RAISE = "raise an error: FLASH_DMATTN_BACKEND={backend}: {reason}"
NO_PYTORCH = "PyTorch cannot be imported: {error}"

# --- what is worth knowing of a pack that can serve

BETTER_ARCH = "{arch} would suit the device better"
OTHER_MAJOR = "built by CUDA {major}, torch by CUDA {torch}"
OTHER_VERSION = "of version {found}, flash_dmattn is {wanted}"
SAME_NAME = "{source} has a pack of the same name, which goes first"

# --- python -m flash_dmattn --verify

CHANGED = "its {algorithm} is {found}, but {record} says {recorded}"
RESIZED = "it has {found} bytes, but {record} says {recorded}"
UNREADABLE = "it cannot be read: {error}"
NOT_RECORDED = "no hash of it is recorded"


def catalogue() -> dict[str, str]:
    """Return the texts by their names."""
    return {name: text for name, text in globals().items() if name.isupper()}
