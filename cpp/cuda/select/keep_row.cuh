// SPDX-License-Identifier: BSD-3-Clause
// A row of booleans that a selection writes.
#pragma once

#include "candidates.cuh"

namespace fdm::cuda {

struct KeepRow : SelectionRow {
  int64_t query;   // the query whose bias and mask the row reads
  int32_t visible; // keys that it sees
  int32_t columns; // booleans of the row
  int64_t stride;
  uint8_t *keep; // the boolean of the first key
  bool absent;   // the sequence has fewer rows

  // Row numbers go through the rows of a head, then the heads, then the sequences.
  __device__ KeepRow(const fdm_selection &s, uint32_t rows, uint32_t number)
      : KeepRow(s, number % rows, number / rows % static_cast<uint32_t>(s.keep.shape[1]),
                number / rows / static_cast<uint32_t>(s.keep.shape[1])) {}

private:
  __device__ KeepRow(const fdm_selection &s, int64_t i, int64_t result_head, int64_t b)
      : SelectionRow(selection_row(s, s.keep, b, result_head)) {
    const bool per_row = s.keep.shape[2] > 1;
    absent = per_row && i >= q_count;
    // A row for all queries equals that of the last query, which sees the most keys.
    query = per_row ? i : max64(0, q_count - 1);
    const int64_t limit = (s.flags & FDM_CAUSAL) ? query + causal_off + 1 : k_count;
    visible = static_cast<int32_t>(max64(0, min64(k_count, limit)));
    columns = static_cast<int32_t>(per_row ? s.keep.shape[3] : k_count);
    stride = s.keep.stride[3];
    keep = static_cast<uint8_t *>(s.keep.data) + (is_varlen(s) ? 0 : b) * s.keep.stride[0] +
           result_head * s.keep.stride[1] + (per_row ? (q_begin + i) * s.keep.stride[2] : k_begin * stride);
  }
};

} // namespace fdm::cuda
