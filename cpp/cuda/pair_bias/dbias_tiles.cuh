// SPDX-License-Identifier: BSD-3-Clause
// The tiles of dbias: their numbers, and the place of a thread's sums in memory.
#pragma once

#include "statistics.cuh"

namespace fdm::cuda {

struct DbiasTile {
  int plane, row_tile, key_tile;

  __device__ __forceinline__ DbiasTile(const PairBiasBackward &work, int64_t number) {
    const fdm_problem &p = work.call.p;
    plane = int(number / work.dbias.tiles);
    int64_t left = number - plane * work.dbias.tiles;
    row_tile = is_causal(p) ? 0 : int(left / work.dbias.key_tiles);
    left -= int64_t(row_tile) * work.dbias.key_tiles * !is_causal(p);
    if (is_causal(p))
      for (int64_t live; left >= (live = live_key_tiles(p, work.dbias, row_tile)); left -= live) ++row_tile;
    key_tile = int(left);
  }
  __device__ __forceinline__ bool is_last_of_row(const PairBiasBackward &work) const {
    return key_tile + 1 == live_key_tiles(work.call.p, work.dbias, row_tile);
  }
};

// Block b has the steps from first_step(b) to first_step(b + 1). The products exceed 64 bits only for work that no
// GPU can do.
FDM_INLINE int64_t first_step(const DbiasWork &work, int64_t block) {
  if (work.undivided) return work.steps / work.groups * block / work.blocks * work.groups;
  return work.steps * block / work.blocks;
}

// The part of a slot's tile that a warp has.
struct DbiasPlace {
  int row, key; // the first
};
FDM_INLINE DbiasPlace dbias_place(const DbiasWork &work, int warp) {
  const int row_warps = work.tile_rows / kDbiasWarpRows;
  return {warp % row_warps * kDbiasWarpRows, warp / row_warps * kDbiasWarpKeys};
}

// Threads per slot.
FDM_INLINE int dbias_threads(const DbiasWork &work) {
  return work.tile_rows * work.tile_keys / (kDbiasWarpRows * kDbiasWarpKeys) * 32;
}

// In memory, the sums of a tile are pairs of adjacent elements of a row. The pairs of a thread are dbias_threads()
// apart: pair (m * 8 + n) * 2 + half has its accumulators of row tile m and key tile n. Returns the index of a pair.
FDM_INLINE int pair_index(const DbiasWork &work, int row, int key) {
  const int warp = row / kDbiasWarpRows + key / kDbiasWarpKeys * (work.tile_rows / kDbiasWarpRows);
  const int number = (row % kDbiasWarpRows / 16 * (kDbiasWarpKeys / 8) + key % kDbiasWarpKeys / 8) * 2 + row % 16 / 8;
  return number * dbias_threads(work) + warp * 32 + row % 8 * 4 + key % 8 / 2;
}

// The offset of a tile's first element in dbias.
__device__ __forceinline__ int64_t dbias_offset(const PairBiasBackward &work, const DbiasTile &tile) {
  const fdm_tensor &t = work.a.dbias;
  return tile.plane / t.shape[1] * t.stride[0] + tile.plane % t.shape[1] * t.stride[1] +
         int64_t(tile.row_tile) * work.dbias.tile_rows * t.stride[2] +
         int64_t(tile.key_tile) * work.dbias.tile_keys * t.stride[3];
}

// Stores the pairs `first`, first + step and so on of a tile, counted along its rows. sum(index) gives the pair with
// that pair_index().
template <class Element, class Sum>
__device__ __forceinline__ void store_dbias(const PairBiasBackward &work, const DbiasTile &tile, int first, int step,
                                            const Sum &sum) {
  const fdm_tensor &t = work.a.dbias;
  const fdm_problem &p = work.call.p;
  const DbiasWork &division = work.dbias;
  const int64_t offset = dbias_offset(work, tile);
  const int64_t rows = p.queries - int64_t(tile.row_tile) * division.tile_rows;
  const int64_t keys = p.keys - int64_t(tile.key_tile) * division.tile_keys;
#pragma unroll 2
  for (int i = first; i < division.tile_rows * division.tile_keys / 2; i += step) {
    const int row = 2 * i / division.tile_keys, key = 2 * i % division.tile_keys;
    if (row >= rows) continue;
    const float2 pair = sum(pair_index(division, row, key));
    store_pair<Element>(t, work.dbias_pairs, offset + row * t.stride[2] + key * t.stride[3], pair.x, pair.y,
                        keys - key);
  }
}

} // namespace fdm::cuda
