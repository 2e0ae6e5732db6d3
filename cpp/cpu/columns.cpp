// SPDX-License-Identifier: BSD-3-Clause
#include "columns.h"

#include <cstring>

#include "plan.h"

namespace fdm::cpu {
namespace {

// Three int32 arrays for the ordered columns, and three for the partial columns before they are appended.
struct Scratch {
  int32_t *index, *start, *end, *partial_index, *partial_start, *partial_end;
};

Scratch scratch_arrays(void *base, int64_t keys) {
  auto *p = static_cast<int32_t *>(base);
  return {p, p + keys, p + 2 * keys, p + 3 * keys, p + 4 * keys, p + 5 * keys};
}

void append_partial(const Scratch &a, int64_t partial, TileColumns *out) {
  const size_t bytes = size_t(partial) * sizeof(int32_t);
  std::memcpy(a.index + out->full, a.partial_index, bytes);
  std::memcpy(a.start + out->full, a.partial_start, bytes);
  std::memcpy(a.end + out->full, a.partial_end, bytes);
  out->count = out->full + int32_t(partial);
}

// Without a mask the columns are consecutive keys; the partial columns end at each row's causal limit.
void range_columns(const fdm_problem &p, const Sequence &s, const Scratch &a, TileColumns *out) {
  const int64_t last_row = out->first_row + out->rows - 1;
  int64_t full = s.k_count, count = s.k_count;
  if (is_causal(p)) {
    full = max64(0, min64(s.k_count, out->first_row + s.causal_off + 1));
    count = max64(full, min64(s.k_count, last_row + s.causal_off + 1));
  }
  for (int64_t j = 0; j < count; ++j) a.index[j] = int32_t(j);
  for (int64_t j = full; j < count; ++j) {
    a.start[j] = int32_t(max64(0, j - s.causal_off));
    a.end[j] = INT_MAX;
  }
  out->full = int32_t(full);
  out->count = int32_t(count);
}

void interval_columns(const IntervalList &list, const Sequence &s, const Scratch &a, TileColumns *out) {
  const int64_t first = out->first_row, past = first + out->rows;
  const int64_t begin = s.k_begin, end = s.k_begin + s.k_count;
  int64_t full = 0, partial = 0;
  for (int64_t entry = begin; entry < end;) {
    const int64_t block = entry / kEntryBlock, block_end = min64(end, (block + 1) * kEntryBlock);
    if (list.block_min_start[block] >= past || list.block_max_end[block] <= first) {
      entry = block_end;
      continue;
    }
    for (; entry < block_end; ++entry) {
      const int32_t row_start = list.start[entry], row_end = list.end[entry];
      if (row_start >= past || row_end <= first) continue;
      if (row_start <= first && row_end >= past) {
        a.index[full] = list.index[entry];
        ++full;
      } else {
        a.partial_index[partial] = list.index[entry];
        a.partial_start[partial] = row_start;
        a.partial_end[partial] = row_end;
        ++partial;
      }
    }
  }
  out->full = int32_t(full);
  append_partial(a, partial, out);
}

// The list of a row without invalid keys.
void key_list_columns(const fdm_problem &p, const Sequence &s, int64_t h, const Scratch &a, TileColumns *out) {
  const fdm_tensor &t = p.indices;
  const int64_t row = out->first_row;
  const int64_t limit = is_causal(p) ? clamp64(row + s.causal_off + 1, 0, s.k_count) : s.k_count;
  const int32_t *list = static_cast<const int32_t *>(t.data) + head_major_offset(t, s, row, head_index(p, t, h));
  out->list_position = a.start;
  // sign bit set: an index is negative or beyond the last visible key
  uint32_t signs = t.stride[3] == 1 ? 0 : ~0u;
  for (int64_t position = 0; position < t.shape[3] && t.stride[3] == 1; ++position)
    signs |= uint32_t(list[position]) | (uint32_t(limit) - 1 - uint32_t(list[position]));
  if (int32_t(signs) >= 0) { // usual case: the list is the columns
    if (present(p.index_bias))
      for (int64_t position = 0; position < t.shape[3]; ++position) a.start[position] = int32_t(position);
    out->full = out->count = int32_t(t.shape[3]);
    out->index = list;
    return;
  }
  // The arrays have room for every list position, so every index can be written.
  int32_t count = 0;
  for (int64_t position = 0; position < t.shape[3]; ++position) {
    const int32_t key = list[position * t.stride[3]];
    a.index[count] = key;
    a.start[count] = int32_t(position);
    count += int32_t(uint32_t(key) < uint64_t(limit));
  }
  out->full = out->count = count;
}

} // namespace

int64_t column_scratch_bytes(const fdm_problem &p) {
  const int64_t arrays = has_key_lists(p) ? 2 : 6;
  return round_up(arrays * max_columns(p) * int64_t(sizeof(int32_t)), 64);
}

int64_t tile_rows(const fdm_problem &p, const void *plan) {
  if (has_key_lists(p)) return kKeyListRows;
  return mask_kind(p) == FDM_MASK_NONE ? kMaxTileRows : static_cast<const PlanHeader *>(plan)->tile_rows;
}

void tile_columns(const fdm_problem &p, const void *plan, const Sequence &s, int64_t sequence_index, int64_t h,
                  int64_t first_row, int64_t rows, void *scratch, TileColumns *out) {
  const Scratch a = scratch_arrays(scratch, max_columns(p));
  *out = {first_row, rows, 0, 0, a.index, nullptr, a.start, a.end, nullptr, 0};
  if (has_key_lists(p)) return key_list_columns(p, s, h, a, out);
  const fdm_mask_kind kind = mask_kind(p);
  if (kind == FDM_MASK_NONE) return range_columns(p, s, a, out);

  const fdm_tensor &lists = mask_tensor(p);
  const int64_t list = batch_index(lists, s) * lists.shape[1] + head_index(p, lists, h);
  void *mutable_plan = const_cast<void *>(plan); // the plan builder uses the same accessors
  if (kind != FDM_MASK_ROWS)
    return interval_columns(IntervalList::in_plan(mutable_plan, list, total_keys(p)), s, a, out);

  const int64_t size = tile_rows(p, plan);
  const RowTile tile = RowTile::in_plan(mutable_plan, p, list, s, sequence_index, first_row / size, size);
  out->count = tile.counts[0];
  out->full = tile.counts[1];
  out->index = tile.index;
  out->words = tile.words;
  out->word_bytes = size / 8;
}

} // namespace fdm::cpu
