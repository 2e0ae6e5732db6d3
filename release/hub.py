# SPDX-License-Identifier: BSD-3-Clause
"""Makes a repository for Hugging Face's kernels hub from wheels.

Each wheel is built for one Python (``FDM_NANOBIND=linked``). All wheels have the same version and
machine; the packs come from the first. Each variant renames the package ``flash_dmattn`` and its
operators, so that it can share a process with an installed flash-dmattn and with other builds.
There is a variant for CPUs, and one for each CUDA major of the packs. They serve every PyTorch from
the oldest supported one on, since nothing in them links PyTorch. The repository's owner uploads the
result: ``hf upload --repo-type kernel NAME FOLDER``.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from release import targets
from release.distributions import PACKAGE, Wheel
from release.project import PROJECT, ROOT, ReleaseError

# The package's name: in imports, before module names, and as a namespace of operators.
_NAME = re.compile(
    rf'(?<![\w./-]){PACKAGE}(?=\.\w|::|/"|\s+import\b)|(?<=torch\.ops\.){PACKAGE}\b'
    rf'|(?<=Library\("){PACKAGE}(?=")|(?<=import ){PACKAGE}$',
    re.MULTILINE,
)
# These expressions name or read the installed distribution, which a variant does not have.
_DISTRIBUTION = f'OWN_DISTRIBUTION = "{PROJECT}"'
_VERSION = f'importlib.metadata.version("{PROJECT}")'
# The nanobind domain in which modules share types; cmake/Core.cmake sets it for linked modules.
_DOMAIN = b"fdm_000000000000\0"
# Older versions of the hub's loader look for the package in a folder of this name.
_FORWARD = '''# SPDX-License-Identifier: BSD-3-Clause
"""The package one folder above, for versions of ``kernels`` that look for it here."""

import importlib.util
import sys
from pathlib import Path

_NAME = "{name}"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / "__init__.py")
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
__all__ = sys.modules[_NAME].__all__


def __getattr__(name):
    return getattr(sys.modules[_NAME], name)
'''
_CARD = f"""---
library_name: kernels
license: bsd-3-clause
---

# {PROJECT} {{version}}

Dynamic mask attention whose time and memory follow the kept keys.

```python
from kernels import get_kernel

{PACKAGE} = get_kernel("OWNER/{PROJECT}", version={{number}}, trust_remote_code=True)
out = {PACKAGE}.{PACKAGE}_func(query, key, value, attn_mask, attn_bias)
```

Modules for Python {{pythons}}; no other serves them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", nargs="+", type=Path, help="one for each Python, of one version")
    parser.add_argument("--output", required=True, type=Path, help="folder; its build/ is replaced")
    parser.add_argument(
        "--number", type=int, default=0, help="the hub's version of what is public; 0 is a trial"
    )


def run(options: argparse.Namespace) -> None:
    """Write the repository, and print its variants."""
    wheels = [Wheel.read(path) for path in options.wheels]
    modules = _modules(wheels)
    first = wheels[0]
    if first.system != "linux":
        raise ReleaseError(f"{first.path.name} is not for Linux")
    version = first.metadata("METADATA", "Version")[0]
    if (options.output / "build").exists():
        shutil.rmtree(options.output / "build")
    for backend, rows in _backends(first):
        framework = "torch-stable-abi" + targets.load().min_torch.replace(".", "")
        variant = f"{framework}-{backend}-{first.machine}-linux"
        name, files = _variant(first, modules, rows, backend.rstrip("0123456789"))
        metadata = _metadata(name, options.number, files, rows)
        for path, content in {**files, "metadata.json": _json(metadata)}.items():
            target = options.output / "build" / variant / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        print(options.output / "build" / variant)
    pythons = sorted(
        f"{found[1]}.{found[2]}"
        for found in (re.search(r"cpython-(\d)(\d+)", module) for module in modules)
        if found
    )
    card = _CARD.format(version=version, number=options.number, pythons=", ".join(pythons))
    (options.output / "README.md").write_text(card)


