// SPDX-License-Identifier: BSD-3-Clause
// The launch of a forward instantiation. Generated files hold nothing but an include of this and a line for each.
#pragma once

#include "../host/launch.cuh"
#include "forward.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "../tile/sm90/tile_sizes.cuh"
#include "sm90/forward.cuh"
#endif

namespace fdm::cuda {

template <class Config> cudaError_t launch_forward_config(const ForwardParams &params, cudaStream_t stream) {
  const int64_t blocks = params.p.batch * params.tiles * params.splits * (params.p.heads / params.heads_per_tile);
  return launch_with_shared<ForwardShared<Config>, forward_kernel<Config>>(params, blocks, Config::kThreads, stream);
}

template <class Element, int kHeadDim> cudaError_t launch_forward(const ForwardParams &params, cudaStream_t stream) {
  constexpr ForwardTileChoice tile = forward_tile(FDM_TILE_ARCH, kHeadDim);
  if (!params.aligned || has_rows(params.p.bias)) {
    constexpr ForwardTileChoice general = general_forward_tile(FDM_TILE_ARCH, kHeadDim);
    static_assert(general.rows == tile.rows, "the host divides rows by it");
    return launch_forward_config<
        ForwardConfig<Element, kHeadDim, general.rows, general.columns, general.warps, general.blocks, true>>(params,
                                                                                                              stream);
  }
#if FDM_TILE_ARCH == 90
  if (params.heads_per_tile == 1 && params.splits == 1 && params.page_rows >= 0) {
    constexpr ForwardTileSm90 choice = forward_tile_sm90(kHeadDim);
    using Config = ForwardConfigSm90<Element, kHeadDim, choice.columns, choice.k_stages, choice.v_stages>;
    const int64_t tiles = params.p.batch * params.tiles * params.p.heads;
    return launch_persistent_sm90<ForwardSharedSm90<Config>, forward_kernel_sm90<Config>, Roles::kThreadsWithLookup>(
        params, tiles, stream);
  }
#endif
  return launch_forward_config<
      ForwardConfig<Element, kHeadDim, tile.rows, tile.columns, tile.warps, tile.blocks, false>>(params, stream);
}

} // namespace fdm::cuda
