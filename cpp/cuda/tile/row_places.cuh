// SPDX-License-Identifier: BSD-3-Clause
// Rows by their numbers: a number of 32 bits, and the bytes from row to row, are an address in one instruction, and two
// addresses of 64 bits need not be kept for each column.
#pragma once

#include "key_ring.cuh"

namespace fdm::cuda {

// Rows of K or V that are copied 16 bytes at a time, for one KV head of a sequence.
struct GatheredRows {
  const char *first; // row 0
  int32_t bytes;     // from one row to the next
};

// Where the rows of Q, K and V lie. Those of K and V have a number in common: that of the key, or with a block table
// that of its place in the pages.
struct RowPlaces {
  int32_t q_bytes, k_bytes, v_bytes; // from one row to the next
  int32_t page_rows;                 // from one page of a block table to the next

  RowPlaces() = default;
  // Holds for problems with Alignment::row_places; kernels of other problems do not read it.
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

  // The row of key j of a sequence.
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
