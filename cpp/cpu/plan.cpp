// SPDX-License-Identifier: BSD-3-Clause
#include "plan.h"

#include <cstring>

#include "passes.h"
#include "thread_pool.h"

namespace fdm::cpu {
namespace {

// The cost of gathering one key for a tile, in rows of arithmetic: converting, copying and transposing its K and V,
// relative to two multiply-adds per row. It weighs small tiles (few partial columns) against large ones.
constexpr int64_t kGatherCostInRows = 16;

// The cost of a list key in multiply-adds: about 5 ns.
constexpr double kWorkPerKey = 200.0;
constexpr int64_t kTileRowChoices[] = {64, 32, 16, 8};
constexpr int kTileRowChoiceCount = 4;

int64_t list_count(const fdm_problem &p) { return mask_tensor(p).shape[0] * mask_tensor(p).shape[1]; }

int64_t heads_per_list(const fdm_problem &p) { return has_mask_per_query_head(p) ? 1 : group_size(p); }

// The tile size with the least sum over tiles of columns * (gather + rows). columns[c] is for the c-th choice.
int cheapest(const fdm_problem &p, const int64_t *columns, const bool *allowed) {
  const auto cost = [&](int c) {
    return double(columns[c]) * double(kGatherCostInRows + kTileRowChoices[c] * heads_per_list(p));
  };
  int best = kTileRowChoiceCount - 1; // 8 rows always fit
  for (int c = best - 1; c >= 0; --c)
    if (allowed[c] && cost(c) < cost(best)) best = c;
  return best;
}

// --- interval plans ---------------------------------------------------------------------------------------------

struct Interval {
  int64_t start, end;
};

// The rows that keep key j of a sequence, including the causal limit.
Interval kept_rows(const fdm_problem &p, const Sequence &s, int64_t list_head, int64_t list_batch, int64_t j) {
  Interval rows{0, s.q_count};
  if (present(p.start)) {
    const auto offset = [&](const fdm_tensor &t) {
      return list_batch * t.stride[0] + list_head * t.stride[1] + (s.k_begin + j) * t.stride[3];
    };
    rows.start = max64(0, static_cast<const int32_t *>(p.start.data)[offset(p.start)]);
    rows.end = min64(s.q_count, static_cast<const int32_t *>(p.end.data)[offset(p.end)]);
  } else {
    const int64_t col = p.mask.shape[3] == 1 ? 0 : p.mask.stride[3];
    const int64_t offset = list_batch * p.mask.stride[0] + list_head * p.mask.stride[1] + (s.k_begin + j) * col;
    if (!static_cast<const uint8_t *>(p.mask.data)[offset]) rows.end = 0;
  }
  if (is_causal(p)) rows.start = max64(rows.start, j - s.causal_off);
  return rows;
}

void summarize(const IntervalList &list, int64_t keys) {
  for (int64_t block = 0; block * kEntryBlock < keys; ++block) {
    int32_t first = INT_MAX, past = 0;
    for (int64_t entry = block * kEntryBlock; entry < min64(keys, (block + 1) * kEntryBlock); ++entry) {
      if (list.start[entry] < first) first = list.start[entry];
      if (list.end[entry] > past) past = list.end[entry];
    }
    list.block_min_start[block] = first;
    list.block_max_end[block] = past;
  }
}

void add_tile_columns(const Interval &rows, int64_t *columns) {
  for (int c = 0; c < kTileRowChoiceCount; ++c) {
    const int64_t size = kTileRowChoices[c];
    columns[c] += ceil_div(rows.end, size) - rows.start / size;
  }
}

void make_interval_list(const fdm_problem &p, void *plan, int64_t list_number, int64_t *columns) {
  const fdm_tensor &lists = mask_tensor(p);
  const int64_t list_batch = list_number / lists.shape[1], list_head = list_number % lists.shape[1];
  const IntervalList list = IntervalList::in_plan(plan, list_number, total_keys(p));
  for (int64_t b = 0; b < list_sequences(p); ++b) {
    const Sequence s = sequence(p, b);
    int64_t entry = s.k_begin;
    for (int64_t j = 0; j < s.k_count; ++j) {
      const Interval rows = kept_rows(p, s, list_head, list_batch, j);
      if (rows.start >= rows.end) continue;
      list.index[entry] = int32_t(j);
      list.start[entry] = int32_t(rows.start);
      list.end[entry] = int32_t(rows.end);
      ++entry;
      add_tile_columns(rows, columns);
    }
    for (; entry < s.k_begin + s.k_count; ++entry) {
      list.index[entry] = 0;
      list.start[entry] = INT_MAX;
      list.end[entry] = 0;
    }
  }
  summarize(list, total_keys(p));
}

void make_interval_plan(const fdm_problem &p, void *plan, void *workspace) {
  const int64_t lists = list_count(p);
  auto *columns = static_cast<int64_t *>(workspace);
  std::memset(columns, 0, size_t(lists * kTileRowChoiceCount) * sizeof(int64_t));
  const int threads = useful_threads(p.context.threads, kWorkPerKey * double(lists * p.keys));
  parallel_for(threads, lists,
               [&](int64_t list, int) { make_interval_list(p, plan, list, columns + list * kTileRowChoiceCount); });
  for (int64_t list = 1; list < lists; ++list)
    for (int c = 0; c < kTileRowChoiceCount; ++c) columns[c] += columns[list * kTileRowChoiceCount + c];
  const bool allowed[kTileRowChoiceCount] = {true, true, true, true};
  static_cast<PlanHeader *>(plan)->tile_rows = kTileRowChoices[lists ? cheapest(p, columns, allowed) : 0];
}

// --- row plans --------------------------------------------------------------------------------------------------

// Sets any[j] and all[j] if any or all rows [first, first + rows) of the mask keep key j, including the causal limit.
void reduce_rows(const fdm_problem &p, const Matrix &mask, const Sequence &s, int64_t first, int64_t rows, uint8_t *any,
                 uint8_t *all) {
  std::memset(any, 0, size_t(s.k_count));
  std::memset(all, 1, size_t(s.k_count));
  for (int64_t i = first; i < first + rows; ++i) {
    const auto *row = static_cast<const uint8_t *>(mask.base) + i * mask.row;
    const int64_t limit = is_causal(p) ? max64(0, min64(s.k_count, i + s.causal_off + 1)) : s.k_count;
    if (mask.col == 1) {
      for (int64_t j = 0; j < limit; ++j) {
        any[j] |= row[j];
        all[j] &= row[j];
      }
    } else {
      for (int64_t j = 0; j < limit; ++j) {
        any[j] |= row[j * mask.col];
        all[j] &= row[j * mask.col];
      }
    }
    std::memset(all + limit, 0, size_t(s.k_count - limit));
  }
}

void make_row_tile(const fdm_problem &p, const Matrix &mask, const Sequence &s, int64_t first, int64_t rows,
                   int64_t tile_rows, uint8_t *any, uint8_t *all, const RowTile &tile) {
  reduce_rows(p, mask, s, first, rows, any, all);
  int32_t full = 0, count = 0;
  for (int64_t j = 0; j < s.k_count; ++j) {
    tile.index[full] = int32_t(j);
    full += all[j] != 0;
  }
  count = full;
  for (int64_t j = 0; j < s.k_count; ++j)
    if (any[j] && !all[j]) tile.index[count++] = int32_t(j);
  tile.counts[0] = count;
  tile.counts[1] = full;

  const int64_t word_bytes = tile_rows / 8;
  std::memset(tile.words, 0, size_t((count - full) * word_bytes));
  for (int64_t r = 0; r < rows; ++r) {
    const auto *row = static_cast<const uint8_t *>(mask.base) + (first + r) * mask.row;
    const int64_t limit = is_causal(p) ? first + r + s.causal_off + 1 : s.k_count;
    uint8_t *words = tile.words + r / 8;
    for (int64_t c = full; c < count; ++c) {
      const int64_t j = tile.index[c];
      words[(c - full) * word_bytes] |= uint8_t((j < limit && row[j * mask.col]) << (r % 8));
    }
  }
}

Matrix list_matrix(const fdm_problem &p, int64_t list, const Sequence &s) {
  const int64_t batch = list / p.mask.shape[1], head = list % p.mask.shape[1];
  const int64_t col = p.mask.shape[3] == 1 ? 0 : p.mask.stride[3];
  const int64_t offset = batch * p.mask.stride[0] + head * p.mask.stride[1] + s.q_begin * p.mask.stride[2];
  return {static_cast<const uint8_t *>(p.mask.data) + offset, p.mask.stride[2], col};
}

// Bytes for one flag per key; not 0 without keys, because memset requires an address even for 0 bytes.
int64_t key_flag_bytes(const fdm_problem &p) { return round_up(max64(1, p.keys), 64); }

// Counts columns in a few blocks of 64 rows spread over the problem, and chooses the tile size from the counts.
int64_t choose_row_tile(const fdm_problem &p, void *workspace) {
  bool allowed[kTileRowChoiceCount];
  for (int c = 0; c < kTileRowChoiceCount; ++c) {
    const int64_t rows = kTileRowChoices[c];
    const int64_t needed = list_count(p) * (total_rows(p) / rows + list_sequences(p)) * RowTile::bytes(p.keys, rows);
    allowed[c] = int64_t(sizeof(PlanHeader)) + needed <= CpuPack::plan_bytes(p);
  }
  auto *any = static_cast<uint8_t *>(workspace), *all = any + p.keys;
  int64_t columns[kTileRowChoiceCount] = {};
  constexpr int64_t kSamples = 8;
  const int64_t lists = list_count(p), sequences = list_sequences(p);
  for (int64_t sample = 0; sample < kSamples; ++sample) {
    const Sequence s = sequence(p, sample * sequences / kSamples);
    const Matrix mask = list_matrix(p, sample * lists / kSamples, s);
    const int64_t blocks = ceil_div(s.q_count, kMaxTileRows);
    const int64_t begin = (2 * sample + 1) * blocks / (2 * kSamples) * kMaxTileRows;
    const int64_t past = min64(s.q_count, begin + kMaxTileRows);
    for (int c = 0; c < kTileRowChoiceCount; ++c)
      for (int64_t first = begin; first < past; first += kTileRowChoices[c]) {
        reduce_rows(p, mask, s, first, min64(kTileRowChoices[c], past - first), any, all);
        for (int64_t j = 0; j < s.k_count; ++j) columns[c] += any[j];
      }
  }
  return kTileRowChoices[cheapest(p, columns, allowed)];
}

void make_row_plan(const fdm_problem &p, void *plan, void *workspace) {
  const int64_t lists = list_count(p), sequences = list_sequences(p);
  const bool empty = p.batch == 0; // the mask may have rows nevertheless
  const int64_t rows = lists && p.keys && !empty ? choose_row_tile(p, workspace) : kMinTileRows;
  static_cast<PlanHeader *>(plan)->tile_rows = rows;
  const int64_t tiles = ceil_div(p.queries, rows);
  if (empty) return;
  const double mask_reads = double(lists * sequences) * double(p.queries) * double(p.keys);
  parallel_for(useful_threads(p.context.threads, mask_reads), lists * sequences * tiles, [&](int64_t task, int worker) {
    const int64_t tile = task % tiles, b = task / tiles % sequences, list = task / tiles / sequences;
    const Sequence s = sequence(p, b);
    const int64_t first = tile * rows, count = min64(rows, s.q_count - first);
    if (count <= 0) return;
    auto *any = static_cast<uint8_t *>(workspace) + 2 * worker * key_flag_bytes(p);
    make_row_tile(p, list_matrix(p, list, s), s, first, count, rows, any, any + key_flag_bytes(p),
                  RowTile::in_plan(plan, p, list, s, b, tile, rows));
  });
}

} // namespace

fdm_plan_layout CpuPack::plan_layout(fdm_mask_kind kind) {
  switch (kind) {
  case FDM_MASK_KEYS:
  case FDM_MASK_INTERVALS:
    // 12 bytes per key and two summaries of 4 bytes per 64 keys, rounded up to 64.
    return {sizeof(PlanHeader), 128, 13, 0, 0, kMinTileRows, 0};
  case FDM_MASK_ROWS:
    // Tiles of 8 rows: an index and a one-byte word per key; counts, and rounding up to 64 bytes.
    return {sizeof(PlanHeader), 0, 0, 128, 5, kMinTileRows, INT64_MAX};
  default:
    return {0, 0, 0, 0, 0, kMinTileRows, 0};
  }
}

int64_t CpuPack::plan_bytes(const fdm_problem &p) {
  const fdm_mask_kind kind = mask_kind(p);
  if (kind == FDM_MASK_NONE) return 0;
  const fdm_plan_layout l = plan_layout(kind);
  const int64_t tiles = total_rows(p) / l.tile_rows + list_sequences(p);
  return l.fixed +
         list_count(p) * (l.per_list + total_keys(p) * l.per_key + tiles * (l.per_tile + p.keys * l.per_tile_key));
}

int64_t CpuPack::plan_workspace_bytes(const fdm_problem &p) {
  switch (mask_kind(p)) {
  case FDM_MASK_KEYS:
  case FDM_MASK_INTERVALS:
    return list_count(p) * kTileRowChoiceCount * int64_t(sizeof(int64_t));
  case FDM_MASK_ROWS:
    return 2 * p.context.threads * key_flag_bytes(p);
  default:
    return 0;
  }
}

void CpuPack::plan(const fdm_problem &p, void *plan, void *workspace) {
  switch (mask_kind(p)) {
  case FDM_MASK_KEYS:
  case FDM_MASK_INTERVALS:
    return make_interval_plan(p, plan, workspace);
  case FDM_MASK_ROWS:
    return make_row_plan(p, plan, workspace);
  default:
    return;
  }
}

} // namespace fdm::cpu
