// SPDX-License-Identifier: BSD-3-Clause
// The layout of the plans of the CUDA packs in memory.
//
// A plan has the columns (keys) of each list (a batch element and a head of the mask) and each tile of kTileRows
// query rows of each sequence: the keys that any row of the tile keeps. Full columns, which all rows keep, come
// first, then the partial ones. Without a mask (range) there is no plan: the columns are consecutive and computed.
//
// Interval plans serve a mask per key, or intervals, which include the causal limit. They also have, for each list,
// the keys that any query keeps, in key order, each with its first and past-the-last row. Row plans serve a boolean
// mask per query. They have a word of kTileRows bits for each tile and key instead. The backward pass goes by keys
// and can look up any of them. In row plans, a number for each tile and granule of kGranuleKeys keys tells it which
// tiles it can skip.
//
// A row plan of a boolean mask has room for the columns and words of all keys of each tile, so the place of each is
// known without a look-up. A row plan of a mask of blocks (fdm_mask_blocks) has room only for what the blocks keep: a
// pool of granules. A tile takes granules for its columns and for the words of keys that some of its rows keep, and
// the number of a granule is its place in the pool. Granules that no row keeps, or that all rows keep, share one.
//
// Memory is linear in the keys, except in row plans. A tile has room for as many columns as a selection leaves it
// (fdm_problem.max_kept), or for kTileKeyRoom. A tile that keeps more overflows: its columns are then all kept keys
// of the list from the tile's first to its last, as partial ones, and some of these may be kept by no row. With a key
// mask the columns of a tile are the first kept keys of the list, and need no memory of their own.
//
// A plan of runs (FDM_KEEPS_RUNS, with a causal limit) has no lists. The columns of a tile are all keys from the
// first that a row keeps to the last that a row sees, and the full ones are a run among them. Columns that no row
// keeps are computed for nothing. Key blocks of the backward pass have consecutive keys.
#pragma once

#include <cstdint>

#include "../../indexing.h"

namespace fdm::cuda {

constexpr int kTileRows = 128;
constexpr int kMaskBytes = 4;         // adjacent booleans of a mask that a thread loads at once
constexpr int kPlanChunkKeys = 2048;  // keys that a thread block counts and compacts
constexpr int kPartKeysPerThread = 4; // keys of a thread in a part of a list of kept keys

// A word of a row plan: bit r % 32 of part r / 32 says whether row r of the tile keeps the key.
struct alignas(16) RowWord {
  uint32_t part[kTileRows / 32];
};

// The words of consecutive keys of a row plan. With a mask of blocks, one holds columns instead.
constexpr int kGranuleKeys = 32;
struct Granule {
  RowWord words[kGranuleKeys];
};
constexpr int kGranuleColumns = sizeof(Granule) / sizeof(int32_t);

// The number of a granule: no row of the tile keeps any of its keys, all rows keep all of them, or from
// kFirstOwnGranule on neither. In a pool it is the granule's place; otherwise kFirstOwnGranule stands for all others.
enum GranuleNumber : int32_t { kEmptyGranule = 0, kFullGranule = 1, kFirstOwnGranule = 2 };

// The place of a tile's columns in a pool: its first granule, and the columns that there is room for.
struct ColumnPlace {
  int32_t first_granule, room;
};

// The words of the keys of a tile of a row plan.
struct TileWords {
  const RowWord *words;    // null: there is no row plan
  const int32_t *granules; // the number of each granule of the tile, of a pool; null: key j has word j

  FDM_MEMBER const RowWord *of(int32_t key) const {
    return words + (granules ? int64_t(granules[key / kGranuleKeys]) * kGranuleKeys + key % kGranuleKeys : key);
  }
};

// The columns of a tile, and how many of them are full. A tile that overflows has no full ones, and `full` is ~n,
// with n the position of its first column among the kept keys.
struct TileCounts {
  int32_t columns, full;

