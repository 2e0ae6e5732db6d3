# SPDX-License-Identifier: BSD-3-Clause
"""Run a function on several ranks of this machine, one process for each rank."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from old_versions import is_older

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)
# The destructor of such a torch's group may wait forever for a thread that frees a tensor and needs
# the GIL (pull request 154976 of PyTorch).
FREES_GROUPS_WITH_THE_GIL = is_older(torch.__version__, "2.8")


def gpus(count: int) -> int:
    """Return the count, or skip the test where there are fewer GPUs."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")
    return count


def run_on_ranks(function: Callable[[str], None], ranks: int, folder: Path, device: str) -> None:
    """Call the function with the device's name on all ranks; raise the error of a failed rank."""
    method = "spawn"
    if "forkserver" in multiprocessing.get_all_start_methods():
        # All ranks of this process's tests fork from one server, which has the slow imports done
        # and has no threads.
        method = "forkserver"
        slow = ["torch._dynamo", "torch.distributed.tensor", "flash_dmattn.distributed"]
        multiprocessing.set_forkserver_preload(slow)
    torch.multiprocessing.start_processes(
        _enter,
        (function, ranks, str(folder / "meeting"), device),
        nprocs=ranks,
        start_method=method,
    )


def _enter(
    rank: int, function: Callable[[str], None], ranks: int, meeting: str, device: str
) -> None:
    torch.set_num_threads(1)
    own = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        function(own)
    except BaseException:
        # The other ranks wait for this one until the group's timeout; nobody waits for them.
        traceback.print_exc()
        os._exit(1)
    leave_group()


def leave_group() -> None:
    """Destroy the group, or end this process without it where that might wait forever."""
    if FREES_GROUPS_WITH_THE_GIL and dist.get_backend() == "gloo":
        dist.barrier()
        os._exit(0)
    dist.destroy_process_group()
