// SPDX-License-Identifier: BSD-3-Clause
// Which numbers the fused kernel cannot deal with. A pair that is dropped has P = 0, but 0 times NaN or Inf is NaN; and
// beside a large lse, P must be computed with care. With all others, no product of a dropped pair exceeds float32.
#pragma once

#include "../tile/score.cuh"
#include "dense.h"

namespace fdm::cuda {

// Is one of eight numbers NaN or Inf, or a bfloat16 of 2^50 or more? Sums of products of smaller ones stay below 2^108.
template <class Element> __device__ __forceinline__ bool has_odd_value(const uint4 &x) {
  constexpr uint32_t kLeast = __is_same(Element, __half) ? 0x7c00 : 0x5880;
  const auto test = [](uint32_t pair) { return __vcmpgeu2(pair & 0x7fff7fffu, kLeast << 16 | kLeast); };
  return (test(x.x) | test(x.y) | test(x.z) | test(x.w)) != 0;
}

} // namespace fdm::cuda
