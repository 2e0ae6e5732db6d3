#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The packs of one CUDA major, as a distribution of their own that the loader finds.
set -euo pipefail

# conda gives the linker a run path. No library here needs one, and its place would be rewritten at installation, after
# which the hashes of the manifest and of RECORD hold no more.
unset LD_RUN_PATH
shopt -s extglob
export LDFLAGS=${LDFLAGS-}
LDFLAGS=${LDFLAGS//-Wl,-rpath,+([! ])/}

# conda's compiler sets this to what an environment builds for in general; the table of archs is this project's.
unset CUDAARCHS
MAX_JOBS=${MAX_JOBS:-${CPU_COUNT:-}} python -m release packs --cuda "$CUDA_MAJOR" --output build/packs \
  --archs "$FDM_ARCHS" --head-dims "$FDM_HEAD_DIMS" --cudart "$CUDART"
python -m release variants build/packs --output build/variants
# A wheel without scripts is its folder in site-packages, packed.
python -m zipfile --extract build/variants/*.whl "$SP_DIR"
