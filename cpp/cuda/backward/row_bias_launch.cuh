// SPDX-License-Identifier: BSD-3-Clause
// The launch of an instantiation of the row bias kernel. Generated files hold nothing but an include of this and a line
// for each.
#pragma once

#include "../host/launch.cuh"
#include "row_bias.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_row_bias(const BackwardLaunch &work, cudaStream_t stream) {
  constexpr RowBiasTileChoice tile = row_bias_tile(FDM_TILE_ARCH, kHeadDim);
  using Config = RowBiasConfig<Element, kHeadDim, tile.columns, tile.warps, tile.query_buffers, tile.key_buffers>;
  return launch_with_shared<RowBiasShared<Config>, row_bias_kernel<Config>>(work.params, work.route.row_bias_blocks,
                                                                            Config::kThreads, stream);
}

} // namespace fdm::cuda
