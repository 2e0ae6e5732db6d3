// SPDX-License-Identifier: BSD-3-Clause
// The launch of an instantiation of the dq kernel. Generated files hold nothing but an include of this and a line for
// each.
#pragma once

#include "../host/launch.cuh"
#include "dq.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "../tile/sm90/tile_sizes.cuh"
#include "sm90/dq.cuh"
#endif

namespace fdm::cuda {

template <class Config> cudaError_t launch_dq_kernel(const BackwardParams &params, cudaStream_t stream) {
  const int64_t blocks = params.p.batch * params.p.heads * ceil_div(params.p.queries, Config::kRows);
  return launch_with_shared<DqShared<Config>, dq_kernel<Config>>(params, blocks, Config::kThreads, stream);
}

template <class Element, int kHeadDim, bool kGeneral>
cudaError_t launch_dq_kernels(const BackwardParams &params, cudaStream_t stream) {
  constexpr DqTileChoice tile = kGeneral ? general_dq_tile(FDM_TILE_ARCH, kHeadDim) : dq_tile(FDM_TILE_ARCH, kHeadDim);
  return launch_dq_kernel<DqConfig<Element, kHeadDim, tile.rows, tile.columns, tile.warps, tile.blocks, kGeneral>>(
      params, stream);
}

#if FDM_TILE_ARCH == 90
template <class Element, int kHeadDim> cudaError_t launch_dq_sm90(const BackwardParams &params, cudaStream_t stream) {
  constexpr DqTileSm90 tile = dq_tile_sm90(kHeadDim);
  using Config = DqConfigSm90<Element, kHeadDim, tile.columns, tile.stages>;
  const int64_t tiles = params.p.batch * params.p.heads * ceil_div(params.p.queries, Config::kRows);
  return launch_persistent_sm90<DqSharedSm90<Config>, dq_kernel_sm90<Config>>(params, tiles, stream);
}
#endif

template <class Element, int kHeadDim> cudaError_t launch_dq(const BackwardParams &params, cudaStream_t stream) {
  if (needs_general_kernel(params)) return launch_dq_kernels<Element, kHeadDim, true>(params, stream);
#if FDM_TILE_ARCH == 90
  if constexpr (kHeadDim <= kMostDqHeadDim)
    return launch_dq_sm90<Element, kHeadDim>(params, stream);
  else
#endif
    return launch_dq_kernels<Element, kHeadDim, false>(params, stream);
}

} // namespace fdm::cuda
