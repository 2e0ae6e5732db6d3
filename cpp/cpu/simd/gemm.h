// SPDX-License-Identifier: BSD-3-Clause
// The only matrix product of the pack: C (+)= A B, for operands that fit a cache.
//
// A is read element by element with arbitrary strides, so it may be a transpose. B and C have contiguous rows, whose
// length N is a multiple of kLanes. All five products of the attention passes have this form, given K and V of a
// block in both layouts.
#pragma once

#include "vec.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// Rows and vectors of C in registers: 24 of the 32 registers of AVX-512 and NEON, 12 of the 16 registers of others.
constexpr int kRegisterRows = 6;
#if FDM_SIMD_BYTES == 64 || defined(__aarch64__)
constexpr int kRegisterVectors = 4;
#else
constexpr int kRegisterVectors = 2;
#endif

struct Operand {
  const float *data;
  int64_t row, col; // strides in floats
};

template <int Rows, int Vectors>
void product_block(int64_t depth, const Operand &a, const float *b, int64_t b_row, float *c, int64_t c_row, bool add) {
  vfloat sum[Rows][Vectors] = {};
  const float *a_column = a.data;
  for (int64_t k = 0; k < depth; ++k, a_column += a.col, b += b_row) {
    vfloat b_vectors[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) b_vectors[v] = load(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const float scalar = a_column[r * a.row];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] += scalar * b_vectors[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      float *vector = c + r * c_row + v * kLanes;
      store(vector, add ? load(vector) + sum[r][v] : sum[r][v]);
    }
}

template <int Rows>
void product_rows(int64_t vectors, int64_t depth, const Operand &a, const float *b, int64_t b_row, float *c,
                  int64_t c_row, bool add) {
  int64_t v = 0;
  for (; v + kRegisterVectors <= vectors; v += kRegisterVectors)
    product_block<Rows, kRegisterVectors>(depth, a, b + v * kLanes, b_row, c + v * kLanes, c_row, add);
  if constexpr (kRegisterVectors > 2)
    for (; v + 2 <= vectors; v += 2)
      product_block<Rows, 2>(depth, a, b + v * kLanes, b_row, c + v * kLanes, c_row, add);
  for (; v < vectors; ++v) product_block<Rows, 1>(depth, a, b + v * kLanes, b_row, c + v * kLanes, c_row, add);
}

// The number of products of an element that are summed sequentially. The rounding error of a running sum grows with
// its length; sums of parts have about half the error at a head dimension of 256.
constexpr int64_t kDepthBlock = 64;

void product_part(int64_t rows, int64_t columns, int64_t depth, Operand a, const float *b, int64_t b_row, float *c,
                  int64_t c_row, bool add) {
  const int64_t vectors = columns / kLanes;
  int64_t r = 0;
  for (; r + kRegisterRows <= rows; r += kRegisterRows, a.data += kRegisterRows * a.row, c += kRegisterRows * c_row)
    product_rows<kRegisterRows>(vectors, depth, a, b, b_row, c, c_row, add);
  switch (rows - r) {
  case 5:
    return product_rows<5>(vectors, depth, a, b, b_row, c, c_row, add);
  case 4:
    return product_rows<4>(vectors, depth, a, b, b_row, c, c_row, add);
  case 3:
    return product_rows<3>(vectors, depth, a, b, b_row, c, c_row, add);
  case 2:
    return product_rows<2>(vectors, depth, a, b, b_row, c, c_row, add);
  case 1:
    return product_rows<1>(vectors, depth, a, b, b_row, c, c_row, add);
  default:
    return;
  }
}

// C (rows x columns) (+)= A (rows x depth) B (depth x columns)
void product(int64_t rows, int64_t columns, int64_t depth, Operand a, const float *b, int64_t b_row, float *c,
             int64_t c_row, bool add) {
  for (int64_t k = 0; k < depth; k += kDepthBlock) {
    product_part(rows, columns, min64(kDepthBlock, depth - k), a, b, b_row, c, c_row, add || k > 0);
    a.data += kDepthBlock * a.col;
    b += kDepthBlock * b_row;
  }
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
