// SPDX-License-Identifier: BSD-3-Clause
// The epilogue of the Hopper forward kernels of pair biases.
#pragma once

#include "../softmax.cuh"
#include "ptx/copy.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

// Whether all sums are finite. 0 times NaN or inf is NaN, so this takes a multiply-add per sum and one test.
template <int kTiles> __device__ __forceinline__ bool is_finite(const float (&sums)[kTiles][4]) {
  float probe[4] = {};
  for_accumulators(sums, [&](int d, int i) { probe[i] = fmaf(sums[d][i], 0.0f, probe[i]); });
  return probe[0] + probe[1] + (probe[2] + probe[3]) == 0.0f;
}

// Writes row i of a source, normalized, and its lse, like write_pair_bias_row, but to aligned rows and without
// branches between the rows. All threads of the warp call this; a row that is not `there` is not written.
template <class Element, int kTiles>
__device__ __forceinline__ void write_aligned_row(const PairBiasForward &work, const SourceWalk &source, int i,
                                                  bool there, const float (&out)[kTiles][4], int half, float sum,
                                                  float shift) {
  const fdm_tensor &t = work.a.out, &lse = work.a.lse;
  const float inverse = __fdividef(1.0f, sum);
  const int pair = threadIdx.x % 4;
  auto *const first = static_cast<Element *>(t.data) + source.batch * t.stride[0] + source.head * t.stride[2] +
                      i * t.stride[1] + 8 * pair;
#pragma unroll
  for (int d = 0; d < kTiles; d += 4) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float (&accumulator)[4] = out[d + k];
      words[k] =
          sum == 0.0f ? 0u : ptx::pack<Element>(accumulator[2 * half] * inverse, accumulator[2 * half + 1] * inverse);
    }
    transpose_quad(words);
    if (there && 8 * (d + pair) < int(work.call.p.head_dim)) ptx::store_global_16(first + 8 * d, words);
  }
  if (there && pair == 0)
    static_cast<float *>(lse.data)[source.batch * lse.stride[0] + source.head * lse.stride[1] + i * lse.stride[2]] =
        sum == 0.0f ? -INFINITY : (__log2f(sum) - shift) * (1.0f / kLog2E);
}

} // namespace fdm::cuda
