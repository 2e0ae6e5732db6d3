// SPDX-License-Identifier: BSD-3-Clause
// The launch of an instantiation of the dq kernel. A generated file only includes this one and has one line for each
// instantiation.
#pragma once

#include "../host/dispatch.h"
#include "../host/launch.cuh"
#include "dq.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "../tile/sm90/tile_sizes.cuh"
#include "sm90/dq.cuh"
#endif

namespace fdm::cuda {

template <class Element, int kHeadDim, TileKind kKind>
cudaError_t launch_dq_kernels(const BackwardLaunch &work, cudaStream_t stream) {
  constexpr RowTileChoice tile =
      kKind == TileKind::general ? general_dq_tile(FDM_TILE_ARCH, kHeadDim) : dq_tile(FDM_TILE_ARCH, kHeadDim);
  using Config = DqConfig<Element, kHeadDim, tile.rows, tile.columns, tile.warps, tile.blocks, kKind>;
  return launch_with_shared<DqShared<Config>, dq_kernel<Config>>(work.params, work.route.blocks, Config::kThreads,
                                                                 stream);
}

#if FDM_TILE_ARCH == 90
template <class Element, int kHeadDim> cudaError_t launch_dq_sm90(const BackwardLaunch &work, cudaStream_t stream) {
  constexpr DqTileSm90 tile = dq_tile_sm90(kHeadDim);
  using Config = DqConfigSm90<Element, kHeadDim, tile.columns, tile.stages>;
  return launch_sm90<DqSharedSm90<Config>, dq_kernel_sm90<Config>>(work.params, work.route.blocks, stream);
}
#endif

template <class Element, int kHeadDim> cudaError_t launch_dq(const BackwardLaunch &work, cudaStream_t stream) {
  if constexpr (kServesRareCalls<kHeadDim>)
    if (work.route.query_kernel == QueryKernel::general)
      return launch_dq_kernels<Element, kHeadDim, TileKind::general>(work, stream);
#if FDM_TILE_ARCH == 90
  if constexpr (kHeadDim <= kMaxDqHeadDimSm90)
    return launch_dq_sm90<Element, kHeadDim>(work, stream);
  else
#endif
    return launch_dq_kernels<Element, kHeadDim, TileKind::usual>(work, stream);
}

} // namespace fdm::cuda
