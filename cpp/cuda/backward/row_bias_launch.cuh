// SPDX-License-Identifier: BSD-3-Clause
// The launch of an instantiation of the row bias kernel. Generated files hold nothing but an include of this and a line
// for each.
#pragma once

#include "../host/launch.cuh"
#include "row_bias.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_row_bias(const BackwardLaunch &work, cudaStream_t stream) {
  const BackwardParams &params = work.params;
  constexpr RowBiasTileChoice tile = row_bias_tile(FDM_TILE_ARCH, kHeadDim);
  using Config = RowBiasConfig<Element, kHeadDim, tile.columns, tile.warps, tile.query_buffers, tile.key_buffers>;
  const fdm_problem &p = params.p;
  const fdm_tensor &dbias = params.a.dbias;
  const int64_t tiles = ceil_div(p.queries, Config::kRows), batches = is_varlen(p) ? p.batch : dbias.shape[0];
  const int64_t blocks = dbias.shape[1] * tiles * batches;
  return launch_with_shared<RowBiasShared<Config>, row_bias_kernel<Config>>(params, blocks, Config::kThreads, stream);
}

} // namespace fdm::cuda
