// SPDX-License-Identifier: BSD-3-Clause
// The plans of the cpu pack: their memory layout and construction.
//
// Per-key masks and intervals become interval plans: each list holds only the keys that some query keeps, each with
// its first and past-the-last row (including the causal limit). A per-query boolean mask becomes a row plan: for each
// tile the kept columns, and for each partial column a word with a bit for each row. The mask is read once, for all
// heads that share it and for the backward pass.
#pragma once

#include <climits>
#include <cstdint>

#include "columns.h"

namespace fdm::cpu {

struct PlanHeader {
  int64_t tile_rows;
  int64_t reserved[7];
};

// One summary for each kEntryBlock entries lets a tile skip keys whose rows start after it or end before it.
constexpr int64_t kEntryBlock = 64;

// One list of an interval plan. The entries of a sequence are at positions k_begin ... of the arrays, in key order.
// Unused positions after them have start INT_MAX and end 0, so that no tile keeps them.
struct IntervalList {
  int32_t *index, *start, *end; // of K entries
  int32_t *block_min_start, *block_max_end;

  static int64_t bytes(int64_t keys) {
    return round_up(3 * keys * int64_t(sizeof(int32_t)) + 2 * ceil_div(keys, kEntryBlock) * int64_t(sizeof(int32_t)),
                    64);
  }
  static IntervalList in_plan(void *plan, int64_t list, int64_t keys) {
    auto *base = reinterpret_cast<int32_t *>(static_cast<char *>(plan) + sizeof(PlanHeader) + list * bytes(keys));
    return {base, base + keys, base + 2 * keys, base + 3 * keys, base + 3 * keys + ceil_div(keys, kEntryBlock)};
  }
};

// One tile of a row plan. The word of a column has rows / 8 bytes.
struct RowTile {
  int32_t *counts; // number of columns, and of full columns
  int32_t *index;  // K entries
  uint8_t *words;  // room for K entries; only those of partial columns are used

  static int64_t bytes(int64_t keys, int64_t rows) { return round_up(2 * 4 + 4 * keys + 8 + keys * rows / 8, 64); }
  // Tiles of sequence s are numbered from q_begin / rows + its index in the batch: the numbers are unique without a
  // scan.
  static RowTile in_plan(void *plan, const fdm_problem &p, int64_t list, const Sequence &s, int64_t sequence_index,
                         int64_t tile, int64_t rows) {
    const int64_t tiles = total_rows(p) / rows + list_sequences(p);
    const int64_t number = list * tiles + s.q_begin / rows + (is_varlen(p) ? sequence_index : 0) + tile;
    auto *base =
        reinterpret_cast<int32_t *>(static_cast<char *>(plan) + sizeof(PlanHeader) + number * bytes(p.keys, rows));
    return {base, base + 2, reinterpret_cast<uint8_t *>(base + 2 + p.keys)};
  }
};

} // namespace fdm::cpu
