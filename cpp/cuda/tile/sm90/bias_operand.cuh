// SPDX-License-Identifier: BSD-3-Clause
// A bias for each column as operands of a product: one more step of 16 columns, in which every row of Q has ones, adds it
// to the scores on the tensor cores.
//
// Element has too few digits for a bias, so three columns hold what is left of it after the columns before: 24 digits of
// bfloat16, as float32 has, or 33 of float16. The other columns are zeros.
#pragma once

#include <cmath>

#include "../../ptx/barrier.cuh"
#include "../../ptx/wgmma.cuh"

namespace fdm::cuda {

template <class Element, int kColumns, int kSlotCount> struct BiasOperand {
  static constexpr bool kHalf = __is_same(Element, __half);
  static constexpr int kRows = 64;
  // Eight columns of a row. Without a swizzle, eight rows lie one after the other (PTX ISA, "core matrix").
  struct alignas(16) Chunk {
    Element column[8];
  };
  static constexpr uint32_t kStride = 8 * sizeof(Chunk);

  alignas(128) Chunk slots[kSlotCount][kColumns];
  alignas(128) Chunk ones[kRows];
  alignas(128) Chunk zeros[kRows > kColumns ? kRows : kColumns]; // the second eight columns of all

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    for (int i = threadIdx.x; i < kRows; i += blockDim.x) ones[i] = chunk(1.0f, 1.0f, 1.0f);
    for (int i = threadIdx.x; i < int(sizeof(zeros) / sizeof(Chunk)); i += blockDim.x) zeros[i] = {};
    ptx::fence_async_proxy();
  }

  // Stores the bias of a column times `factor`, in units of the product of Q and K; only a bias of -inf drops a key. One
  // that Element has no room for becomes NaN. One of bfloat16 is cut off at kMost: times the scale, which is between 2^-30
  // and 2^30, that is far beyond what quick_softmax() takes, and far from the lowest float, by which it shifts a row that
  // has no maximum yet.
  __device__ void store(int slot, int column, float given, float factor) {
    constexpr float kMost = kHalf ? 65504.0f : 0x1p90f;
    const bool finite = fabsf(given) < INFINITY;
    float bias = given * factor;
    if (!kHalf && finite) bias = fminf(fmaxf(bias, -kMost), kMost);
    if (kHalf && finite && fabsf(bias) > kMost) bias = NAN;
    const float first = rounded(bias), rest = finite ? bias - first : 0.0f, second = rounded(rest);
    slots[slot][column] = chunk(first, second, rest - second);
  }

  // Stores a bias of -inf for a column that is dropped, else of 0.
  __device__ void drop(int slot, int column, bool dropped) {
    Chunk made{};
    if (dropped) made.column[0] = Element(-INFINITY);
    slots[slot][column] = made;
  }

  __device__ uint64_t ones_descriptor() const { return descriptor(ones); }
  __device__ uint64_t descriptor(int slot) const { return descriptor(slots[slot]); }

private:
  __device__ uint64_t descriptor(const Chunk *first) const {
    const uint32_t address = ptx::shared_address(first);
    return ptx::plain_matrix_descriptor(address, ptx::shared_address(zeros) - address, kStride);
  }
  __device__ static float rounded(float x) { return static_cast<float>(Element(x)); }
  __device__ static Chunk chunk(float a, float b, float c) {
    Chunk made{};
    made.column[0] = Element(a);
    made.column[1] = Element(b);
    made.column[2] = Element(c);
    return made;
  }
};

} // namespace fdm::cuda
