# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

from pathlib import Path

import pytest

from flash_dmattn import _core

from .core_packs import Recording, compile_pack, compiler


@pytest.fixture(scope="session")
def recording_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("no C compiler")
    return compile_pack(tmp_path_factory.mktemp("packs") / "librecording.so")


@pytest.fixture(scope="session")
def pack(recording_path: Path) -> _core.Pack:
    return _core.load_pack(str(recording_path))


@pytest.fixture
def recording(recording_path: Path) -> Recording:
    recording = Recording(recording_path)
    recording.set_next()
    return recording
