// SPDX-License-Identifier: BSD-3-Clause
// What the backward pass has in its workspace for each row, key and key block.
#pragma once

#include <cmath>

#include "../../indexing.h"

namespace fdm::cuda {

// The statistics of a row are lse to base 2, and delta = dO . O - dlse; with a sink, what prepare.cu says. Rows
// without a gradient have lse = inf, which makes P = 0, and delta = 0.
struct RowStatistics {
  float lse, delta;

  FDM_MEMBER bool empty() const { return lse == INFINITY; }
};

struct RowRange {
  int32_t first, past;
};

// A key that is kept, and the rows that keep it: start <= row < end.
struct alignas(16) KeyRows {
  int32_t key, start, end;
  int32_t sum; // the row of KeySegments::sums to which its gradients are added; -1: they are written
};

// A key block of a segment: the rows that keep any of them, which of the segment's blocks in `ordered` it is, and its
// keys. There is none where past < first.
struct alignas(16) SegmentBlock {
  int32_t first, past, position, keys;
};

// A key block of one KV head, or one of the parts into which its rows and query heads are divided.
struct KeyItem {
  int32_t block; // see KeyDivision::blocks
  int32_t part, parts;
  int32_t stored_part; // the number of the first part among those stored; only if parts > 1
};

// The rows that a head has sums of dq for. No two packed sequences share a tile: the next one of n rows begins at least
// ceil(n / tile_rows) tiles further.
FDM_INLINE int64_t query_sum_rows(const fdm_problem &p, int32_t tile_rows) {
  return is_varlen(p) ? (total_rows(p) / tile_rows + p.batch) * tile_rows : round_up(p.queries, tile_rows);
}

} // namespace fdm::cuda
