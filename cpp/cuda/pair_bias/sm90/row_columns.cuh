// SPDX-License-Identifier: BSD-3-Clause
// The statistics of each row, lse and delta, and whether each key is dropped, in the form that the consumers of the
// fused kernel read.
#pragma once

#include "../../tile/sm90/operand_chunk.cuh"
#include "../statistics.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

// As operands of products: one more k-step of 16 columns adds them on the tensor cores. S = Q K' then includes -lse,
// and -inf for dropped keys; dP = dO V' includes -delta.
template <class Element, int kStages> struct RowColumns {
  static constexpr bool kHalf = __is_same(Element, __half);
  using Chunk = OperandChunk<Element>;

  alignas(128) Chunk shifts[kStages][kPairBiasTileSm90], deltas[kStages][kPairBiasTileSm90],
      keys[kStages][kPairBiasTileSm90];
  alignas(128) Chunk ones[kPairBiasTileSm90];
  alignas(128) Chunk zeros[kPairBiasTileSm90]; // columns 8 to 15 of all operands

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    for (int i = threadIdx.x; i < kPairBiasTileSm90; i += blockDim.x) {
      ones[i] = Chunk::make(1.0f, 1.0f, 1.0f);
      zeros[i] = {};
    }
    ptx::fence_async_proxy();
  }

  // Stores a row's -lse, divided by `scale`, and -delta.
  __device__ void set_row(int stage, int row, const RowStatistics &known, float scale) {
    const bool empty = fabsf(known.lse) > kUnusableLse;
    shifts[stage][row] = split(empty ? -INFINITY : -known.lse / scale, 1.0f);
    deltas[stage][row] = split(-known.delta, 0.0f);
  }
  // Stores whether a key is kept. Returns the kept keys of the producer warp as bits.
  __device__ uint32_t set_key(int stage, int key, bool kept) {
    keys[stage][key] = Chunk::make(1.0f, 1.0f, 1.0f, kept ? 0.0f : -INFINITY);
    return __ballot_sync(0xffffffffu, kept);
  }

  // Left operands of a consumer warpgroup: shifts and deltas. Right operands: keys and ones.
  __device__ uint64_t shifts_of(int stage, int group) const { return descriptor(&shifts[stage][64 * group]); }
  __device__ uint64_t deltas_of(int stage, int group) const { return descriptor(&deltas[stage][64 * group]); }
  __device__ uint64_t keys_of(int stage, int first) const { return descriptor(&keys[stage][first]); }
  __device__ uint64_t ones_descriptor() const { return descriptor(ones); }

private:
  __device__ uint64_t descriptor(const Chunk *first) const { return operand_descriptor(first, zeros); }
  // A value beyond the range of Element becomes NaN, which reaches the sums.
  __device__ static Chunk split(float x, float fourth) {
    constexpr float kLargest = kHalf ? 65504.0f : 3.38e38f;
    return Chunk::split(fabsf(x) < INFINITY && fabsf(x) > kLargest ? NAN : x, fourth);
  }
};

// The statistics as numbers, for configurations whose shared memory has no room for operands.
template <int kStages> struct RowNumbers {
  struct Stage {
    float shift[kPairBiasTileSm90], delta[kPairBiasTileSm90]; // shift: -lse to base 2
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
