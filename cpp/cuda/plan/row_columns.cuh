// SPDX-License-Identifier: BSD-3-Clause
// The columns of a tile of a row plan, from the words of its keys.
#pragma once

#include "../tile/block_scan.cuh"
#include "plan.cuh"

namespace fdm::cuda {

// Bits [first, 32) of a word.
__device__ __forceinline__ uint32_t bits_from(int64_t first) {
  return first <= 0 ? ~0u : (first >= 32 ? 0u : ~0u << first);
}

// The columns that a thread block has written. All threads call add() with one key each, in key order.
template <int kThreads> struct RowColumns {
  BlockRanks<kThreads, 1> &ranks; // shared memory
  int32_t *columns, room;         // as in TileColumns
  int rows;                       // of the tile
  uint32_t full_count = 0, partial_count = 0;

  // Adds the key of this thread if a row keeps it. Returns the GranuleNumber of the warp's keys, kFirstOwnGranule for
  // all but the shared ones. A key that does not exist has an empty word.
  __device__ GranuleNumber add(int32_t key, bool exists, const RowWord &word) {
    uint32_t any = 0, missing = 0;
#pragma unroll
    for (int n = 0; n < kTileRows / 32; ++n) {
      any |= word.part[n];
      missing |= ~word.part[n] & ~bits_from(rows - 32 * n);
    }
    const bool full[1] = {missing == 0}, partial[1] = {missing != 0 && any != 0};
    uint32_t rank[1];
    const uint32_t total = ranks.rank(full, partial, rank);
    if (full[0]) columns[full_count + ranks.first_of(rank[0])] = key;
    if (partial[0]) columns[room - 1 - (partial_count + ranks.second_of(rank[0]))] = key;
    full_count += ranks.first_of(total);
    partial_count += ranks.second_of(total);
    const bool any_of_warp = __any_sync(kAllLanes, any != 0), all_of_warp = __all_sync(kAllLanes, !exists || full[0]);
    return !any_of_warp ? kEmptyGranule : all_of_warp ? kFullGranule : kFirstOwnGranule;
  }
  __device__ TileCounts counts() const {
    return {static_cast<int32_t>(full_count + partial_count), static_cast<int32_t>(full_count)};
  }
};

} // namespace fdm::cuda
