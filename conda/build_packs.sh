#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds the packs of one CUDA major as a separate distribution, which the loader finds.
set -euo pipefail

# conda gives the linker a run path. No library here needs one. conda would rewrite it at installation, and the hashes of
# the manifest and of RECORD would no longer match.
unset LD_RUN_PATH
shopt -s extglob
export LDFLAGS=${LDFLAGS-}
LDFLAGS=${LDFLAGS//-Wl,-rpath,+([! ])/}

# conda's compiler package sets CUDAARCHS to its own list of archs; the packs use this project's table.
unset CUDAARCHS
MAX_JOBS=${MAX_JOBS:-${CPU_COUNT:-}} python -m release packs --cuda "$CUDA_MAJOR" --output build/packs \
  --archs "$FDM_ARCHS" --head-dims "$FDM_HEAD_DIMS" --cudart "$CUDART"
python -m release variants build/packs --output build/variants
# A wheel without scripts only has the files of site-packages, so it can be unpacked there.
python -m zipfile --extract build/variants/*.whl "$SP_DIR"
