#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The Python package and its cpu pack; the packs of GPUs are an output of their own. conda-forge has no nanobind-backend:
# the module is linked with nanobind's half, and the metadata must not ask for what it does not need.
set -euo pipefail

# conda gives the linker a run path. No library here needs one, and its place would be rewritten at installation, after
# which the hashes of the manifest and of RECORD hold no more.
unset LD_RUN_PATH
shopt -s extglob
export LDFLAGS=${LDFLAGS-}
LDFLAGS=${LDFLAGS//-Wl,-rpath,+([! ])/}

sed -i '/^dependencies = \["nanobind-backend/d' pyproject.toml
"$PYTHON" -m pip install . --no-deps --no-build-isolation --no-index -vv \
  --config-settings=wheel.py-api= \
  --config-settings=cmake.define.FLASH_DMATTN_NANOBIND=linked \
  --config-settings=cmake.define.FLASH_DMATTN_CUDA=OFF
