// SPDX-License-Identifier: BSD-3-Clause
// Rounds bands of float32 sums, which lie as query_sums.cuh tells, to rows of 16 bits.
#pragma once

#include "../../indexing.h"
#include "../tile/products.cuh"

namespace fdm::cuda {

// A warp rounds a band of 16 rows and `dim` columns, times `scale`. row_offset(row) is where a row of the band begins in
// t, or -1 if there is none. Returns whether all sums of this thread are finite.
template <class Element, class RowOffset>
__device__ __forceinline__ bool round_band(const float4 *band, int dim, float scale, const fdm_tensor &t, int head_dim,
                                           const RowOffset &row_offset) {
  constexpr int kTiles = 4; // at a time
  const int lane = threadIdx.x % 32;
  const int64_t offset[2] = {row_offset(accumulator_row(0)), row_offset(accumulator_row(1))};
  bool finite = true;
#pragma unroll 2
  for (int first = 0; first < dim / 8; first += kTiles) {
    float sums[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 x = band[(first + n) * 32 + lane];
      sums[n][0] = x.x;
      sums[n][1] = x.y;
      sums[n][2] = x.z;
      sums[n][3] = x.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (offset[half] >= 0 && 8 * first < head_dim)
        write_row(static_cast<Element *>(t.data) + offset[half] + 8 * first * t.stride[3], t.stride[3],
                  head_dim - 8 * first, sums, half, scale);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) finite &= fabsf(sums[n][i]) < INFINITY;
  }
  return finite;
}

} // namespace fdm::cuda
