// SPDX-License-Identifier: BSD-3-Clause
// Bands of 16 rows of float32 sums, to which blocks of threads add in no fixed order, and their rounding to rows of 16
// bits.
//
// A band has tiles of 8 columns. The threads of a warp hold one in their accumulators (ptx/matrix.cuh), four numbers each.
// Where a thread can add four neighbours at once, those of a thread lie together; elsewhere the first numbers of all
// threads do, then the second. Either way a warp adds to whole lines of the cache.
#pragma once

#include "../../indexing.h"
#include "../tile/products.cuh"
#include "ptx/store.cuh"

namespace fdm::cuda {

constexpr bool kAddsVectors = FDM_TILE_ARCH >= 90;

// Adds to four neighbours, 16-byte aligned.
__device__ __forceinline__ void add_neighbours(float *sums, const float (&x)[4]) {
  if constexpr (kAddsVectors) {
    ptx::add_global(sums, x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::add_global(sums + i, x[i]);
  }
}

// Where this thread's first number lies in a tile.
__device__ __forceinline__ int first_number() { return threadIdx.x % 32 * (kAddsVectors ? 4 : 1); }
// Adds this thread's numbers, of which the first lies at `sums`, to those of a tile.
__device__ __forceinline__ void add_to_tile(float *sums, const float (&x)[4]) {
  if constexpr (kAddsVectors) {
    ptx::add_global(sums, x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::add_global(sums + 32 * i, x[i]);
  }
}

__device__ __forceinline__ void load_tile(const float *tile, float (&x)[4]) {
  const float *sums = tile + first_number();
  if constexpr (kAddsVectors) {
    const float4 quad = *reinterpret_cast<const float4 *>(sums);
    x[0] = quad.x;
    x[1] = quad.y;
    x[2] = quad.z;
    x[3] = quad.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = sums[32 * i];
  }
}

// A warp rounds a band of 16 rows and `dim` columns, times `scale`. row_offset(row) is where a row of the band begins in
// t, or -1 if there is none. Returns whether all sums of this thread are finite.
template <class Element, class RowOffset>
__device__ __forceinline__ bool round_band(const float *band, int dim, float scale, const fdm_tensor &t, int head_dim,
                                           const RowOffset &row_offset) {
  constexpr int kTiles = 4; // at a time
  const int64_t offset[2] = {row_offset(accumulator_row(0)), row_offset(accumulator_row(1))};
  bool finite = true;
#pragma unroll 2
  for (int first = 0; first < dim / 8; first += kTiles) {
    float sums[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) load_tile(band + (first + n) * 128, sums[n]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (8 * first < head_dim)
        write_row(static_cast<Element *>(t.data) + offset[half] + 8 * first * t.stride[3], t.stride[3],
                  head_dim - 8 * first, sums, half, scale, offset[half] >= 0);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) finite &= fabsf(sums[n][i]) < INFINITY;
  }
  return finite;
}

} // namespace fdm::cuda
