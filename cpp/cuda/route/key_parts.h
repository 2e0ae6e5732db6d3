// SPDX-License-Identifier: BSD-3-Clause
// Workspace elements of the backward pass for each row, key and key block.
#pragma once

#include <cmath>

#include "helper_work.h"

namespace fdm::cuda {

// The statistics of a row: lse to base 2 and delta = dO . O - dlse; prepare.cu describes the case with a sink. A row
// without a gradient has lse = inf, which makes P = 0, and delta = 0.
struct RowStatistics {
  float lse, delta;

  FDM_MEMBER bool empty() const { return lse == INFINITY; }
};

struct RowRange {
  int32_t first, past;
};

// A kept key and the rows that keep it: start <= row < end.
struct alignas(16) KeyRows {
  int32_t key, start, end;
  int32_t sum; // the row of KeySegments::sums to which its gradients are added; -1: the gradients are written
};

// A key block of a segment: the rows that keep any of its keys, its position among the segment's blocks in `ordered`,
// and its number of keys. Empty if past < first.
struct alignas(16) SegmentBlock {
  int32_t first, past, position, keys;
};

// A key block of one KV head, or one of its parts, which divide its rows and query heads.
struct KeyItem {
  int32_t block; // see KeyDivision::blocks
  int32_t part, parts;
  int32_t stored_part; // the number of the first part among the stored parts; only if parts > 1
};

// The rows of a head in the sums of dQ. No two packed sequences share a tile: after a sequence of n rows the next
// begins at least ceil(n / tile_rows) tiles later.
FDM_INLINE int64_t query_sum_rows(const fdm_problem &p, int32_t tile_rows) {
  return is_varlen(p) ? (total_rows(p) / tile_rows + p.batch) * tile_rows : round_up(p.queries, tile_rows);
}

// The bands of the sums of a head's keys (SegmentWork::max_sums). No two packed sequences share a band: bands are
// numbered as in NumberedPart, from first_key_sum() on.
FDM_INLINE int64_t key_sum_bands(const fdm_problem &p, int32_t max_sums) {
  return is_varlen(p) ? max_sums / kBandRows + p.batch : ceil_div(max_sums, kBandRows);
}

} // namespace fdm::cuda
