# SPDX-License-Identifier: BSD-3-Clause
"""The tiles of the triton backend on a device with too little shared memory for the best ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources  # noqa: E402

from flash_dmattn.backends.triton import launch  # noqa: E402

BLOCK_D = 128
QUERY = torch.empty(1, 1, 1, BLOCK_D, dtype=torch.float16)


class Device:
    """Starts only kernels whose tiles fit in its room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[launch.Tiles] = []

    def start(self, tiles: launch.Tiles) -> None:
        self.tried.append(tiles)
        needed = tiles.block_rows * tiles.block_keys * tiles.stages
        if needed > self.room:
            raise OutOfResources(needed, self.room, "shared memory")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_too_large", {})


@pytest.mark.parametrize(
    "name", ["forward", "rows", "keys", "mass", "list_forward", "list_backward", "list_mass"]
)
@pytest.mark.parametrize("block_d", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_first_that_fit_are_taken_and_remembered(
    name: str, block_d: int, dtype: torch.dtype
) -> None:
    query = torch.empty(1, 1, 1, block_d, dtype=dtype)
    choices = launch.tiles_of(name, block_d * dtype.itemsize)
    for tiles in choices:
        device = Device(tiles.block_rows * tiles.block_keys * tiles.stages)
        launch._too_large.clear()
        launch.fitting(name, query, block_d, device.start)
        assert device.tried == [*choices[: choices.index(tiles)], tiles]
        device.tried.clear()
        launch.fitting(name, query, block_d, device.start)
        assert device.tried == [tiles]


def test_what_fits_one_pass_says_nothing_of_another() -> None:
    first, second, *_ = launch.tiles_of("forward", BLOCK_D * QUERY.itemsize)
    device = Device(second.block_rows * second.block_keys * second.stages)
    launch.fitting("forward", QUERY, BLOCK_D, device.start)
    launch.fitting("forward", QUERY.bfloat16(), BLOCK_D, device.start)
    assert device.tried == [first, second, first, second]


def test_where_none_fit_the_error_is_the_last_ones() -> None:
    choices = launch.tiles_of("keys", BLOCK_D * QUERY.itemsize)
    device = Device(0)
    with pytest.raises(OutOfResources):
        launch.fitting("keys", QUERY, BLOCK_D, device.start)
    assert device.tried == list(choices)
    with pytest.raises(OutOfResources):
        launch.fitting("keys", QUERY, BLOCK_D, device.start)


def test_other_errors_are_no_reason_to_try_on() -> None:
    tried = []

    def start(tiles: launch.Tiles) -> None:
        tried.append(tiles)
        raise ValueError("no such argument")

    with pytest.raises(ValueError, match="no such argument"):
        launch.fitting("rows", QUERY, BLOCK_D, start)
    assert len(tried) == 1
