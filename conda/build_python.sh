#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The Python package and its cpu pack; the packs of GPUs are an output of their own.
set -euo pipefail

# conda gives the linker a run path. No library here needs one, and its place would be rewritten at installation, after
# which the hashes of the manifest and of RECORD hold no more.
unset LD_RUN_PATH
shopt -s extglob
export LDFLAGS=${LDFLAGS-}
LDFLAGS=${LDFLAGS//-Wl,-rpath,+([! ])/}

"$PYTHON" -m pip install . --no-deps --no-build-isolation --no-index -vv \
  --config-settings=cmake.define.FLASH_DMATTN_CUDA=OFF
