// SPDX-License-Identifier: BSD-3-Clause
// Operands of one more step of 16 columns of a product, which adds numbers to its results on the tensor cores.
//
// Element has too few digits for such a number. So three columns hold it: each holds the rest after the columns
// before. That gives 24 digits for bfloat16, as in float32, or 33 for float16.
#pragma once

#include <cmath>

#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

namespace fdm::cuda {

// Eight columns of a row. Without a swizzle, eight rows are contiguous (PTX ISA, "core matrix").
template <class Element> struct alignas(16) OperandChunk {
  Element column[8];

  // The other columns are zeros.
  __device__ static OperandChunk make(float a, float b, float c, float d = 0.0f) {
    OperandChunk made{};
    made.column[0] = Element(a);
    made.column[1] = Element(b);
    made.column[2] = Element(c);
    made.column[3] = Element(d);
    return made;
  }
  // The first three columns add up to x.
  __device__ static OperandChunk split(float x, float fourth = 0.0f) {
    const auto rounded = [](float y) { return static_cast<float>(Element(y)); };
    const float first = rounded(x), rest = fabsf(x) < INFINITY ? x - first : 0.0f, second = rounded(rest);
    return make(first, second, rest - second, fourth);
  }
};

// The descriptor of an operand whose rows begin at `first`, and whose second eight columns are the rows of `zeros`.
template <class Element>
__device__ __forceinline__ uint64_t operand_descriptor(const OperandChunk<Element> *first,
                                                       const OperandChunk<Element> *zeros) {
  const uint32_t address = ptx::shared_address(first);
  return ptx::unswizzled_matrix_descriptor(address, ptx::shared_address(zeros) - address, 8 * sizeof(*first));
}

} // namespace fdm::cuda
