// SPDX-License-Identifier: BSD-3-Clause
// The rows that keep each key of a list, and whether these cover a row tile.
#pragma once

#include "list_work.cuh"

namespace fdm::cuda {

// Rows within the sequence: start <= row < end.
struct RowInterval {
  int32_t start, end;

  __device__ bool any() const { return start < end; }
};

// Reads the rows that keep a key, the causal limit included.
struct ListRows {
  const int32_t *start, *end; // null: a key mask
  const uint8_t *mask;
  int64_t start_stride, end_stride, mask_stride;
  int64_t causal_off;
  int32_t queries;
  bool causal;

  __device__ ListRows(const fdm_problem &p, const ListWork &work) : start(nullptr), end(nullptr), mask(nullptr) {
    const auto offset = [&](const fdm_tensor &t, int64_t stride) {
      return work.list_batch * t.stride[0] + work.list_head * t.stride[1] + work.s.k_begin * stride;
    };
    start_stride = p.start.stride[3];
    end_stride = p.end.stride[3];
    mask_stride = p.mask.shape[3] == 1 ? 0 : p.mask.stride[3];
    if (present(p.start)) {
      start = static_cast<const int32_t *>(p.start.data) + offset(p.start, start_stride);
      end = static_cast<const int32_t *>(p.end.data) + offset(p.end, end_stride);
    } else {
      mask = static_cast<const uint8_t *>(p.mask.data) + offset(p.mask, mask_stride);
    }
    causal = is_causal(p);
    causal_off = work.s.causal_off;
    queries = static_cast<int32_t>(work.s.q_count);
  }

  __device__ RowInterval operator()(int64_t j) const {
    RowInterval rows{0, queries};
    if (start) {
      rows.start = max(0, __ldg(start + j * start_stride));
      rows.end = min(queries, __ldg(end + j * end_stride));
    } else if (!__ldg(mask + j * mask_stride)) {
      rows.end = 0;
    }
    // A key of the sequence has j - causal_off < queries, so the maximum fits int32.
    if (causal) rows.start = static_cast<int32_t>(max64(rows.start, j - causal_off));
    return rows;
  }
};

// Whether every row of a tile keeps a key (full), or only some rows do (partial).
struct TileKey {
  bool full, partial;

  __device__ TileKey(const RowInterval &rows, int32_t first, int32_t past)
      : full(first < past && rows.start <= first && rows.end >= past),
        partial(!full && max(rows.start, first) < min(rows.end, past)) {}
};

} // namespace fdm::cuda