  FDM_MEMBER bool overflows() const { return full < 0; }
};

// Keys of a span, which a KeySpan describes together in a plan of runs, and spans of a section.
constexpr int kSpanKeys = 64, kSectionSpans = 32, kSectionKeys = kSpanKeys * kSectionSpans;

// The rows that keep some keys: no row before `first`, or from `past` on, keeps any of them; each row of [full_from,
// full_past) keeps all.
struct alignas(16) KeySpan {
  int32_t first, past, full_from, full_past;
};

// The columns of a tile in a plan of runs: keys [first, first + count). All rows keep the keys [full_first,
// full_first + full).
struct alignas(16) TileRun {
  int32_t first, count, full_first, full;
};

// Room for the columns of a tile if nothing is known of how many keys it keeps. It takes 128 bytes for each query of
// a list, as a query of head dimension 64 does. Plans for up to this many keys never overflow.
constexpr int kTileKeyRoom = 4096;

// Pointers into a plan. The host computes them, and kernels get them by value: the layout takes divisions and 64-bit
// products, which should not be repeated in each thread block.
struct Plan {
  int64_t lists;           // shape[0] * shape[1] of the list tensor
  int64_t list_keys;       // keys of a list: K, for varlen total_k
  int32_t lists_per_batch; // shape[1] of the list tensor
  int32_t tiles;           // tiles of a list over all sequences
  int32_t tile_keys;       // entries of the column list of a tile

  int32_t *kept_count;            // [list][sequence of the batch, or 1]: kept keys of the sequence
  int32_t *kept_index;            // [list][list_keys]: a sequence's from its k_begin on; keys within the sequence
  int32_t *kept_start, *kept_end; // rows within the sequence, causal limit included: start <= row < end

  TileCounts *counts; // [list][tile]
  int32_t *columns;   // [list][tile][tile_keys]: full ones from the front; partial ones from the back, reversed.
                      // Null: the columns of a tile are the first kept keys of its list
  RowWord *words;     // [list][tile][tile_keys]: every key, in key order; row plans only
  int32_t *granules;  // [list][tile][tile_granules]: a GranuleNumber per kGranuleKeys keys; row plans only
  int32_t tile_granules;
  ColumnPlace *places; // [list][tile]: `columns` and `words` are the same pool; null: they are as above
  int32_t *pool_used;  // granules of the pool that tiles have taken, without the shared ones

  int32_t list_spans, list_sections; // of a list, over all sequences
  KeySpan *spans, *sections;         // [list][span], [list][section]; plans of runs, which have only these and runs
  TileRun *runs;                     // [list][tile]
};

FDM_INLINE int64_t align_256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Keys of the per-key dimension. The host cannot read cu_seqlens, so paged problems take the size of the list tensor.
FDM_INLINE int64_t total_keys(const fdm_problem &p) {
  if (!is_varlen(p)) return p.keys;
  if (!present(p.block_table)) return p.k.shape[1];
  return mask_kind(p) == FDM_MASK_ROWS ? 0 : mask_tensor(p).shape[3];
}

FDM_INLINE bool is_interval_plan(fdm_mask_kind kind) { return kind == FDM_MASK_KEYS || kind == FDM_MASK_INTERVALS; }

FDM_INLINE bool plans_runs(const fdm_problem &p) {
  return p.flags & FDM_KEEPS_RUNS && is_causal(p) && mask_kind(p) == FDM_MASK_INTERVALS && !present(p.block_table);
}

// max_kept, cut off at the largest number of keys, so that sums with it do not overflow.
FDM_INLINE int64_t kept_bound(const fdm_problem &p) { return min64(p.max_kept, INT32_MAX); }

// Takes consecutive parts of a buffer. Without a buffer, `used` still gives the length that it needs.
struct BufferParts {
  char *base;
  int64_t used = 0;

