// SPDX-License-Identifier: BSD-3-Clause
// The score of a query and a key.
#pragma once

#include "../../indexing.h"
#include "key_ring.cuh"

namespace fdm::cuda {

// tanh(x) = 1 - 2 / (1 + exp(2 x)), accurate to about 1e-7 absolutely.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approximate(x * (2.0f * kLog2E)));
}

struct ScoreFactors {
  float scale; // multiplies q.k: for tanh where there is a softcap, else to base 2
  float cap;   // the softcap to base 2

  ScoreFactors() = default;
  __host__ __device__ explicit ScoreFactors(const fdm_problem &p)
      : scale(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E), cap(p.softcap * kLog2E) {}
  // The same where it is known that there is no softcap: a multiplication, without a branch.
  __device__ static ScoreFactors uncapped(const fdm_problem &p) {
    ScoreFactors factors;
    factors.scale = p.scale * kLog2E;
    factors.cap = 0.0f;
    return factors;
  }

  // Whether products may begin with the bias, in their units. Beyond these bounds biases would leave the range of their
  // type, or products with the scale that of floats.
  __host__ __device__ bool may_begin_with_bias() const { return cap == 0 && scale > 0x1p-30f && scale < 0x1p20f; }

  // Returns the score to base 2. `slope` becomes the derivative of the capped score with respect to the one without a
  // cap.
  template <bool kHasSoftcap> __device__ __forceinline__ float score(float product, float bias, float *slope) const {
    if constexpr (kHasSoftcap) {
      const float t = tanh_of(product * scale);
      *slope = 1.0f - t * t;
      return fmaf(t, cap, bias);
    } else {
      *slope = 1.0f;
      return fmaf(product, scale, bias);
    }
  }
};

} // namespace fdm::cuda
