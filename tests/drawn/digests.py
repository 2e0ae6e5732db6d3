# SPDX-License-Identifier: BSD-3-Clause
"""Print a digest of each drawn call's results with deterministic=True, for scripts/test_delays."""

from __future__ import annotations

import argparse
import hashlib

import torch

from support import Target

from .problems import draw


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m drawn.digests", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--cases", type=int, default=1000)
    arguments = parser.parse_args()
    target = Target(arguments.device, arguments.device)
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        call = draw(seed, target.dtypes).call.to(target.device)
        digest = hashlib.sha256()
        for name, result in call.results(backend=target.backend, deterministic=True).items():
            digest.update(name.encode())
            digest.update(result.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        print(seed, digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