  template <class T> T *take(int64_t count) {
    T *part = base ? reinterpret_cast<T *>(base + used) : nullptr;
    used += align_256(count * int64_t(sizeof(T)));
    return part;
  }
};

// The pointers of the plan of a problem, and the plan's size. Without a mask there is no plan.
//
// `pool_granules`: the granules that tiles take of a pool. The pool is the last part, so its size moves no other part.
inline Plan lay_out_plan(const fdm_problem &p, void *base, int64_t *bytes, int64_t pool_granules = 0) {
  *bytes = 0;
  const fdm_mask_kind kind = mask_kind(p);
  if (kind == FDM_MASK_NONE) return {};
  const fdm_tensor &mask = mask_tensor(p);
  Plan plan{};
  plan.lists = mask.shape[0] * mask.shape[1];
  plan.lists_per_batch = int32_t(mask.shape[1]);
  plan.list_keys = total_keys(p);
  plan.tiles = int32_t(total_rows(p) / kTileRows + list_sequences(p));
  plan.tile_keys = int32_t(p.keys);
  const int64_t list_tiles = plan.lists * plan.tiles;
  BufferParts parts{static_cast<char *>(base)};
  if (plans_runs(p)) {
    const auto numbers = [&](int64_t size) {
      return int32_t(is_varlen(p) ? plan.list_keys / size + p.batch : ceil_div(p.keys, size));
    };
    plan.list_spans = numbers(kSpanKeys);
    plan.list_sections = numbers(kSectionKeys);
    plan.spans = parts.take<KeySpan>(plan.lists * plan.list_spans);
    plan.sections = parts.take<KeySpan>(plan.lists * plan.list_sections);
    plan.runs = parts.take<TileRun>(list_tiles);
    *bytes = parts.used;
    return plan;
  }
  if (kind == FDM_MASK_INTERVALS)
    plan.tile_keys = int32_t(min64(p.keys, p.max_kept > 0 ? kept_bound(p) + kTileRows - 1 : kTileKeyRoom));
  if (is_interval_plan(kind)) {
    plan.kept_count = parts.take<int32_t>(plan.lists * list_sequences(p));
    plan.kept_index = parts.take<int32_t>(plan.lists * plan.list_keys);
    plan.kept_start = parts.take<int32_t>(plan.lists * plan.list_keys);
    plan.kept_end = parts.take<int32_t>(plan.lists * plan.list_keys);
  }
  plan.counts = parts.take<TileCounts>(list_tiles);
  if (kind == FDM_MASK_ROWS) {
    plan.tile_granules = int32_t(ceil_div(plan.tile_keys, kGranuleKeys));
    plan.granules = parts.take<int32_t>(list_tiles * plan.tile_granules);
  }
  if (has_mask_blocks(p)) {
    plan.places = parts.take<ColumnPlace>(list_tiles);
    plan.pool_used = parts.take<int32_t>(1);
    plan.words = parts.take<Granule>(kFirstOwnGranule + pool_granules)->words;
    plan.columns = reinterpret_cast<int32_t *>(plan.words);
    *bytes = parts.used;
    return plan;
  }
  if (kind != FDM_MASK_KEYS) plan.columns = parts.take<int32_t>(list_tiles * plan.tile_keys);
  if (kind == FDM_MASK_ROWS) plan.words = parts.take<RowWord>(list_tiles * plan.tile_keys);
  *bytes = parts.used;
  return plan;
}

// The plan at `base`. A problem without a mask has none.
inline Plan plan_of(const fdm_problem &p, const void *base) {
  int64_t bytes;
  return lay_out_plan(p, const_cast<void *>(base), &bytes);
}

// The value of fdm_pack.plan_layouts: an upper bound of the size from lay_out_plan(), by the formula of pack.h.
inline fdm_plan_layout plan_layout(fdm_mask_kind kind) {
  switch (kind) {
  case FDM_MASK_ROWS: // a tile has at most one granule more than its keys fill; a key takes an eighth of a byte of them
    return {4 * 256,   0,        0, sizeof(TileCounts) + sizeof(int32_t), sizeof(int32_t) + sizeof(RowWord) + 1,
            kTileRows, INT64_MAX};
  case FDM_MASK_KEYS: // each sequence has a tile, which includes its kept_count
    return {5 * 256, 0, 3 * sizeof(int32_t), sizeof(TileCounts) + sizeof(int32_t), 0, kTileRows, 0};
  case FDM_MASK_INTERVALS: // for a plan of runs: a tile includes its run, and a span and a section per sequence
    return {6 * 256,         0,         3 * sizeof(int32_t), sizeof(TileRun) + 2 * sizeof(KeySpan),
            sizeof(int32_t), kTileRows, kTileKeyRoom};
  default:
    return {0, 0, 0, 0, 0, kTileRows, 0};
  }
}

// Tiles of all sequences, for one head. Packed sequences have at most as many as all rows need, plus one per
// sequence.
FDM_INLINE int64_t sequence_tiles(const fdm_problem &p) {
  return is_varlen(p) ? total_rows(p) / kTileRows + p.batch : p.batch * ceil_div(p.queries, kTileRows);
}

// Whether the query heads of a group share the mask. Masks with rows count as shared.
FDM_INLINE bool group_shares_interval_plan(const fdm_problem &p) {
  const fdm_mask_kind kind = mask_kind(p);
  return !is_interval_plan(kind) || group_size(p) == 1 || mask_tensor(p).shape[1] != p.heads;
}

// A part of a packed dimension. The parts of all sequences have `size` each, and those of a sequence are numbered
// after those of the sequences before it. Kernels with a thread block per number have at most one idle block for each
// sequence. If each sequence had as many blocks as the longest needs, most would be idle.
struct NumberedPart {
  int64_t sequence_index, part;
};

FDM_INLINE int64_t first_number(int64_t begin, int64_t sequence_index, int64_t size) {
  return begin / size + sequence_index;
}

// The number of a tile of a sequence among the tiles of its list. Numbers are unique, and need no scan over
// sequences.
FDM_INLINE int64_t tile_number(const fdm_problem &p, const Sequence &s, int64_t sequence_index, int64_t tile) {
  return is_varlen(p) ? first_number(s.q_begin, sequence_index, kTileRows) + tile : tile;
}

// The number of a sequence's first span or section among those of its list, which have `size` keys each.
FDM_INLINE int64_t span_number(const fdm_problem &p, const Sequence &s, int64_t sequence_index, int64_t size) {
  return is_varlen(p) ? first_number(s.k_begin, sequence_index, size) : 0;
}

// Finds the part with a number. begin_of(sequence) is where the sequence begins in the packed dimension.
template <class Problem, class Begin>
FDM_DEVICE NumberedPart numbered_part(const Problem &p, int64_t number, int64_t size, const Begin &begin_of) {
  if (!is_varlen(p)) return {0, number};
  const auto first = [&](int64_t b) { return first_number(begin_of(sequence(p, b)), b, size); };
  int64_t low = 0, high = p.batch; // the sequence is in [low, high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first(middle) <= number)
      low = middle;
    else
      high = middle;
  }
  return {low, number - first(low)};
}

// The number of a sequence of a list among those of all lists. Each list has all packed sequences.
FDM_INLINE int64_t list_sequence(const fdm_problem &p, int64_t list, int64_t sequence_index) {
  return is_varlen(p) ? list * p.batch + sequence_index : list;
}

FDM_INLINE int64_t list_number(const fdm_problem &p, const Plan &plan, const Sequence &s, int64_t head) {
  const fdm_tensor &mask = mask_tensor(p);
  return batch_index(mask, s) * plan.lists_per_batch + head_index(p, mask, head);
}

// The words of a tile of a list in a row plan.
FDM_INLINE TileWords tile_words(const Plan &plan, int64_t list_tile) {
  if (plan.places) return {plan.words, plan.granules + list_tile * plan.tile_granules};
  return {plan.words + list_tile * plan.tile_keys, nullptr};
}

} // namespace fdm::cuda
