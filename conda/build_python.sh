#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds the Python package and its cpu pack; the packs of GPUs are a separate output.
set -euo pipefail

# conda gives the linker a run path. No library here needs one. conda would rewrite it at installation, and the hashes of
# the manifest and of RECORD would no longer match.
unset LD_RUN_PATH
shopt -s extglob
export LDFLAGS=${LDFLAGS-}
LDFLAGS=${LDFLAGS//-Wl,-rpath,+([! ])/}

"$PYTHON" -m pip install . --no-deps --no-build-isolation --no-index -vv \
  --config-settings=cmake.define.FLASH_DMATTN_CUDA=OFF
