// SPDX-License-Identifier: BSD-3-Clause
// Columns that no row of a tile keeps, though the plan could not tell: a bias of -inf with a row for each query drops
// them. Their probabilities are 0, but 0 * NaN is NaN, and what such a key holds must reach no result. Looking for
// them in every block would cost every call. Instead, a tile whose result has a NaN is computed a second time, and
// their rows of V (for dQ, of K) are zeros then.
#pragma once

#include "copy_rows.cuh"
#include "products.cuh"

namespace fdm::cuda {

// This is not inlined, and takes no registers where it is not called.
template <class Tile, int kColumns, int kThreads>
__device__ __noinline__ void clear_unmarked_rows(const uint8_t *live, uint32_t tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kColumns * Tile::kChunks; i += kThreads)
    if (!live[i / Tile::kChunks])
      ptx::store_shared(Tile::chunk_address(tile, i / Tile::kChunks, i % Tile::kChunks), uint4{});
}

// This lies in shared memory. kPossible says that the kernel takes such a bias.
template <int kColumns, bool kPossible> struct DeadColumns {
  bool clears; // this is the second time; false at first
  uint8_t live[kPossible ? kColumns : 1];

  // Whether a sum of any thread has a NaN, in a row that exists(row tile, half). The tile must then be computed again.
  // All threads of the block call it.
  template <int kRowTiles, int kColumnTiles, class Exists>
  __device__ __forceinline__ bool may_have_spoilt(const float (&sums)[kRowTiles][kColumnTiles][4],
                                                  const Exists &exists) {
    if (clears) return false;
    bool found = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) found |= isnan(sums[m][n][i]) && exists(m, i / 2);
    if (!__syncthreads_or(found)) return false;
    clears = true;
    __syncthreads();
    return true;
  }

  // Makes zeros of the rows of a tile in shared memory whose column has `dead_value` in all accumulators of all
  // threads, apart from rows that do not exist: exists(row tile, half).
  template <class Tile, int kThreads, int kRowTiles, int kColumnTiles, class Exists>
  __device__ __forceinline__ void clear(uint32_t tile, const float (&values)[kRowTiles][kColumnTiles][4],
                                        float dead_value, const Exists &exists) {
    static_assert(kPossible && 8 * kColumnTiles == kColumns);
    for (int c = threadIdx.x; c < kColumns; c += kThreads) live[c] = 0;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bool any = false;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) any |= exists(m, half) && values[m][n][2 * half + i] != dead_value;
        if (any) live[8 * n + accumulator_column() + i] = 1;
      }
    __syncthreads();
    clear_unmarked_rows<Tile, kColumns, kThreads>(live, tile);
    __syncthreads();
  }
};

} // namespace fdm::cuda
