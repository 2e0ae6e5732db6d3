// SPDX-License-Identifier: BSD-3-Clause
// What the fused kernel knows of a row, or of a key: lse and delta, and whether the key is dropped.
#pragma once

#include "../../ptx/barrier.cuh"
#include "../../ptx/wgmma.cuh"
#include "../statistics.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

// As operands of products: one more step of 16 columns adds it on the tensor cores. S = Q K' then has -lse in it, and -inf
// for keys that are dropped, and dP = dO V' has -delta.
//
// Element has too few digits for these numbers, so three columns hold what is left of each after the columns before, as in
// ../../tile/sm90/bias_operand.cuh. The columns behind are zeros.
template <class Element, int kStages> struct RowColumns {
  static constexpr bool kHalf = __is_same(Element, __half);
  // Eight columns of a row. Without a swizzle, eight rows lie one after the other (PTX ISA, "core matrix").
  struct alignas(16) Chunk {
    Element column[8];
  };

  alignas(128) Chunk shifts[kStages][kWideTile], deltas[kStages][kWideTile], keys[kStages][kWideTile];
  alignas(128) Chunk ones[kWideTile];
  alignas(128) Chunk zeros[kWideTile]; // the second eight columns of all

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    for (int i = threadIdx.x; i < kWideTile; i += blockDim.x) {
      ones[i] = chunk(1.0f, 1.0f, 1.0f, 0.0f);
      zeros[i] = {};
    }
    ptx::fence_async_proxy();
  }

  // Stores a row's -lse, in units of the product that is multiplied by `scale`, and -delta.
  __device__ void set_row(int stage, int row, const RowStatistics &known, float scale) {
    const bool empty = fabsf(known.lse) > kUnusableLse;
    shifts[stage][row] = split(empty ? -INFINITY : -known.lse / scale, 1.0f);
    deltas[stage][row] = split(-known.delta, 0.0f);
  }
  // Returns which keys of the producer warp are kept, as bits.
  __device__ uint32_t set_key(int stage, int key, bool kept) {
    keys[stage][key] = chunk(1.0f, 1.0f, 1.0f, kept ? 0.0f : -INFINITY);
    return __ballot_sync(0xffffffffu, kept);
  }

  // Left operands of a consumer warpgroup, and right operands.
  __device__ uint64_t shifts_of(int stage, int group) const { return descriptor(&shifts[stage][64 * group]); }
  __device__ uint64_t deltas_of(int stage, int group) const { return descriptor(&deltas[stage][64 * group]); }
  __device__ uint64_t keys_of(int stage) const { return descriptor(keys[stage]); }
  __device__ uint64_t ones_descriptor() const { return descriptor(ones); }

private:
  __device__ uint64_t descriptor(const Chunk *first) const {
    const uint32_t address = ptx::shared_address(first);
    return ptx::plain_matrix_descriptor(address, ptx::shared_address(zeros) - address, 8 * sizeof(Chunk));
  }
  __device__ static float rounded(float x) { return static_cast<float>(Element(x)); }
  __device__ static Chunk chunk(float a, float b, float c, float d) {
    Chunk made{};
    made.column[0] = Element(a);
    made.column[1] = Element(b);
    made.column[2] = Element(c);
    made.column[3] = Element(d);
    return made;
  }
  // One that Element has no room for becomes NaN, which reaches the sums.
  __device__ static Chunk split(float x, float fourth) {
    constexpr float kMost = kHalf ? 65504.0f : 3.38e38f;
    const bool finite = fabsf(x) < INFINITY;
    if (finite && fabsf(x) > kMost) x = NAN;
    const float first = rounded(x), rest = finite ? x - first : 0.0f, second = rounded(rest);
    return chunk(first, second, rest - second, fourth);
  }
};

// As numbers, for where shared memory has no room for operands.
template <int kStages> struct RowNumbers {
  struct Stage {
    float shift[kWideTile], delta[kWideTile]; // shift: -lse to base 2
    DroppedKeys dropped;
  } stages[kStages];

  __device__ void init() {}
  __device__ void set_row(int stage, int row, const RowStatistics &fetched, float) {
    const RowStatistics known = to_base_2(fetched);
    stages[stage].shift[row] = -known.lse;
    stages[stage].delta[row] = known.delta;
  }
  __device__ uint32_t set_key(int stage, int, bool kept) { return stages[stage].dropped.set(kept, kBfloat16Inf); }
};

} // namespace fdm::cuda
