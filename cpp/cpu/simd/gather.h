// SPDX-License-Identifier: BSD-3-Clause
// Copies of tensor rows to contiguous float32 buffers and back.
#pragma once

#include <utility>

#include "../kernels.h"
#include "../scalar.h"
#include "vec.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

template <class Type> void load_row_of(const void *base, int64_t offset, int64_t stride, int64_t n, float *out) {
  const auto *row = static_cast<const typename Type::Storage *>(base) + offset;
  if (stride == 1)
    for (int64_t d = 0; d < n; ++d) out[d] = Type::load(row[d]);
  else
    for (int64_t d = 0; d < n; ++d) out[d] = Type::load(row[d * stride]);
}

template <class Type> void store_row_of(void *base, int64_t offset, int64_t stride, int64_t n, const float *values) {
  auto *row = static_cast<typename Type::Storage *>(base) + offset;
  for (int64_t d = 0; d < n; ++d) row[d * stride] = Type::store(values[d]);
}

// n elements of a dtype, `stride` apart.
inline void load_elements(const void *base, int32_t dtype, int64_t offset, int64_t stride, int64_t n, float *out) {
  switch (dtype) {
  case FDM_FLOAT16:
    return load_row_of<Float16>(base, offset, stride, n, out);
  case FDM_BFLOAT16:
    return load_row_of<BFloat16>(base, offset, stride, n, out);
  default:
    return load_row_of<Float32>(base, offset, stride, n, out);
  }
}

inline void store_row(const fdm_tensor &t, int64_t offset, int64_t stride, int64_t n, const float *values) {
  switch (t.dtype) {
  case FDM_FLOAT16:
    return store_row_of<Float16>(t.data, offset, stride, n, values);
  case FDM_BFLOAT16:
    return store_row_of<BFloat16>(t.data, offset, stride, n, values);
  default:
    return store_row_of<Float32>(t.data, offset, stride, n, values);
  }
}

inline void zero(float *out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = 0.0f;
}

// Whether the keys of these columns are consecutive.
inline bool is_run(const int32_t *index, int64_t count) {
  bool result = true;
  for (int64_t c = 0; c < count; ++c) result &= index[c] == index[0] + c;
  return result && index[0] >= 0;
}

// A head-dimension row, padded with zeros.
inline void load_padded_row(const fdm_tensor &t, int64_t offset, int64_t dim, int64_t padded, float *out) {
  load_elements(t.data, t.dtype, offset, t.stride[3], dim, out);
  zero(out + dim, padded - dim);
}

// The offset of key j of a sequence in k or v, through the block table if present.
inline int64_t key_offset(const fdm_problem &p, const fdm_tensor &t, const Sequence &s, int64_t sequence_index,
                          int64_t j, int64_t kv_head) {
  const fdm_tensor &table = p.block_table;
  if (!present(table)) return s.batch * t.stride[0] + (s.k_begin + j) * t.stride[1] + kv_head * t.stride[2];
  const int64_t page_size = t.shape[1];
  const int64_t entry = sequence_index * table.stride[0] + j / page_size * table.stride[1];
  const int64_t page = static_cast<const int32_t *>(table.data)[entry];
  return page * t.stride[0] + j % page_size * t.stride[1] + kv_head * t.stride[2];
}

// out[c] = row of key index[c]; zeros for index -1 and for the columns from count up to padded_count.
inline void gather_keys(const fdm_problem &p, const fdm_tensor &t, const TileTask &task, const int32_t *index,
                        int64_t count, int64_t padded_count, float *out) {
  const int64_t padded = padded_head_dim(p), kv_head = task.head / group_size(p);
  for (int64_t c = 0; c < count; ++c) {
    float *row = out + c * padded;
    if (index[c] < 0)
      zero(row, padded);
    else
      load_padded_row(t, key_offset(p, t, task.sequence, task.sequence_index, index[c], kv_head), p.head_dim, padded,
                      row);
  }
  zero(out + count * padded, (padded_count - count) * padded);
}

inline void load_rows(const fdm_tensor &t, int64_t offset, int64_t count, int64_t dim, float *rows) {
  for (int64_t i = 0; i < count; ++i)
    load_elements(t.data, t.dtype, offset + i * t.stride[1], t.stride[3], dim, rows + i * dim);
}

// Swaps the off-diagonal Half x Half blocks of a pair (a, b) of rows: the second halves of a become the first halves
// of b, and the first halves of b the second halves of a.
template <int Half, int... Lane> inline void swap_halves(vfloat &a, vfloat &b, std::integer_sequence<int, Lane...>) {
  const vfloat first = __builtin_shufflevector(a, b, (Lane & Half ? kLanes + Lane - Half : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & Half ? kLanes + Lane : Lane + Half)...);
  a = first;
}

// Transposes by swapping the off-diagonal blocks of halves, then of quarters, down to single elements.
template <int Half> inline void transpose_blocks(vfloat (&rows)[kLanes]) {
  if constexpr (Half > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      if (!(i & Half)) swap_halves<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, kLanes>{});
    transpose_blocks<Half / 2>(rows);
  }
}

// out (columns x out_row) = transpose of matrix (rows x columns); both counts are multiples of kLanes.
inline void transpose(const float *matrix, int64_t rows, int64_t columns, float *out, int64_t out_row) {
  for (int64_t r = 0; r < rows; r += kLanes)
    for (int64_t c = 0; c < columns; c += kLanes) {
      vfloat block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = load(matrix + (r + i) * columns + c);
      transpose_blocks<kLanes / 2>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (c + i) * out_row + r, block[i]);
    }
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
