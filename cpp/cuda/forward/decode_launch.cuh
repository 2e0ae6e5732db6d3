// SPDX-License-Identifier: BSD-3-Clause
// The launch of a decode instantiation. Generated files contain only an include of this file and one line for each.
#pragma once

#include "../host/launch.cuh"
#include "decode.cuh"

namespace fdm::cuda {

// As many warps, with two stages of K and V each, as shared memory allows. The time of a warp's step does not depend
// on the other warps, so more warps finish few blocks of columns sooner.
template <int kHeadDim> constexpr int decode_warps(int arch) {
  constexpr int kWarpFactBytes = 5 * 1024;                 // facts of columns and keys
  constexpr int kBlockFactBytes = 3 * 1024;                // the task, and sums of rows
  constexpr int row_bytes = SmemTile<kHeadDim>::kRowBytes; // of whole panels: 256 for head dimension 96 too
  int warps = 8;
  while (warps * (2 * 2 * 16 * row_bytes + kWarpFactBytes) + kDecodeRows * row_bytes + kBlockFactBytes >
         shared_limit(arch))
    --warps;
  return warps;
}

template <class Config> cudaError_t launch_decode_blocks(const ForwardLaunch &work, cudaStream_t stream) {
  const ForwardRoute &route = work.route;
  const Grid grid(route.blocks, route.splits, route.merges_in_cluster ? route.splits : 1);
  return launch_with_shared<DecodeShared<Config>, decode_kernel<Config>, Overlap::kernel_ahead>(
      work.params, grid, Config::kThreads, stream);
}

template <class Element, int kHeadDim> cudaError_t launch_decode(const ForwardLaunch &work, cudaStream_t stream) {
  if constexpr (has_small_decode_blocks(kRouteTable, kHeadDim)) {
    using Small = DecodeConfig<Element, kHeadDim, 4, 2>;
    if (work.route.small_blocks) return launch_decode_blocks<Small>(work, stream);
  }
  using Config = DecodeConfig<Element, kHeadDim, decode_warps<kHeadDim>(FDM_TILE_ARCH), decode_blocks(kHeadDim)>;
  return launch_decode_blocks<Config>(work, stream);
}

} // namespace fdm::cuda
