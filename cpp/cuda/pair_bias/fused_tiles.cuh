// SPDX-License-Identifier: BSD-3-Clause
// The tiles of dbias that the fused kernel sums.
#pragma once

#include "statistics.cuh"

namespace fdm::cuda {

struct FusedDbiasTile {
  int plane, row_tile, key_tile;
};

// The index of a tile among those of a launch.
__device__ __forceinline__ int64_t dbias_tile_number(const FusedWork &division, const FusedDbiasTile &tile) {
  return (int64_t(tile.plane - division.first_plane) * division.row_tiles + tile.row_tile) * division.key_tiles +
         tile.key_tile;
}

// Stores a thread's quad: its accumulators in 16 rows and 8 keys. `index` counts the quads of a tile: bands of 16
// rows have 16 key tiles each, and a key tile has a quad for each of 32 lanes.
template <class Element, class Pack = Packing<Element>>
__device__ __forceinline__ void store_quad(const PairBiasBackward &work, const FusedDbiasTile &tile, int index,
                                           const float4 &x, const Pack &pack = {}) {
  const fdm_tensor &t = work.a.dbias;
  const int lane = index % 32, number = index / 32;
  const int64_t key = int64_t(tile.key_tile) * kPairBiasTileSm90 + number % (kPairBiasTileSm90 / 8) * 8 + lane % 4 * 2;
  const int64_t row = int64_t(tile.row_tile) * kPairBiasTileSm90 + number / (kPairBiasTileSm90 / 8) * 16 + lane / 4;
  const int64_t first =
      tile.plane / t.shape[1] * t.stride[0] + tile.plane % t.shape[1] * t.stride[1] + key * t.stride[3];
  const int64_t left = work.call.p.keys - key;
  if (row < work.call.p.queries)
    store_pair<Element>(t, work.dbias_pairs, first + row * t.stride[2], x.x, x.y, left, pack);
  if (row + 8 < work.call.p.queries)
    store_pair<Element>(t, work.dbias_pairs, first + (row + 8) * t.stride[2], x.z, x.w, left, pack);
}

} // namespace fdm::cuda