def _modules(wheels: Sequence[Wheel]) -> dict[str, bytes]:
    """Return the extension module of each wheel by its name; each must be for another Python."""
    found: dict[str, bytes] = {}
    versions = {(*wheel.metadata("METADATA", "Version"), wheel.machine) for wheel in wheels}
    if len(versions) != 1:
        raise ReleaseError(f"the wheels are of several versions or machines: {sorted(versions)}")
    for wheel in wheels:
        names = [name for name in wheel.contents if re.match(rf"{PACKAGE}/_core\.cpython-", name)]
        if len(names) != 1:
            raise ReleaseError(
                f"{wheel.path.name} has no module that one Python built for itself: build it with "
                "FDM_NANOBIND=linked"
            )
        if names[0] in found:
            raise ReleaseError(f"{wheel.path.name} is for the same Python as another wheel")
        found[names[0]] = wheel.contents[names[0]]
    return found


def _backends(wheel: Wheel) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the hub's name of each kind of device, with its packs.

    The hub uses a build for CUDA x.y with every PyTorch for CUDA x.z, z >= y. Packs contain their
    CUDA runtime and run with every PyTorch of their major, so y is 0.
    """
    cpu = [row for row in wheel.packs if not row["cuda"]]
    yield "cpu", cpu
    for major in sorted({row["cuda"].partition(".")[0] for row in wheel.packs if row["cuda"]}):
        packs = [row for row in wheel.packs if row["cuda"] and row["cuda"].startswith(f"{major}.")]
        yield f"cu{major}0", [*cpu, *packs]


def _variant(
    wheel: Wheel, modules: Mapping[str, bytes], rows: list[dict[str, Any]], kind: str
) -> tuple[str, dict[str, bytes]]:
    """Return the name of a variant's package, and its files by path."""
    kept = {row["file"] for row in rows}
    contents = {
        name.removeprefix(f"{PACKAGE}/"): content
        for name, content in {**wheel.contents, **modules}.items()
        if name.startswith(f"{PACKAGE}/")
        and (not wheel.is_pack(name) or name.rpartition("/")[2] in kept)
    }
    contents["packs/manifest.json"] = _json({**wheel.manifest, "packs": rows})
    digest = hashlib.sha256()
    for path, content in sorted(contents.items()):
        digest.update(f"{path} {hashlib.sha256(content).hexdigest()}\n".encode())
    own = digest.hexdigest()[:12]
    name = f"_{PACKAGE}_{'cuda' if kind == 'cu' else kind}_{own}"
    for path in modules:
        inside = path.removeprefix(f"{PACKAGE}/")
        if contents[inside].count(_DOMAIN) != 1:
            raise ReleaseError(f"{path} does not have the name {_DOMAIN!r} once")
        contents[inside] = contents[inside].replace(_DOMAIN, f"fdm_{own}\0".encode())
    version = wheel.metadata("METADATA", "Version")[0]
    for path, old, new in (
        ("loader/facts.py", _DISTRIBUTION, f'OWN_DISTRIBUTION = "{name}"'),
        ("lazy_names.py", _VERSION, f'"{version}"'),
    ):
        if contents[path].count(old.encode()) != 1:
            raise ReleaseError(f"{path} does not have {old} once")
        contents[path] = contents[path].replace(old.encode(), new.encode())
    for path, content in contents.items():
        if path.endswith((".py", ".pyi")):
            contents[path] = _NAME.sub(name, content.decode()).encode()
    contents[f"{PACKAGE}/__init__.py"] = _FORWARD.format(name=name).encode()
    contents |= {path.name: path.read_bytes() for path in ROOT.glob("LICENSE*")}
    return name, contents


def _metadata(
    name: str, number: int, files: Mapping[str, bytes], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a variant's metadata for the hub's loader."""
    codes = [targets.load().arch(row["arch"]).code for row in rows if row["cuda"]]
    archs = [re.sub(r"sm_(\d+)(\d)", r"\1.\2", code) for code in codes]
    hashes = {
        path: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for path, content in sorted(files.items())
    }
    return {
        "name": PROJECT,
        "id": name,
        "version": number,
        "license": "bsd-3-clause",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": archs} if archs else {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": hashes},
    }


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
