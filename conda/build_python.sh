#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The Python package and its cpu pack; the packs of GPUs are an output of their own.
set -euo pipefail

"$PYTHON" -m pip install . --no-deps --no-build-isolation --no-index -vv \
  --config-settings=cmake.define.FLASH_DMATTN_CUDA=OFF
