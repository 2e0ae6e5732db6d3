// SPDX-License-Identifier: BSD-3-Clause
// The columns (keys) of one tile of query rows, and the plan that they are made from.
#pragma once

#include <cstdint>

#include "../indexing.h"

namespace fdm::cpu {

// Rows of the largest tile: one 64-bit word holds a column of it. Larger tiles would gain little, because the gathered
// keys are already shared by the heads of a group.
constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kMinTileRows = 8;

// A row that lists its keys is a tile by itself. Some of them are one task.
constexpr int64_t kListRows = 16;

// Rows of the largest tile that a problem has.
static inline int64_t most_tile_rows(const fdm_problem &p) { return lists_keys(p) ? 1 : kMaxTileRows; }

// Columns of the longest row.
static inline int64_t most_columns(const fdm_problem &p) { return lists_keys(p) ? p.indices.shape[3] : p.keys; }

// The columns that any row of a tile keeps: first `full` columns that all rows keep, then the partial ones.
struct TileColumns {
  int64_t first_row, rows; // of the own sequence
  int32_t count, full;
  const int32_t *index; // key of each column
  const int32_t
      *place; // of each column in the row's list, if there is a bias of what is listed; null where rows list no keys
  // What masks the partial columns: the rows that keep column c are start[c] <= row < end[c] ...
  int32_t *start, *end;
  // ... or, where words is not null, those whose bit is set in column_word().
  const uint8_t *words; // of the partial columns
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

// Bytes that a thread needs for the arrays of a TileColumns.
int64_t column_scratch_bytes(const fdm_problem &p);

// Fills `out`, whose arrays lie in `scratch`, for rows [first_row, first_row + rows) of query head h.
void tile_columns(const fdm_problem &p, const void *plan, const Sequence &s, int64_t sequence_index, int64_t h,
                  int64_t first_row, int64_t rows, void *scratch, TileColumns *out);

// Rows of the tiles that the plan was made for; of a task where rows list their keys.
int64_t tile_rows(const fdm_problem &p, const void *plan);

// Whether each query head has a list of its own. Otherwise the heads of a group share one.
static inline bool lists_per_query_head(const fdm_problem &p) {
  return mask_kind(p) != FDM_MASK_NONE && list_tensor(p).shape[1] == p.heads && p.heads != p.kv_heads;
}

} // namespace fdm::cpu
