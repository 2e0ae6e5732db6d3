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

template <class Config> cudaError_t launch_forward_config(const ForwardLaunch &work, cudaStream_t stream) {
  return launch_with_shared<ForwardShared<Config>, forward_kernel<Config>>(work.params, work.route.blocks,
                                                                           Config::kThreads, stream);
}

template <class Element, int kHeadDim> cudaError_t launch_general(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr ForwardTileChoice tile = general_forward_tile(FDM_TILE_ARCH, kHeadDim);
  static_assert(tile.rows == forward_tile(FDM_TILE_ARCH, kHeadDim).rows, "a route divides rows by it");
  return launch_forward_config<
      ForwardConfig<Element, kHeadDim, tile.rows, tile.columns, tile.warps, tile.blocks, TileKind::general>>(work,
                                                                                                             stream);
}

template <class Element, int kHeadDim> cudaError_t launch_usual(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr ForwardTileChoice tile = forward_tile(FDM_TILE_ARCH, kHeadDim);
  return launch_forward_config<
      ForwardConfig<Element, kHeadDim, tile.rows, tile.columns, tile.warps, tile.blocks, TileKind::usual>>(work,
                                                                                                           stream);
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
  if constexpr (tile.blocks > 0) {
    using Config = SmallBoxesConfig<Element, kHeadDim, tile.stages, tile.blocks>;
    return launch_sm90<SmallBoxesShared<Config>, small_forward_kernel<SmallBoxes<Config>>, Config::kThreads>(
        box_params(work), work.route.blocks, stream);
  } else {
    return cudaErrorInvalidConfiguration;
  }
}

template <class Element, int kHeadDim> cudaError_t launch_small_tiles(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr SmallTileChoice tile = small_tile(kHeadDim);
  if constexpr (tile.columns > 0) {
    using Config = SmallTilesConfig<Element, kHeadDim, tile.columns, tile.stages>;
    return launch_with_shared<SmallTilesShared<Config>, small_forward_kernel<SmallTile<Config>>, Overlap::kernel_ahead>(
        work.params, work.route.blocks, Config::kThreads, stream);
  } else {
    return cudaErrorInvalidConfiguration;
  }
}

template <class Element, int kHeadDim, int kValueDim>
cudaError_t launch_persistent(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr ForwardTileSm90 tile = forward_tile_sm90(kHeadDim, kValueDim);
  using Stream = KeyStream<kHeadDim, kValueDim, tile.columns, tile.k_stages, tile.v_stages, forward_lookup(kHeadDim)>;
  using Config = ForwardConfigSm90<Element, kHeadDim, Stream, 1>;
  return launch_sm90<ForwardSharedSm90<Config>, forward_kernel_sm90<GatheredColumns<Config>>,
                     Roles::kThreadsWithLookup>(work.params, work.route.blocks, stream);
}
#else
template <class Element, int kHeadDim> cudaError_t launch_crowded(const ForwardLaunch &work, cudaStream_t stream) {
  constexpr ForwardTileChoice tile = forward_tile(FDM_TILE_ARCH, kHeadDim);
  constexpr ForwardTileChoice many_blocks = many_blocks_forward_tile(FDM_TILE_ARCH, kHeadDim);
  if constexpr (many_blocks.blocks > tile.blocks) {
    static_assert(many_blocks.rows == tile.rows, "a route divides rows by it");
    return launch_forward_config<ForwardConfig<Element, kHeadDim, many_blocks.rows, many_blocks.columns,
                                               many_blocks.warps, many_blocks.blocks, TileKind::usual>>(work, stream);
  } else {
    return cudaErrorInvalidConfiguration;
  }
}
#endif

template <class Element, int kHeadDim> cudaError_t launch_forward(const ForwardLaunch &work, cudaStream_t stream) {
  switch (work.route.kernel) {
  case ForwardKernel::general:
    if constexpr (kServesRareCalls<kHeadDim>) return launch_general<Element, kHeadDim>(work, stream);
    break;
  case ForwardKernel::usual: // rare beside the wgmma kernels
    if constexpr (FDM_TILE_ARCH != 90 || kServesRareCalls<kHeadDim>)
      return launch_usual<Element, kHeadDim>(work, stream);
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
    return launch_small_boxes<Element, kHeadDim>(work, stream);
  case ForwardKernel::small_tiles:
    return launch_small_tiles<Element, kHeadDim>(work, stream);
#else
  case ForwardKernel::crowded:
    return launch_crowded<Element, kHeadDim>(work, stream);
#endif
  default:
    break;
  }
  return cudaErrorInvalidConfiguration;
}

} // namespace fdm::cuda
