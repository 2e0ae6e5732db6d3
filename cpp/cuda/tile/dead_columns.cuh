// SPDX-License-Identifier: BSD-3-Clause
// Columns that no row of a tile keeps although the plan has them: a bias per query of -inf drops them. Their
// probabilities are 0, but 0 * NaN is NaN, and the contents of such a key must not reach a result. A search in every
// block would slow down every call. Instead, a tile whose result has a NaN is computed again, with zeros in place of
// the dead rows of V (for dQ, of K).
#pragma once

#include "copy_rows.cuh"
#include "products.cuh"

namespace fdm::cuda {

// Not inlined, so it takes no registers in the caller.
template <class Tile, int kColumns, int kThreads>
__device__ __noinline__ void clear_dead_rows(const uint8_t *live, uint32_t tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kColumns * Tile::kChunks; i += kThreads)
    if (!live[i / Tile::kChunks])
      ptx::store_shared(Tile::chunk_address(tile, i / Tile::kChunks, i % Tile::kChunks), uint4{});
}

// Lies in shared memory. kPossible: the kernel accepts a bias per query.
template <int kColumns, bool kPossible> struct DeadColumns {
  bool is_second_pass; // the tile is computed for the second time
  uint8_t live[kPossible ? kColumns : 1];

  // Whether any thread has a NaN sum in a row for which exists(row tile, half) holds. The tile must then be computed
  // again. All threads of the block call this.
  template <int kRowTiles, int kColumnTiles, class Exists>
  __device__ __forceinline__ bool needs_recompute(const float (&sums)[kRowTiles][kColumnTiles][4],
                                                  const Exists &exists) {
    if (is_second_pass) return false;
    bool found = false;
    for_accumulators(sums, [&](int m, int n, int i) { found |= isnan(sums[m][n][i]) && exists(m, i / 2); });
    if (!__syncthreads_or(found)) return false;
    is_second_pass = true;
    __syncthreads();
    return true;
  }

  // Zeroes the rows of a tile in shared memory whose column has `dead_value` in the accumulators of all threads. Rows
  // for which exists(row tile, half) is false do not count.
  template <class Tile, int kThreads, int kRowTiles, int kColumnTiles, class Exists>
  __device__ __forceinline__ void clear(uint32_t tile, const float (&values)[kRowTiles][kColumnTiles][4],
                                        float dead_value, const Exists &exists) {
    static_assert(kPossible && 8 * kColumnTiles == kColumns);
    for (int c = threadIdx.x; c < kColumns; c += kThreads) live[c] = 0;
    __syncthreads();
    for_pairs<kColumnTiles>([&](int n, int i) {
      bool any = false;
      for_pairs<kRowTiles>(
          [&](int m, int half) { any |= exists(m, half) && values[m][n][2 * half + i] != dead_value; });
      if (any) live[8 * n + accumulator_column() + i] = 1;
    });
    __syncthreads();
    clear_dead_rows<Tile, kColumns, kThreads>(live, tile);
    __syncthreads();
  }
};

} // namespace fdm::cuda
