// SPDX-License-Identifier: BSD-3-Clause
// A bias for each column as operands of a product: one more step of 16 columns, in which every row of Q has ones. The
// tensor cores then add the bias to the scores.
#pragma once

#include "operand_chunk.cuh"

namespace fdm::cuda {

// The factor of the fourth column, which holds large biases of float16.
constexpr float kFourth = 1024.0f;

template <class Element> __device__ __forceinline__ OperandChunk<Element> ones_chunk() {
  return OperandChunk<Element>::make(1.0f, 1.0f, 1.0f, kFourth);
}

// A bias times `factor`, in units of Q K'; only a bias of -inf drops a key. A float16 bias that exceeds the four
// columns becomes NaN. A bfloat16 bias is clamped to kLargest. The scale is between 2^-30 and 2^20, so a clamped
// score is far above what quick_softmax() accepts. It is also far from the lowest float, the shift of a row without a
// maximum.
template <class Element> __device__ __forceinline__ OperandChunk<Element> bias_chunk(float given, float factor) {
  using Chunk = OperandChunk<Element>;
  constexpr bool kHalf = __is_same(Element, __half);
  constexpr float kLargest = kHalf ? 65504.0f : 0x1p90f;
  const bool finite = fabsf(given) < INFINITY;
  float bias = given * factor, fourth = 0.0f;
  if (!kHalf && finite) bias = fminf(fmaxf(bias, -kLargest), kLargest);
  if (kHalf && finite && fabsf(bias) > kLargest) {
    fourth = static_cast<float>(Element(bias / kFourth));
    bias = fabsf(fourth) < INFINITY ? fmaf(-fourth, kFourth, bias) : NAN;
  }
  return Chunk::split(bias, fourth);
}

template <class Element, int kColumns, int kSlotCount> struct BiasSlots {
  using Chunk = OperandChunk<Element>;
  alignas(128) Chunk slots[kSlotCount][kColumns];

  // Stores the bias of a column times `factor`.
  __device__ void store(int slot, int column, float given, float factor) {
    slots[slot][column] = bias_chunk<Element>(given, factor);
  }
};

template <class Element, int kColumns, int kSlotCount> struct BiasOperand : BiasSlots<Element, kColumns, kSlotCount> {
  static constexpr int kRows = 64;
  using Chunk = OperandChunk<Element>;
  using BiasSlots<Element, kColumns, kSlotCount>::slots;

  alignas(128) Chunk ones[kRows];
  alignas(128) Chunk zeros[kRows > kColumns ? kRows : kColumns]; // the second eight columns of all operands

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    for (int i = threadIdx.x; i < kRows; i += blockDim.x) ones[i] = ones_chunk<Element>();
    for (int i = threadIdx.x; i < int(sizeof(zeros) / sizeof(Chunk)); i += blockDim.x) zeros[i] = {};
    ptx::fence_async_proxy();
  }

  // Stores a bias of -inf for a dropped column, else of 0.
  __device__ void drop(int slot, int column, bool dropped) {
    slots[slot][column] = Chunk::make(dropped ? -INFINITY : 0.0f, 0.0f, 0.0f);
  }

  __device__ uint64_t ones_descriptor() const { return operand_descriptor(ones, zeros); }
  __device__ uint64_t descriptor(int slot, int first = 0) const {
    return operand_descriptor(&slots[slot][first], zeros);
  }
};

// The same in less memory: eight rows of ones serve all rows of Q. The second eight columns of the biases alias the
// first and are multiplied by zeros. A non-finite bias thus makes NaN of its own key only.
template <class Element, int kColumns, int kSlotCount>
struct SmallBiasOperand : BiasSlots<Element, kColumns, kSlotCount> {
  using Chunk = OperandChunk<Element>;
  using BiasSlots<Element, kColumns, kSlotCount>::slots;
  static constexpr int kRows = 8; // rows in memory of one descriptor

  alignas(128) Chunk ones[2][kRows]; // ones, then zeros for the second eight columns

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    if (threadIdx.x < 2 * kRows) {
      ones[threadIdx.x / kRows][threadIdx.x % kRows] = threadIdx.x < kRows ? ones_chunk<Element>() : Chunk{};
    }
    ptx::fence_async_proxy();
  }

  __device__ uint64_t ones_descriptor() const {
    return ptx::unswizzled_matrix_descriptor(ptx::shared_address(ones), sizeof(ones[0]), 0);
  }
  __device__ uint64_t descriptor(int slot) const {
    return ptx::unswizzled_matrix_descriptor(ptx::shared_address(slots[slot]), 0, kRows * sizeof(Chunk));
  }
};

} // namespace fdm::cuda
