// SPDX-License-Identifier: BSD-3-Clause
// The launch of a decode instantiation. Generated files hold nothing but an include of this and a line for each.
#pragma once

#include "../host/launch.cuh"
#include "decode.cuh"

namespace fdm::cuda {

// Four warps with two stages of K and V each: two blocks share an SM at head dimension 128. Where there is less shared
// memory, a block has two warps.
constexpr int decode_warps(int arch, int head_dim) { return head_dim > 128 && shared_limit(arch) < 160 * 1024 ? 2 : 4; }

template <class Element, int kHeadDim> cudaError_t launch_decode(const ForwardParams &params, cudaStream_t stream) {
  using Config = DecodeConfig<Element, kHeadDim, decode_warps(FDM_TILE_ARCH, kHeadDim)>;
  const int64_t groups = params.p.batch * (params.p.heads / params.heads_per_tile);
  const Grid grid(groups, params.splits, params.merges_in_cluster ? params.splits : 1);
  return launch_with_shared<DecodeShared<Config>, decode_kernel<Config>>(params, grid, Config::kThreads, stream);
}

} // namespace fdm::cuda
