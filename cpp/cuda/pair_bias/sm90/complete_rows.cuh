// SPDX-License-Identifier: BSD-3-Clause
// Writes rows of dq, dk and dv that are complete in the accumulators of a consumer warpgroup.
#pragma once

#include "../../tile/products.cuh"
#include "ptx/copy.cuh"

namespace fdm::cuda {

// Writes an existing row times a factor. x[n] are this thread's two adjacent elements of its tile n of 8 columns. The
// row is 16-byte aligned in memory. Adds 0 times each element to `probe`, which becomes NaN if one is non-finite. All
// lanes call this.
template <class Element, int kTiles>
__device__ __forceinline__ void write_complete_row(Element *row, bool exists, int head_dim, const float (&x)[kTiles][2],
                                                   float factor, float &probe) {
  static_assert(kTiles % 4 == 0);
#pragma unroll
  for (int first = 0; first < kTiles; first += 4) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float low = x[first + k][0] * factor, high = x[first + k][1] * factor;
      probe = fmaf(low, 0.0f, fmaf(high, 0.0f, probe));
      words[k] = ptx::pack<Element>(low, high);
    }
    transpose_quad(words);
    const int column = 8 * (first + int(threadIdx.x) % 4);
    if (exists && column < head_dim) ptx::store_global_16(row + column, words);
  }
}

} // namespace fdm::cuda
