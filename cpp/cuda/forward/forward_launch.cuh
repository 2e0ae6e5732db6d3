// SPDX-License-Identifier: BSD-3-Clause
// The launch of a forward instantiation. Generated files hold nothing but an include of this and a line for each.
#pragma once

#include "../host/launch.cuh"
#include "forward.cuh"

#if FDM_TILE_ARCH == 90
#include "../host/launch_sm90.cuh"
#include "../host/row_map.h"
#include "../tile/sm90/tile_sizes.cuh"
#include "sm90/forward.cuh"
#include "sm90/forward_boxes.cuh"
#include "sm90/small_boxes.cuh"
#include "sm90/small_tiles.cuh"
#endif

namespace fdm::cuda {

inline int64_t forward_blocks(const ForwardParams &params) {
  return params.p.batch * params.tiles * params.splits * (params.p.heads / params.heads_per_tile);
}

template <class Config> cudaError_t launch_forward_config(const ForwardParams &params, cudaStream_t stream) {
  return launch_with_shared<ForwardShared<Config>, forward_kernel<Config>>(params, forward_blocks(params),
                                                                           Config::kThreads, stream);
}

#if FDM_TILE_ARCH == 90
// Returns whether the hardware copies boxes of these tensors.
template <class Config> bool make_boxes(const ForwardParams &params, BoxForwardParams *boxes) {
  const fdm_problem &p = params.p;
  boxes->forward = params;
  return make_row_map(p.q, p.head_dim, Config::kRows, &boxes->q) &&
         make_row_map(p.k, p.head_dim, Config::kColumns, &boxes->k) &&
         make_row_map(p.v, p.head_dim, Config::kColumns, &boxes->v);
}

// These return whether they have launched their kernel.
template <class Element, int kHeadDim>
bool launch_forward_boxes(const ForwardParams &params, cudaStream_t stream, cudaError_t *error) {
  constexpr BoxTileSm90 tile = box_tile_sm90(kHeadDim);
  using Pipeline = KeyBoxes<kHeadDim, tile.columns, tile.k_stages, tile.v_stages>;
  using Config = ForwardConfigSm90<Element, kHeadDim, Pipeline, tile.query_stages>;
  BoxForwardParams boxes;
  if (!make_boxes<Config>(params, &boxes)) return false;
  *error = launch_persistent_sm90<ForwardSharedSm90<Config>, forward_kernel_sm90<BoxColumns<Config>>,
                                  Roles::kThreadsWithLookup>(boxes, sequence_tiles(params.p) * params.p.heads, stream);
  return true;
}

template <class Element, int kHeadDim>
bool launch_small_boxes(const ForwardParams &params, cudaStream_t stream, cudaError_t *error) {
  constexpr SmallBoxChoice tile = small_box(kHeadDim);
  using Config = SmallBoxesConfig<Element, kHeadDim, tile.stages, tile.blocks>;
  BoxForwardParams boxes;
  if (!make_boxes<Config>(params, &boxes)) return false;
  *error = launch_sm90<SmallBoxesShared<Config>, small_forward_kernel<SmallBoxes<Config>>, Config::kThreads>(
      boxes, sequence_tiles(params.p) * params.p.heads * Config::kParts, stream);
  return true;
}

template <class Element, int kHeadDim>
cudaError_t launch_small_tiles(const ForwardParams &params, cudaStream_t stream) {
  constexpr SmallTileChoice tile = small_tile(kHeadDim);
  using Config = SmallTilesConfig<Element, kHeadDim, tile.columns, tile.stages>;
  return launch_with_shared<SmallTilesShared<Config>, small_forward_kernel<SmallTile<Config>>, Overlap::kernel_ahead>(
      params, sequence_tiles(params.p) * params.p.heads, Config::kThreads, stream);
}
#endif

template <class Element, int kHeadDim> cudaError_t launch_forward(const ForwardParams &params, cudaStream_t stream) {
  constexpr ForwardTileChoice tile = forward_tile(FDM_TILE_ARCH, kHeadDim);
  if (!params.aligned || !params.rows.possible || has_rows(params.p.bias)) {
    constexpr ForwardTileChoice general = general_forward_tile(FDM_TILE_ARCH, kHeadDim);
    static_assert(general.rows == tile.rows, "the host divides rows by it");
    return launch_forward_config<
        ForwardConfig<Element, kHeadDim, general.rows, general.columns, general.warps, general.blocks, true>>(params,
                                                                                                              stream);
  }
#if FDM_TILE_ARCH == 90
  if (params.heads_per_tile == 1 && params.splits == 1) {
    constexpr ForwardTileSm90 choice = forward_tile_sm90(kHeadDim);
    using Stream = KeyStream<kHeadDim, choice.columns, choice.k_stages, choice.v_stages, forward_lookup(kHeadDim)>;
    using Config = ForwardConfigSm90<Element, kHeadDim, Stream, 1>;
    cudaError_t error;
    if constexpr (small_box(kHeadDim).blocks > 0) {
      if (params.short_columns && launch_small_boxes<Element, kHeadDim>(params, stream, &error)) return error;
    }
    if (params.consecutive && launch_forward_boxes<Element, kHeadDim>(params, stream, &error)) return error;
    const int64_t tiles = params.p.batch * params.tiles * params.p.heads;
    if constexpr (small_tile(kHeadDim).columns > 0)
      if (params.few_columns) return launch_small_tiles<Element, kHeadDim>(params, stream);
    return launch_persistent_sm90<ForwardSharedSm90<Config>, forward_kernel_sm90<GatheredColumns<Config>>,
                                  Roles::kThreadsWithLookup>(params, tiles, stream);
  }
#else
  constexpr ForwardTileChoice crowded = crowded_forward_tile(FDM_TILE_ARCH, kHeadDim);
  if constexpr (crowded.blocks > tile.blocks) {
    static_assert(crowded.rows == tile.rows, "the host divides rows by it");
    int sms;
    if (cudaError_t error = sm_count(&sms)) return error;
    if (forward_blocks(params) > int64_t(tile.blocks) * sms) {
      using Config =
          ForwardConfig<Element, kHeadDim, crowded.rows, crowded.columns, crowded.warps, crowded.blocks, false>;
      return launch_forward_config<Config>(params, stream);
    }
  }
#endif
  return launch_forward_config<
      ForwardConfig<Element, kHeadDim, tile.rows, tile.columns, tile.warps, tile.blocks, false>>(params, stream);
}

} // namespace fdm::cuda
