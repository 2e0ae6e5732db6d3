// SPDX-License-Identifier: BSD-3-Clause
// The launch of the forward instantiation that a route selects. Generated files contain only an include of this file
// and one line for each.
#pragma once

#include "../host/dispatch.h"
#include "../host/launch.cuh"
#include "forward.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "../tile/sm90/tile_sizes.cuh"
#include "sm90/forward.cuh"
#include "sm90/forward_boxes.cuh"
#include "sm90/small_boxes.cuh"
#include "sm90/small_tiles.cuh"
#endif

namespace fdm::cuda {

// Launches the kernel with mma.sync whose tile is kTile(arch, head dimension).
template <class Element, int kHeadDim, TileKind kKind, auto kTile>
cudaError_t launch_columns(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr RowTileChoice tile = kTile(FDM_TILE_ARCH, kHeadDim);
  static_assert(tile.rows == forward_tile(FDM_TILE_ARCH, kHeadDim).rows, "a route divides rows by it");
  using Config = ForwardConfig<Element, kHeadDim, tile.rows, tile.columns, tile.warps, tile.blocks, kKind>;
  return launch_with_shared<ForwardShared<Config>, forward_kernel<Config>>(work.params, work.route.blocks,
                                                                           Config::kThreads, stream);
}

#if FDM_TILE_ARCH == 90
inline BoxForwardParams box_params(const ForwardLaunch &work) { return {*work.maps, work.params}; }

template <class Element, int kHeadDim, int kValueDim>
cudaError_t launch_boxes(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr BoxTileSm90 tile = box_tile_sm90(kHeadDim, kValueDim);
  using Pipeline = KeyBoxes<kHeadDim, kValueDim, tile.columns, tile.k_stages, tile.v_stages>;
  using Config = ForwardConfigSm90<Element, kHeadDim, Pipeline, tile.query_stages>;
  return launch_sm90<ForwardSharedSm90<Config>, forward_kernel_sm90<BoxColumns<Config>>, Roles::kThreadsWithLookup>(
      box_params(work), work.route.blocks, stream);
}

template <class Element, int kHeadDim> cudaError_t launch_small_boxes(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr SmallBoxChoice tile = small_box(kHeadDim);
  using Config = SmallBoxesConfig<Element, kHeadDim, tile.stages, tile.blocks>;
  return launch_sm90<SmallBoxesShared<Config>, small_forward_kernel<SmallBoxes<Config>>, Config::kThreads>(
      box_params(work), work.route.blocks, stream);
}

template <class Element, int kHeadDim> cudaError_t launch_small_tiles(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr SmallTileChoice tile = small_tile(kHeadDim);
  using Config = SmallTilesConfig<Element, kHeadDim, tile.columns, tile.stages>;
  return launch_sm90<SmallTilesShared<Config>, small_forward_kernel<SmallTile<Config>>, Config::kThreads>(
      work.params, work.route.blocks, stream);
}

template <class Element, int kHeadDim, int kValueDim>
cudaError_t launch_persistent(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr ForwardTileSm90 tile = forward_tile_sm90(kHeadDim, kValueDim);
  using Stream = KeyStream<kHeadDim, kValueDim, tile.columns, tile.k_stages, tile.v_stages, forward_lookup(kHeadDim)>;
  using Config = ForwardConfigSm90<Element, kHeadDim, Stream, 1>;
  return launch_sm90<ForwardSharedSm90<Config>, forward_kernel_sm90<GatheredColumns<Config>>,
                     Roles::kThreadsWithLookup>(work.params, work.route.blocks, stream);
}
#endif

template <class Element, int kHeadDim> cudaError_t launch_forward(const ForwardLaunch &work, cudaStream_t stream) {
  switch (work.route.kernel) {
  case ForwardKernel::general:
    if constexpr (kServesRareCalls<kHeadDim>)
      return launch_columns<Element, kHeadDim, TileKind::general, general_forward_tile>(work, stream);
    break;
  case ForwardKernel::usual: // rare beside the wgmma kernels
    if constexpr (FDM_TILE_ARCH != 90 || kServesRareCalls<kHeadDim>)
      return launch_columns<Element, kHeadDim, TileKind::usual, forward_tile>(work, stream);
    break;
#if FDM_TILE_ARCH == 90
  case ForwardKernel::persistent:
    return with_value_dim<kHeadDim>(work.route.value_dim, [&](auto value_dim) {
      return launch_persistent<Element, kHeadDim, value_dim>(work, stream);
    });
  case ForwardKernel::boxes:
    return with_value_dim<kHeadDim>(
        work.route.value_dim, [&](auto value_dim) { return launch_boxes<Element, kHeadDim, value_dim>(work, stream); });
  case ForwardKernel::small_boxes:
    if constexpr (small_box(kHeadDim).blocks > 0) return launch_small_boxes<Element, kHeadDim>(work, stream);
    break;
  case ForwardKernel::small_tiles:
    if constexpr (small_tile(kHeadDim).columns > 0) return launch_small_tiles<Element, kHeadDim>(work, stream);
    break;
#else
  case ForwardKernel::crowded:
    if constexpr (many_blocks_forward_tile(FDM_TILE_ARCH, kHeadDim).blocks >
                  forward_tile(FDM_TILE_ARCH, kHeadDim).blocks)
      return launch_columns<Element, kHeadDim, TileKind::usual, many_blocks_forward_tile>(work, stream);
    break;
#endif
  default:
    break;
  }
  return cudaErrorInvalidConfiguration;
}

} // namespace fdm::cuda
