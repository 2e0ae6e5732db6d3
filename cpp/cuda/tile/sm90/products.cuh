// SPDX-License-Identifier: BSD-3-Clause
// Products of tiles by wgmma. These functions start them; the caller waits for the sums.
#pragma once

#include "../smem_tile.cuh"
#include "ptx/matrix.cuh"
#include "ptx/store.cuh"

namespace fdm::cuda {

// sums = A B', or with `accumulate` sums += A B', summed over kHeadDim columns. `left` describes 64 rows of a
// LeftTile, `right` the rows of a RightTile, one for each column of sums.
template <class Element, class LeftTile, class RightTile, int kHeadDim, int kTiles>
__device__ __forceinline__ void warpgroup_gemm_ss(float (&sums)[kTiles][4], uint64_t left, uint64_t right,
                                                  bool accumulate) {
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16)
    ptx::wgmma_ss<Element, ptx::Major::k, ptx::Major::k>(sums, left + LeftTile::offset(0, d),
                                                         right + RightTile::offset(0, d), accumulate || d > 0);
}

// sums = A B, or with `accumulate` sums += A B, summed over kDepth rows of a RightTile. `right` describes one of its
// columns for each column of sums. `left` describes 64 rows of a LeftTile, or with Major::mn 64 columns.
template <class Element, class LeftTile, ptx::Major kLeft, class RightTile, int kDepth, int kTiles>
__device__ __forceinline__ void warpgroup_gemm_ss_columns(float (&sums)[kTiles][4], uint64_t left, uint64_t right,
                                                          bool accumulate) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16)
    ptx::wgmma_ss<Element, kLeft, ptx::Major::mn>(
        sums, left + (kLeft == ptx::Major::mn ? LeftTile::offset(k, 0) : LeftTile::offset(0, k)),
        right + RightTile::offset(k, 0), accumulate || k > 0);
}

// sums = A B', with A in registers.
template <class Element, class RightTile, int kDepth, int kTiles>
__device__ __forceinline__ void warpgroup_gemm_rs_transposed(float (&sums)[kTiles][4],
                                                             const uint32_t (&left)[kDepth][4], uint64_t right) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k)
    ptx::wgmma_rs<Element, ptx::Major::k>(sums, left[k], right + RightTile::offset(0, 16 * k), k > 0);
}

// Loads 16 rows of a tile for each warp of a warpgroup as a left operand, from a chunk of eight columns on. This
// warp's rows begin at `row`.
template <class LeftTile, int kDepth>
__device__ __forceinline__ void load_left(uint32_t (&left)[kDepth][4], uint32_t base, int row, int chunk = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kDepth; ++k)
    ptx::ldmatrix(left[k], LeftTile::chunk_address(base, row + lane % 16, chunk + 2 * k + lane / 16));
}

// Stores a left operand in the layout of load_left, from a column on.
template <class LeftTile, int kDepth>
__device__ __forceinline__ void store_left(const uint32_t (&left)[kDepth][4], uint32_t base, int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kDepth; ++k)
    ptx::stmatrix(LeftTile::chunk_address(base, row + lane % 16, column / 8 + 2 * k + lane / 16), left[k]);
}

// Rounds accumulators to Element, in the layout of a left operand.
template <class Element, int kTiles>
__device__ __forceinline__ void pack_left(uint32_t (&packed)[kTiles / 2][4], const float (&sums)[kTiles][4]) {
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k) {
    const float (&low)[4] = sums[2 * k], (&high)[4] = sums[2 * k + 1];
    packed[k][0] = ptx::pack<Element>(low[0], low[1]);
    packed[k][1] = ptx::pack<Element>(low[2], low[3]);
    packed[k][2] = ptx::pack<Element>(high[0], high[1]);
    packed[k][3] = ptx::pack<Element>(high[2], high[3]);
  }
}

