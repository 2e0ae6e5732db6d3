// SPDX-License-Identifier: BSD-3-Clause
// The columns (keys) of a tile of query rows, derived from the plan.
#pragma once

#include <cstdint>

#include "../indexing.h"

namespace fdm::cpu {

// Rows of the largest tile: one 64-bit word holds a column of it. Larger tiles would gain little, because the heads
// of a group already share the gathered keys.
constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kMinTileRows = 8;

// A row with a key list is a tile by itself. A task has up to this many of them.
constexpr int64_t kKeyListRows = 16;

// Rows of the largest tile of a problem.
static inline int64_t max_tile_rows(const fdm_problem &p) { return has_key_lists(p) ? 1 : kMaxTileRows; }

// Columns of the longest row.
static inline int64_t max_columns(const fdm_problem &p) { return has_key_lists(p) ? p.indices.shape[3] : p.keys; }

// The columns that at least one row of a tile keeps: first `full` columns that all rows keep, then the partial
// columns.
struct TileColumns {
  int64_t first_row, rows; // within the sequence
  int32_t count, full;
  const int32_t *index; // key of each column
  // Position of each column in the row's list, used if there is an index_bias; null if rows list no keys.
  const int32_t *list_position;
  // The mask of the partial columns: the rows with start[c] <= row < end[c] keep column c ...
  int32_t *start, *end;
  // ... or, if words is not null, the rows whose bit is set in column_word().
  const uint8_t *words; // for the partial columns
  int64_t word_bytes;
};

// Bit r is set if row first_row + r keeps column c.
static inline uint64_t column_word(const TileColumns &t, int64_t c) {
  if (c < t.full) return ~uint64_t(0);
  if (t.words) {
    uint64_t word = 0;
    for (int64_t byte = 0; byte < t.word_bytes; ++byte)
      word |= uint64_t(t.words[(c - t.full) * t.word_bytes + byte]) << (8 * byte);
    return word;
  }
  const int64_t first = max64(0, t.start[c] - t.first_row), past = min64(64, t.end[c] - t.first_row);
  if (first >= past) return 0;
  return (~uint64_t(0) >> (64 - (past - first))) << first;
}

// Bytes per thread for the arrays of a TileColumns.
int64_t column_scratch_bytes(const fdm_problem &p);

// Fills `out`, whose arrays are in `scratch`, for rows [first_row, first_row + rows) of query head h.
void tile_columns(const fdm_problem &p, const void *plan, const Sequence &s, int64_t sequence_index, int64_t h,
                  int64_t first_row, int64_t rows, void *scratch, TileColumns *out);

// Tile rows of the plan; with key lists, the rows of a task.
int64_t tile_rows(const fdm_problem &p, const void *plan);

// Whether each query head has a separate list. Otherwise the heads of a group share one.
static inline bool has_mask_per_query_head(const fdm_problem &p) {
  return mask_kind(p) != FDM_MASK_NONE && mask_tensor(p).shape[1] == p.heads && p.heads != p.kv_heads;
}

} // namespace fdm::cpu
