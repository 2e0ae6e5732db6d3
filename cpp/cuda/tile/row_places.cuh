// SPDX-License-Identifier: BSD-3-Clause
// Rows identified by number. One instruction computes the address from the 32-bit number and the row stride, so a
// column needs no two 64-bit addresses.
#pragma once

#include "key_ring.cuh"

namespace fdm::cuda {

// Rows of K or V for one KV head of a sequence, which are copied 16 bytes at a time.
struct GatheredRows {
  const char *first; // row 0
  int32_t bytes;     // from one row to the next
};

// The row strides of Q, K and V. K and V share a row number: the key, or with a block table, the key's place in the
// pages.
struct RowPlaces {
  int32_t q_bytes, k_bytes, v_bytes; // from one row to the next
  int32_t page_rows;                 // from one page of a block table to the next

  RowPlaces() = default;
  // Valid for problems with Alignment::row_places; kernels of other problems do not read it.
  explicit RowPlaces(const fdm_problem &p) {
    const auto bytes = [](const fdm_tensor &t) { return int32_t(2 * t.stride[1]); };
    q_bytes = bytes(p.q);
    k_bytes = bytes(p.k);
    v_bytes = bytes(p.v);
    page_rows = present(p.block_table) && p.k.stride[1] ? int32_t(p.k.stride[0] / p.k.stride[1]) : 0;
  }

  __device__ __forceinline__ static GatheredRows rows(const fdm_problem &p, const fdm_tensor &t, int32_t bytes,
                                                      const Sequence &s, int64_t kv_head) {
    const auto *first = static_cast<const uint16_t *>(t.data) + kv_head * t.stride[2];
    if (!present(p.block_table)) first = first_key_row(t, s, kv_head);
    return {reinterpret_cast<const char *>(first), bytes};
  }

  // The row number of key j of a sequence.
  __device__ __forceinline__ int32_t row(const fdm_problem &p, int64_t sequence_index, int32_t j) const {
    const fdm_tensor &table = p.block_table;
    if (!present(table)) return j;
    const auto page_size = static_cast<int32_t>(p.k.shape[1]);
    const int32_t entry = j / page_size;
    const int32_t page =
        static_cast<const int32_t *>(table.data)[sequence_index * table.stride[0] + entry * table.stride[1]];
    return max(0, min(page, int32_t(p.k.shape[0]) - 1)) * page_rows + (j - entry * page_size); // see sequence()
  }
};

} // namespace fdm::cuda
