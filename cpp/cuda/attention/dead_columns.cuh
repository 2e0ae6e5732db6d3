// SPDX-License-Identifier: BSD-3-Clause
// Columns that no row of a tile keeps, though the plan could not tell: a bias of -inf with a row for each query drops
// them. Their probabilities are 0, but 0 * NaN is NaN, and what such a key holds must reach no result. To look for them in
// every block would cost each call; so a tile whose result has a NaN is computed a second time, and their rows of V (for
// dQ, of K) become zeros then.
#pragma once

#include "products.cuh"

namespace fdm::cuda {

template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ bool has_nan(const float (&sums)[kRowTiles][kColumnTiles][4]) {
  bool found = false;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) found |= isnan(sums[m][n][i]);
  return found;
}

// Makes zeros of the rows of a tile in shared memory whose column has `dead_value` in all rows of the accumulators of all
// threads of the block. `live` is shared memory.
template <class Tile, int kThreads, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void clear_dead_columns(uint8_t (&live)[8 * kColumnTiles], uint32_t tile,
                                                   const float (&values)[kRowTiles][kColumnTiles][4],
                                                   float dead_value) {
  constexpr int kColumns = 8 * kColumnTiles;
  for (int c = threadIdx.x; c < kColumns; c += kThreads) live[c] = 0;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool any = false;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) any |= values[m][n][i] != dead_value || values[m][n][2 + i] != dead_value;
      if (any) live[8 * n + accumulator_column() + i] = 1;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < kColumns * Tile::kChunks; i += kThreads)
    if (!live[i / Tile::kChunks]) store_chunk(Tile::chunk_address(tile, i / Tile::kChunks, i % Tile::kChunks), uint4{});
  __syncthreads();
}

} // namespace fdm::cuda
