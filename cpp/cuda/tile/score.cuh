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
  float scale; // factor of q.k: to the argument of tanh with a softcap, else to base 2
  float cap;   // base-2 softcap

  ScoreFactors() = default;
  __host__ __device__ explicit ScoreFactors(const fdm_problem &p)
      : scale(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E), cap(p.softcap * kLog2E) {}
  // Without a softcap: no branch, one multiplication.
  __device__ static ScoreFactors uncapped(const fdm_problem &p) {
    ScoreFactors factors;
    factors.scale = p.scale * kLog2E;
    factors.cap = 0.0f;
    return factors;
  }

  // Whether products may start from the bias, in their units. Outside of these bounds, the bias exceeds the range of
  // its type, or the scaled products exceed that of float.
  __host__ __device__ bool can_fold_bias() const { return cap == 0 && scale > 0x1p-30f && scale < 0x1p20f; }

  // Returns the base-2 score. `slope` becomes the derivative of the capped score with respect to the uncapped score.
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
