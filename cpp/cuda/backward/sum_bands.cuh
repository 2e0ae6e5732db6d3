// SPDX-License-Identifier: BSD-3-Clause
// Bands of 16 rows of float32 sums, to which thread blocks add in no fixed order.
//
// A band is divided into tiles of 8 columns. The accumulators of a warp (ptx/matrix.cuh) hold one tile, four numbers
// in each thread. If a thread can add four neighbours at once, its four numbers are adjacent in memory. Otherwise the
// first numbers of all threads are adjacent, then the second ones, and so on. In both cases a warp adds to whole
// cache lines.
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

// The offset of this thread's first number in a tile.
__device__ __forceinline__ int first_number() { return threadIdx.x % 32 * (kAddsVectors ? 4 : 1); }
// Adds this thread's numbers to those of a tile. `sums` points to this thread's first number.
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

} // namespace fdm::cuda
