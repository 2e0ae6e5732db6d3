// SPDX-License-Identifier: BSD-3-Clause
// The sink of a head: one more score in the sum that a row is divided by, with nothing to attend to. It enters where a
// row is normalized, and nowhere else; lse and the partial results of splits are without it.
#pragma once

#include "key_ring.cuh"
#include "products.cuh"
#include "ptx/matrix.cuh"

namespace fdm::cuda {

// The sink of a query head to base 2; -inf where there is none.
__device__ __forceinline__ float sink_score(const fdm_problem &p, int64_t head) {
  return present(p.sink) ? load_element(p.sink, head * p.sink.stride[0]) * kLog2E : -INFINITY;
}

// The same relative to what is subtracted from the bias of the head's rows.
__device__ __forceinline__ float sink_score(const fdm_problem &p, int64_t head, const ScoreView &bias) {
  if (!present(p.sink) || bias.dtype != FDM_FLOAT64) return sink_score(p, head);
  const double reference = static_cast<const RelativeBias *>(bias.data)->reference;
  return static_cast<float>(load_element(p.sink, head * p.sink.stride[0]) - reference) * kLog2E;
}

// The factor that normalizes a row: `total` is the sum of its exponentials relative to `maximum`, which is to base 2.
__device__ __forceinline__ float row_factor(float sink, float maximum, float total) {
  return total == 0.0f ? 0.0f : 1.0f / (total + ptx::exp2_approximate(sink - maximum));
}

} // namespace fdm::cuda
