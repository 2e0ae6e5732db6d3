# SPDX-License-Identifier: BSD-3-Clause
"""All texts of the loader; docs/troubleshooting.md has the cause and the fix of each.

They are in one place so that tests can compare each with the page and with a stored example. Fields
in braces are filled in; the texts of `rules.ROWS` access fields of a `Case`.
"""

from __future__ import annotations

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

UNTESTED_GPU = (
    "flash_dmattn uses the kernel pack {chosen} on {device}, a GPU that it was never tested on by "
    "its makers; its self-test has just passed there, which is remembered."
)

# --- reasons why a pack cannot serve a device

DEVICE_KIND = "it is for {pack.device} devices"
NO_DRIVER = "there is no NVIDIA driver"
NOT_NVIDIA = "it is for NVIDIA GPUs, torch is built for {need.platform}"
NO_DEVICE = "the NVIDIA driver shows no device {facts.device}"
NO_ARCH = (
    "no pack supports compute capability {facts.device.capability}; supported are {need.supported}"
)
WRONG_ARCH = "{pack.arch} code does not run on compute capability {facts.device.capability}"
WRONG_MACHINE = "it was built for {pack.machine}, this machine is {facts.host.machine}"
OLD_DRIVER = (
    "CUDA {pack.cuda_major} code for {pack.arch} needs NVIDIA driver {case.floor} or newer, found "
    "{facts.driver}"
)
UNKNOWN_CUDA = "CUDA {pack.cuda_major} is unknown to this flash_dmattn"
WRONG_ABI = "it has pack ABI {pack.abi_version}, this flash_dmattn needs {facts.abi_version}"
UNTRIED = (
    "it was never run on compute capability {facts.device.capability}; FLASH_DMATTN_UNTRIED=1 lets "
    "it serve"
)
TRIAL_FAILED = "its self-test did not pass on this GPU: {failure}"
TRIAL_DIFFERS = (
    "{row.result} of {row.dtype}, {row.case}, differs by {row.error:.1e}, and may by "
    "{row.tolerance:.0e}"
)
TRIAL_ENDED_PROCESS = "it ended the process"
TRIAL_IN_CAPTURE = "a CUDA graph is captured; call flash_dmattn once before"
WRONG_VERSION = "it is of version {pack.version}, flash_dmattn is {facts.package_version}"
OTHER_FILE = "FLASH_DMATTN_LIBRARY_PATH={need.wishes.library_path} names another file"
OTHER_CUDA = "FLASH_DMATTN_CUDA={need.wishes.cuda} asks for another CUDA"
OTHER_ARCH = "FLASH_DMATTN_ARCH={need.wishes.arch} asks for another arch"
FALLBACK_FORBIDDEN = "FLASH_DMATTN_FALLBACK=error lets nothing replace {name}"

# --- defects of a file

FILE_MISSING = "the file is missing"
CANNOT_OPEN = "it cannot be opened: {error}"
NO_LIBRARY = "{path}: it is no shared library of a 64-bit {system}"
TRUNCATED = "{path}: it is truncated: it has {size} bytes, its headers tell of {needed}"
FOREIGN_LIBRARY = "{path}: it was built for {built}, this machine is {machine}"
UNKNOWN_MACHINE = "{form} machine {number}"
DIFFERENCE = "its manifest says {what} {said}, the file says {found}"
MANIFEST = "the manifest cannot be used: {error}"
MANIFEST_LACKS = "the manifest cannot be used: it lacks {key}"
MANIFEST_SCHEMA = "schema {found}, but this flash_dmattn reads {known}"
MANIFEST_FILE = "the file of {name} is {file!r}, which is no name of a file beside the manifest"
ENTRY_POINT = "its entry point cannot be loaded: {kind}: {error}"
ENTRY_POINT_TYPE = "it must give a module or a path, got {kind}"
ENTRY_POINT_FILE = "the module {name} has no file"

# --- reasons why nothing can be decided

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

# --- outcomes of FLASH_DMATTN_BACKEND for a device, in python -m flash_dmattn

COMPUTED_BY = "are computed by FLASH_DMATTN_BACKEND={backend}"
LEFT_ASIDE = "raise an error: FLASH_DMATTN_BACKEND={backend} is for {backend} tensors"
CALLS_RAISE = "raise an error: FLASH_DMATTN_BACKEND={backend}: {reason}"
NO_PYTORCH = "PyTorch cannot be imported: {error}"

# --- notes on a pack that can serve

TRIAL_FIRST = (
    "never run on compute capability {facts.device.capability}; it serves if its self-test passes "
    "on first use"
)
TRIAL_PASSED = (
    "never run by its makers on compute capability {facts.device.capability}; its self-test passed "
    "here"
)
NEVER_RUN = "never run on compute capability {facts.device.capability}"
RUN_ELSEWHERE = "its tiles were run on GPUs of another compute capability only"
BETTER_ARCH = "{need.archs[0]} would suit the device better"
OTHER_MAJOR = "built by CUDA {pack.cuda_major}, torch by CUDA {need.torch_major}"
OTHER_VERSION = "of version {pack.version}, flash_dmattn is {facts.package_version}"
SAME_NAME = "{source} has a pack of the same name, which goes first"

# --- python -m flash_dmattn --verify

CHANGED = "its {algorithm} is {found}, but {record} says {recorded}"
RESIZED = "it has {found} bytes, but {record} says {recorded}"
UNREADABLE = "it cannot be read: {error}"
NOT_RECORDED = "no hash of it is recorded"


def catalogue() -> dict[str, str]:
    """Return the texts by name."""
    return {name: text for name, text in globals().items() if name.isupper()}
