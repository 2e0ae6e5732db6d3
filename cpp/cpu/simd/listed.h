// SPDX-License-Identifier: BSD-3-Clause
// Products of a few query heads with their listed keys. Each key row is read in place: few heads do not make up for
// transposing a key block.
#pragma once

#include "gather.h"

namespace fdm::cpu::FDM_SIMD_NAMESPACE {
namespace {

// With at least this many heads per list, transposed keys are faster.
constexpr int64_t kMinHeadsToTranspose = 6;

// The longest row, of zeros, in place of an invalid key.
alignas(64) constexpr float kZeroRow[256] = {};

// A block of rows of K or V, each of padded_head_dim floats, followed by zero rows up to whole vectors.
using RowPointers = const float *[kBlockKeys];

// Points to rows in the tensor, or in `copies` if they need conversion or padding.
inline void find_rows(const fdm_problem &p, const fdm_tensor &t, const TileTask &task, const int32_t *index,
                      int64_t count, float *copies, RowPointers &rows) {
  const int64_t dim = padded_head_dim(p), kv_head = task.head / group_size(p);
  if (t.dtype == FDM_FLOAT32 && t.stride[3] == 1 && p.head_dim == dim && !present(p.block_table)) {
    const float *const first =
        static_cast<const float *>(t.data) + key_offset(p, t, task.sequence, task.sequence_index, 0, kv_head);
    for (int64_t c = 0; c < count; ++c) rows[c] = index[c] < 0 ? kZeroRow : first + index[c] * t.stride[1];
  } else {
    for (int64_t c = 0; c < count; ++c) {
      rows[c] = index[c] < 0 ? kZeroRow : copies + c * dim;
      if (index[c] < 0) continue;
      const int64_t offset = key_offset(p, t, task.sequence, task.sequence_index, index[c], kv_head);
      load_padded_row(t, offset, p.head_dim, dim, copies + c * dim);
    }
  }
  for (int64_t c = count; c < round_up(count, kLanes); ++c) rows[c] = kZeroRow;
}

// Leaves the sum of each row's lanes in rows[0], with the exchange pattern of transpose_blocks.
template <int Half> inline void sum_lanes(vfloat (&rows)[kLanes]) {
  if constexpr (Half > 0) {
#pragma GCC unroll 8
    for (int i = 0; i < Half; ++i) {
      swap_halves<Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, kLanes>{});
      rows[i] += rows[i + Half];
    }
    sum_lanes<Half / 2>(rows);
  }
}

// out[c] = x . row c, up to whole vectors. Not inlined, so that it has enough registers for pointers.
__attribute__((noinline)) void dot_rows(int64_t count, int64_t dim, const float *x, const RowPointers &rows,
                                        float *out) {
  constexpr int kRowsAtOnce = kLanes < 8 ? kLanes : 8; // row pointers that fit registers
  for (int64_t first = 0; first < count; first += kLanes) {
    vfloat sums[kLanes];
#pragma GCC unroll 4
    for (int part = 0; part < kLanes; part += kRowsAtOnce) {
      const float *const *const part_rows = rows + first + part;
      vfloat part_sums[kRowsAtOnce] = {};
      for (int64_t d = 0; d < dim; d += kLanes) {
        const vfloat vector = load(x + d);
#pragma GCC unroll 8
        for (int i = 0; i < kRowsAtOnce; ++i) part_sums[i] += vector * load(part_rows[i] + d);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRowsAtOnce; ++i) sums[part + i] = part_sums[i];
    }
    sum_lanes<kLanes / 2>(sums);
    store(out + first, sums[0]);
  }
}

template <int Vectors>
inline void add_row_vectors(int64_t count, const float *weights, const RowPointers &rows, int64_t d, float *out) {
  vfloat even[Vectors] = {}, odd[Vectors] = {};
  int64_t c = 0;
  for (; c + 2 <= count; c += 2)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      even[v] += weights[c] * load(rows[c] + d + v * kLanes);
      odd[v] += weights[c + 1] * load(rows[c + 1] + d + v * kLanes);
    }
  if (c < count)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) even[v] += weights[c] * load(rows[c] + d + v * kLanes);
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) store(out + d + v * kLanes, load(out + d + v * kLanes) + (even[v] + odd[v]));
}

// out += sum_c weights[c] row c
inline void add_rows_to(int64_t count, int64_t dim, const float *weights, const RowPointers &rows, float *out) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) add_row_vectors<4>(count, weights, rows, d, out);
  for (; d < dim; d += kLanes) add_row_vectors<1>(count, weights, rows, d, out);
}

template <int Vectors>
inline void add_vectors_to_keys(int64_t count, int64_t dim, const float *weights, const float *x, const int32_t *index,
                                float *sums) {
  vfloat vectors[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) vectors[v] = load(x + v * kLanes);
  for (int64_t c = 0; c < count; ++c) {
    if (index[c] < 0) continue;
    float *const sum = sums + index[c] * dim;
    const float weight = weights[c];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(sum + v * kLanes, load(sum + v * kLanes) + weight * vectors[v]);
  }
}

// sums[index[c]] += sum_h weights[h][c] x[h], for each valid key of column c
inline void add_to_keys(int64_t heads, int64_t count, int64_t dim, const float *weights, const float *x,
                        const int32_t *index, float *sums) {
  for (int64_t h = 0; h < heads; ++h, weights += kBlockKeys, x += dim) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) add_vectors_to_keys<4>(count, dim, weights, x + d, index, sums + d);
    for (; d < dim; d += kLanes) add_vectors_to_keys<1>(count, dim, weights, x + d, index, sums + d);
  }
}

} // namespace
} // namespace fdm::cpu::FDM_SIMD_NAMESPACE
