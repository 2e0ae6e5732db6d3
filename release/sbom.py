# SPDX-License-Identifier: BSD-3-Clause
"""The bill of materials of a release, in CycloneDX: its files and the runtimes linked into them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from release.distributions import Wheel, core_metadata, parse_metadata, sha256

SPEC_VERSION = "1.6"
# The name of the bill that a wheel carries in its metadata folder's `sboms` (PEP 770).
BILL = "flash-dmattn.cdx.json"
_GCC = "GPL-3.0-or-later WITH GCC-exception-3.1"
_NVIDIA = "NVIDIA CUDA EULA"
_MICROSOFT = "Microsoft Visual Studio licence terms, distributable code"
LICENSE = [{"license": {"id": "BSD-3-Clause"}}]


def bill_of_materials(
    distributions: Sequence[Path], commit: str | None, timestamp: str
) -> dict[str, Any]:
    """Return the bill of the given wheels and sdists, all of one version.

    The same files give the same bill: its serial number is made from their hashes.
    """
    metadata = parse_metadata(core_metadata(distributions[0]))
    components = [file_component(path) for path in sorted(distributions)]
    bill = _bill(metadata.name, metadata.version, components)
    bill["metadata"]["timestamp"] = timestamp
    if commit:
        bill["metadata"]["component"]["properties"] = [{"name": "commit", "value": commit}]
    return bill


def bill_of_libraries(
    name: str, version: str, cores: Mapping[str, bytes], packs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the bill that a wheel contains: its libraries, and the runtimes linked into them.

    Args:
        cores: the wheel's extension module, if it has one, by its path.
        packs: the rows of its manifest.
    """
    return _bill(name, version, _library_components(name, cores, packs))


def _library_components(
    wheel: str, cores: Mapping[str, bytes], packs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    by_name = sorted(packs, key=lambda pack: str(pack["name"]))
    return [
        *(core_component(wheel, path, content) for path, content in cores.items()),
        *(pack_component(wheel, pack) for pack in by_name),
    ]


def _bill(name: str, version: str, components: list[dict[str, Any]]) -> dict[str, Any]:
    project = f"pkg:pypi/{name}@{version}"
    contents = " ".join(component["hashes"][0]["content"] for component in components)
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{project} {contents}")
    root = {
        "type": "library",
        "bom-ref": project,
        "name": name,
        "version": version,
        "purl": project,
        "licenses": LICENSE,
    }
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": serial.urn,
        "version": 1,
        "metadata": {"component": root},
        "components": components,
    }


def file_component(path: Path) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "file",
        "bom-ref": path.name,
        "name": path.name,
        "hashes": [{"alg": "SHA-256", "content": sha256(path)}],
        "licenses": LICENSE,
    }
    if path.suffix == ".whl":
        wheel = Wheel.read(path)
        component["components"] = _library_components(path.name, wheel.cores, wheel.packs)
    return component


def core_component(wheel: str, path: str, content: bytes) -> dict[str, Any]:
    """Return the component of the extension module. nanobind's templates are linked into it."""
    file = path.rpartition("/")[2]
    reference = f"{wheel}#{file}"
    linked = [runtime(reference, "nanobind", None, "BSD-3-Clause")]
    return _library(reference, file, hashlib.sha256(content).hexdigest(), linked)


def pack_component(wheel: str, pack: dict[str, Any]) -> dict[str, Any]:
    """Return the component of a pack, with the runtimes that are statically linked into it."""
    reference = f"{wheel}#{pack['file']}"
    linked = []
    if pack["file"].endswith(".so"):
        linked += [runtime(reference, name, None, _GCC) for name in ("libstdc++", "libgcc")]
    if pack["file"].endswith(".dll"):
        linked.append(runtime(reference, "Microsoft C++ runtime", None, _MICROSOFT))
    if pack["cuda"]:
        linked.append(runtime(reference, "CUDA runtime (cudart_static)", pack["cuda"], _NVIDIA))
    return _library(reference, pack["file"], pack["sha256"], linked)


def _library(
    reference: str, file: str, digest: str, linked: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": reference,
        "name": file,
        "licenses": LICENSE,
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "components": linked,
    }


def runtime(reference: str, name: str, version: str | None, terms: str) -> dict[str, Any]:
    """Return a linked runtime, with an SPDX expression or the name of other licence terms."""
    named = terms in (_NVIDIA, _MICROSOFT)
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"{reference}#{name}",
        "name": name,
        "licenses": [{"license": {"name": terms}} if named else {"expression": terms}],
    }
    if version:
        component["version"] = version
    return component