// split_left() splits accumulators into high and low 16 bits, each a left operand. join_left() is its inverse.
__device__ __forceinline__ void split_left(uint32_t (&high)[4], uint32_t (&low)[4], const float (&first)[4],
                                           const float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float *const pair = (i < 2 ? first : second) + i % 2 * 2;
    low[i] = __byte_perm(__float_as_uint(pair[0]), __float_as_uint(pair[1]), 0x5410);
    high[i] = __byte_perm(__float_as_uint(pair[0]), __float_as_uint(pair[1]), 0x7632);
  }
}
__device__ __forceinline__ void join_left(float (&first)[4], float (&second)[4], const uint32_t (&high)[4],
                                          const uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float *const pair = (i < 2 ? first : second) + i % 2 * 2;
    pair[0] = __uint_as_float(__byte_perm(low[i], high[i], 0x5410));
    pair[1] = __uint_as_float(__byte_perm(low[i], high[i], 0x7632));
  }
}

// The inverse of pack_left(), after rounding.
template <class Element, int kTiles>
__device__ __forceinline__ void unpack_left(float (&sums)[kTiles][4], const uint32_t (&packed)[kTiles / 2][4]) {
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float *const pair = &sums[2 * k + i / 2][i % 2 * 2];
      ptx::unpack<Element>(packed[k][i], pair[0], pair[1]);
    }
}

// sums = A B, or with `accumulate` sums += A B, with A in registers and the rows of a RightTile as B, one for each
// column of A.
template <class Element, class RightTile, int kDepth, int kTiles>
__device__ __forceinline__ void warpgroup_gemm_rs(float (&sums)[kTiles][4], const uint32_t (&left)[kDepth][4],
                                                  uint64_t right, bool accumulate = true) {
  // An instruction has at most 128 columns.
  constexpr int kWhole = kTiles / 16 * 16, kRest = kTiles - kWhole;
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
#pragma unroll
    for (int n = 0; n < kWhole; n += 16)
      ptx::wgmma_rs<Element, ptx::Major::mn>(reinterpret_cast<float (&)[16][4]>(sums[n]), left[k],
                                             right + RightTile::offset(16 * k, 8 * n), accumulate || k > 0);
    if constexpr (kRest == 12) {
      ptx::wgmma_rs<Element, ptx::Major::mn>(reinterpret_cast<float (&)[8][4]>(sums[kWhole]), left[k],
                                             right + RightTile::offset(16 * k, 8 * kWhole), accumulate || k > 0);
      ptx::wgmma_rs<Element, ptx::Major::mn>(reinterpret_cast<float (&)[4][4]>(sums[kWhole + 8]), left[k],
                                             right + RightTile::offset(16 * k, 8 * kWhole + 64), accumulate || k > 0);
    } else if constexpr (kRest > 0) {
      ptx::wgmma_rs<Element, ptx::Major::mn>(reinterpret_cast<float (&)[kRest][4]>(sums[kWhole]), left[k],
                                             right + RightTile::offset(16 * k, 8 * kWhole), accumulate || k > 0);
    }
  }
}

// sums += A B; waits for the sums.
template <class Element, class RightTile, int kDepth, int kTiles>
__device__ __forceinline__ void warpgroup_add_rs(float (&sums)[kTiles][4], uint32_t (&left)[kDepth][4],
                                                 uint64_t right) {
  ptx::warpgroup_fence_operand(sums);
  ptx::warpgroup_arrive();
  warpgroup_gemm_rs<Element, RightTile>(sums, left, right);
  ptx::warpgroup_commit_batch();
  ptx::warpgroup_wait<0>(sums, left);
}

// sums += A B' by mma.sync, for 16 rows of a warp and 16 columns of both. `chunk` is the first of B's two chunks of
// eight columns.
template <class Element, class RightTile, int kTiles>
__device__ __forceinline__ void warp_add_transposed(float (&sums)[kTiles][4], const uint32_t (&left)[4], uint32_t base,
                                                    int chunk) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    uint32_t right[4];
    ptx::ldmatrix(right, RightTile::chunk_address(base, 8 * n + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
    ptx::mma<Element>(sums[n], left, right[0], right[1]);
    ptx::mma<Element>(sums[n + 1], left, right[2], right[3]);
  }
}

} // namespace fdm::cuda
