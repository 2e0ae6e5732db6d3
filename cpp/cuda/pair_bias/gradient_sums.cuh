// SPDX-License-Identifier: BSD-3-Clause
// The layout of the float32 sums of dq, dk and dv, to which thread blocks add in no fixed order.
//
// The sums take twice the memory of the gradients. One half lies in the memory of the gradient itself, the other in
// that of a later sequence's gradient or in the workspace; or both lie in the workspace. A warp's accumulators hold a
// band of 16 rows (ptx/matrix.cuh) as tiles of 8 columns; a half has half of the tiles. The four numbers of a thread
// are a quad, and the 32 quads of a tile follow each other in as many rows as they need. A band of fewer than 16 rows
// has no room for that: its numbers lie in their own rows. Either way, a warp uses only the memory of its own rows,
// and may overwrite them once it has read them.
#pragma once

#include "../tile/products.cuh"
#include "pair_bias.h"
#include "ptx/store.cuh"

namespace fdm::cuda {

enum class SumHalf { first, second };
struct SumHalves {
  char *first, *second;
};

// The first bytes of both halves of a row of a head. `batch` counts the sequences of the launch. Null if the sums are
// not wanted.
__device__ __forceinline__ SumHalves halves_of(const GradientSums &sums, int64_t batch, int64_t head, int64_t row) {
  if (!sums.first) return {};
  const int64_t offset = head * sums.head + row * sums.row;
  char *const second = batch < sums.before_spare ? sums.second + batch * sums.batch
                                                 : sums.spare + (batch - sums.before_spare) * sums.batch;
  return {sums.first + batch * sums.batch + offset, second + offset};
}

// A warp's band. All threads of the warp hold the same values.
template <int kHeadDim> struct SumBand {
  static constexpr int kTiles = kHeadDim / 8, kHalfTiles = kTiles / 2;
  static constexpr int kRowQuads = kHeadDim * 2 / 16; // per row of a half

  SumHalves halves; // of its first row
  int64_t pitch;    // bytes from row to row
  int rows;         // existing rows, if fewer than 16

  __device__ __forceinline__ char *half_of(int n) const { return n < kHalfTiles ? halves.first : halves.second; }
  // This thread's quad of tile n of 8 columns.
  __device__ __forceinline__ float *quad(int n) const {
    const int lane = threadIdx.x % 32;
    constexpr int kTileRows = 32 / kRowQuads;
    char *const lane_quads = half_of(n) + lane / kRowQuads * pitch + lane % kRowQuads * 16;
    return reinterpret_cast<float *>(lane_quads + n % kHalfTiles * (kTileRows * pitch));
  }
  // This thread's two adjacent numbers of an existing row, for a band of fewer than 16 rows.
  __device__ __forceinline__ float *pair(int n, int half) const {
    return reinterpret_cast<float *>(half_of(n) + accumulator_row(half) * pitch) + n % kHalfTiles * 8 +
           accumulator_column();
  }
  // Calls function(pair, n, half) for the pairs of existing rows.
  template <class Function> __device__ __forceinline__ void for_each_pair(const Function &function) const {
    for_pairs<kTiles>([&](int n, int half) {
      if (accumulator_row(half) < rows) function(pair(n, half), n, half);
    });
  }

  __device__ __forceinline__ void add(const float (&x)[kTiles][4]) const {
    if (rows >= kBandRows) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) ptx::add_global(quad(n), x[n]);
    } else {
      for_each_pair([&](float *sum, int n, int half) {
        ptx::add_global(sum, x[n][2 * half]);
        ptx::add_global(sum + 1, x[n][2 * half + 1]);
      });
    }
  }
  __device__ __forceinline__ void load(float (&x)[kTiles][4]) const {
    if (rows >= kBandRows) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) reinterpret_cast<float4 &>(x[n]) = *reinterpret_cast<const float4 *>(quad(n));
    } else {
      for_accumulators(x, [&](int n, int i) { x[n][i] = 0.0f; });
      for_each_pair([&](const float *sum, int n, int half) {
        x[n][2 * half] = sum[0];
        x[n][2 * half + 1] = sum[1];
      });
    }
  }
  template <SumHalf kHalf> __device__ __forceinline__ void clear() const {
    if (rows >= kBandRows) {
#pragma unroll
      for (int n = 0; n < kHalfTiles; ++n)
        *reinterpret_cast<float4 *>(quad(kHalf == SumHalf::first ? n : kHalfTiles + n)) = make_float4(0, 0, 0, 0);
    } else {
      for_each_pair([&](float *sum, int n, int) {
        if ((n < kHalfTiles) == (kHalf == SumHalf::first)) sum[0] = sum[1] = 0.0f;
      });
    }
  }
};

} // namespace fdm::cuda
