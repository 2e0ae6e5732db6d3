// SPDX-License-Identifier: BSD-3-Clause
// The plans of the CUDA packs: their layout in memory.
//
// A plan has, for each list (a batch and a head of the mask) and each tile of kTileRows query rows of each sequence,
// the columns (keys) that any row of the tile keeps: first those that all rows keep (full), then the partial ones.
// Without a mask (range) there is no plan: the columns are consecutive and computed.
//
// Interval plans (a mask that is the same for every query, or intervals; the causal limit is part of the intervals)
// also have, for each list, the keys that any query keeps, in key order, each with its first and past-the-last row. Row
// plans (a boolean mask with a row for each query) have a word of kTileRows bits for each tile and key instead. The
// backward pass, which goes by keys, can look up any of them.
#pragma once

#include <cstdint>

#include "../../indexing.h"

namespace fdm::cuda {

constexpr int kTileRows = 128;

// A word of a row plan: bit r % 32 of part r / 32 says whether row r of the tile keeps the key.
struct alignas(16) RowWord {
  uint32_t part[kTileRows / 32];
};

struct TileCounts {
  int32_t columns, full;
};

// Pointers into a plan. K stands for list_keys below.
struct Plan {
  int64_t lists, batch_lists; // lists = shape[0] * shape[1] of the list tensor; batch_lists = shape[1]
  int64_t list_keys;          // keys of a list: K, for varlen total_k
  int64_t tiles;              // tiles of a list over all sequences
  int64_t tile_keys;          // slots of a tile: K, for varlen the longest sequence's

  int32_t *kept_count; // [list][sequence of the batch, or 1]: kept keys of the sequence
  int32_t *kept_index; // [list][list_keys]: those of a sequence from its k_begin on, keys of the own sequence
  int32_t *kept_start, *kept_end; // rows of the own sequence, causal limit included: start <= row < end

  TileCounts *counts; // [list][tile]
  int32_t *columns;   // [list][tile][tile_keys]: full ones from the front; partial ones from the back, reversed
  RowWord *words;     // [list][tile][tile_keys]: of every key, in key order; row plans only
};

FDM_INLINE int64_t align_256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Keys of the per-key dimension. cu_seqlens cannot be read by the host, so paged problems take the list's own size.
FDM_INLINE int64_t list_keys(const fdm_problem &p) {
  if (!is_varlen(p)) return p.keys;
  if (!present(p.block_table)) return p.k.shape[1];
  return mask_kind(p) == FDM_MASK_ROWS ? 0 : list_tensor(p).shape[3];
}

FDM_INLINE bool is_interval_plan(fdm_mask_kind kind) { return kind == FDM_MASK_KEYS || kind == FDM_MASK_INTERVALS; }

// The pointers of the plan of a problem that has a mask, and the plan's size.
FDM_INLINE Plan lay_out_plan(const fdm_problem &p, void *base, int64_t *bytes) {
  const fdm_tensor &mask = list_tensor(p);
  const bool intervals = is_interval_plan(mask_kind(p));
  Plan plan{};
  plan.lists = mask.shape[0] * mask.shape[1];
  plan.batch_lists = mask.shape[1];
  plan.list_keys = list_keys(p);
  plan.tiles = total_rows(p) / kTileRows + list_sequences(p);
  plan.tile_keys = p.keys;
  int64_t used = 0;
  char *memory = static_cast<char *>(base);
  const int64_t kept_bytes = align_256(4 * plan.lists * plan.list_keys);
  if (intervals) {
    plan.kept_count = reinterpret_cast<int32_t *>(memory + used);
    used += align_256(4 * plan.lists * list_sequences(p));
    plan.kept_index = reinterpret_cast<int32_t *>(memory + used);
    used += kept_bytes;
    plan.kept_start = reinterpret_cast<int32_t *>(memory + used);
    used += kept_bytes;
    plan.kept_end = reinterpret_cast<int32_t *>(memory + used);
    used += kept_bytes;
  }
  const int64_t slots = plan.lists * plan.tiles;
  plan.counts = reinterpret_cast<TileCounts *>(memory + used);
  used += align_256(8 * slots);
  plan.columns = reinterpret_cast<int32_t *>(memory + used);
  used += align_256(4 * slots * plan.tile_keys);
  if (!intervals) {
    plan.words = reinterpret_cast<RowWord *>(memory + used);
    used += align_256(16 * slots * plan.tile_keys);
  }
  *bytes = used;
  return plan;
}

// The plan that lies at `base`; of a problem without a mask, none.
FDM_INLINE Plan plan_of(const fdm_problem &p, const void *base) {
  if (mask_kind(p) == FDM_MASK_NONE) return {};
  int64_t bytes;
  return lay_out_plan(p, const_cast<void *>(base), &bytes);
}

// The value of fdm_pack.plan_layouts: an upper bound of the above by pack.h's formula.
FDM_INLINE fdm_plan_layout plan_layout(fdm_mask_kind kind) {
  if (kind == FDM_MASK_NONE) return {0, 0, 0, 0, 0, kTileRows};
  if (kind == FDM_MASK_ROWS) return {4 * 256, 0, 0, 8, 20, kTileRows};
  return {7 * 256, 4, 12, 8 + 4, 4, kTileRows}; // a tile for each sequence pays for its kept_count
}

// The number of a tile of a sequence among the tiles of its list. No two tiles have the same number, and no scan over
// the sequences is needed.
FDM_INLINE int64_t tile_number(const fdm_problem &p, const Sequence &s, int64_t sequence_index, int64_t tile) {
  return is_varlen(p) ? s.q_begin / kTileRows + sequence_index + tile : tile;
}

FDM_INLINE int64_t list_number(const fdm_problem &p, const Plan &plan, const Sequence &s, int64_t head) {
  const fdm_tensor &mask = list_tensor(p);
  return batch_index(mask, s) * plan.batch_lists + head_index(p, mask, head);
}

} // namespace fdm::cuda
