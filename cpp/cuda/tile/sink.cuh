// SPDX-License-Identifier: BSD-3-Clause
// The sink of a head: one more score in the denominator of the softmax, without a value. Only the normalization of a
// row uses it. LSE and the partial results of splits exclude it.
#pragma once

#include "key_ring.cuh"
#include "products.cuh"
#include "ptx/matrix.cuh"

namespace fdm::cuda {

// The base-2 sink of a query head; -inf if there is none.
__device__ __forceinline__ float sink_score(const fdm_problem &p, int64_t head) {
  return present(p.sink) ? load_element(p.sink, head * p.sink.stride[0]) * kLog2E : -INFINITY;
}

// The same, relative to the reference of the bias of the head's rows.
__device__ __forceinline__ float sink_score(const fdm_problem &p, int64_t head, const ScoreView &bias) {
  if (!present(p.sink) || bias.dtype != FDM_FLOAT64) return sink_score(p, head);
  const double reference = static_cast<const RelativeBias *>(bias.data)->reference;
  return static_cast<float>(load_element(p.sink, head * p.sink.stride[0]) - reference) * kLog2E;
}

// The factor that normalizes a row. `total` is the sum of its exponentials relative to the base-2 `maximum`.
__device__ __forceinline__ float row_normalizer(float sink, float maximum, float total) {
  return total == 0.0f ? 0.0f : 1.0f / (total + ptx::exp2_approximate(sink - maximum));
}

} // namespace fdm::cuda
