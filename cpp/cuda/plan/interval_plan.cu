// SPDX-License-Identifier: BSD-3-Clause
// Interval plans: the kept keys of each list, and the columns of each tile.
//
// Tiles of long lists look at kept keys only, once these are there: a window of w keys over K keys in random order
// keeps about w (1 + ln(K / w)) of them, so the work of a tile hardly grows with K. Short lists take one launch, in
// which tiles look at all keys: that is no slower than waiting for another kernel, and spares the host a launch.
#include "../host/launch.cuh"
#include "../ptx/dependent.cuh"
#include "../tile/block_scan.cuh"
#include "list_work.cuh"
#include "make_plan.h"

namespace fdm::cuda {
namespace {

constexpr int kTileThreads = 512, kTileItems = 8, kTileStep = kTileThreads * kTileItems;
constexpr int kShortKeys = 2 * kTileStep;
// Long lists are compacted chunk by chunk; small chunks keep more SMs at work.
constexpr int kChunkThreads = 1024, kChunkItems = 2, kChunkKeys = kChunkThreads * kChunkItems;

struct KeyRows {
  int32_t start, end;
};

// Reads the rows that keep a key, the causal limit included.
struct KeyRowsReader {
  const int32_t *start, *end; // null: a key mask
  const uint8_t *mask;
  int64_t start_stride, end_stride, mask_stride;
  int64_t causal_off;
  int32_t queries;
  bool causal;

  __device__ KeyRowsReader(const fdm_problem &p, const ListWork &work) : start(nullptr), end(nullptr), mask(nullptr) {
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

  __device__ KeyRows operator()(int64_t j) const {
    KeyRows rows{0, queries};
    if (start) {
      rows.start = max(0, __ldg(start + j * start_stride));
      rows.end = min(queries, __ldg(end + j * end_stride));
    } else if (!__ldg(mask + j * mask_stride)) {
      rows.end = 0;
    }
    // The limit is beyond int32 only for keys that no row sees; rows.end is at most the limit then.
    if (causal) rows.start = static_cast<int32_t>(max64(rows.start, j - causal_off));
    return rows;
  }
};

template <int kThreads, int kItems>
__device__ void read_chunk(const KeyRowsReader &reader, int64_t first, int64_t keys, KeyRows (&rows)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t j = first + i * kThreads + threadIdx.x;
    rows[i] = j < keys ? reader(j) : KeyRows{0, 0};
  }
}

// Does every row of a tile keep a key, or some row?
struct TileKey {
  bool full, partial;

  __device__ TileKey(const KeyRows &rows, int32_t first, int32_t past)
      : full(first < past && rows.start <= first && rows.end >= past),
        partial(!full && max(rows.start, first) < min(rows.end, past)) {}
};

// How many keys of a chunk all rows of a sequence keep (full), or some rows (partial). Together they are the kept
// keys.
struct ChunkCounts {
  int32_t full, partial;
};

__device__ ChunkCounts *chunk_counts(ChunkCounts *counts, const fdm_problem &p, const ListWork &work, int64_t chunks) {
  return counts + (work.list * list_sequences(p) + work.sequence_index) * chunks;
}

__global__ void __launch_bounds__(kChunkThreads)
    count_kept_keys(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, ChunkCounts *counts,
                    int64_t chunks) {
  __shared__ BlockSum<kChunkThreads> sums;
  ptx::start_dependents();
  const ListWork work = list_work(p, plan, chunks);
  const int64_t first = work.part * kChunkKeys;
  if (first >= work.s.k_count) return;
  KeyRows rows[kChunkItems];
  read_chunk<kChunkThreads>(KeyRowsReader(p, work), first, work.s.k_count, rows);
  uint32_t own = 0, total; // full | partial << 16
#pragma unroll
  for (int i = 0; i < kChunkItems; ++i) {
    const TileKey key(rows[i], 0, static_cast<int32_t>(work.s.q_count));
    own += uint32_t(key.full) | uint32_t(key.partial) << 16;
  }
  sums.exclusive(own, &total);
  if (threadIdx.x == 0)
    chunk_counts(counts, p, work, chunks)[work.part] = {static_cast<int32_t>(total & 0xffff),
                                                        static_cast<int32_t>(total >> 16)};
}

// The counts of all chunks before a block's. All lanes of a warp get them.
__device__ ChunkCounts counts_before(const ChunkCounts *counts, int64_t part) {
  ChunkCounts before{0, 0};
  for (int64_t n = lane_id(); n < part; n += 32) {
    before.full += counts[n].full;
    before.partial += counts[n].partial;
  }
  before.full = __reduce_add_sync(kAllLanes, before.full);
  before.partial = __reduce_add_sync(kAllLanes, before.partial);
  return before;
}

// Compacts a chunk of keys from `first` on; `is_last` marks the last of the list. Returns the counts with those
// before. `only_tile` says that no sequence has more rows than a tile: its columns are then the kept keys, and are
// written here too.
template <int kThreads, int kItems>
__device__ ChunkCounts compact_chunk(BlockRanks<kThreads, kItems> &ranks, const fdm_problem &p, const Plan &plan,
                                     const ListWork &work, const KeyRows (&rows)[kItems], int64_t first,
                                     const ChunkCounts &before, bool is_last, bool only_tile) {
  bool full[kItems], partial[kItems];
  uint32_t rank[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const TileKey key(rows[i], 0, static_cast<int32_t>(work.s.q_count));
    full[i] = key.full;
    partial[i] = key.partial;
  }
  const uint32_t total = ranks.rank(full, partial, rank);
  const int64_t base = work.list * plan.list_keys + work.s.k_begin;
  const int64_t slot = work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, 0);
  int32_t *columns = plan.columns + slot * plan.tile_keys;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!full[i] && !partial[i]) continue;
    const auto key = static_cast<int32_t>(first + i * kThreads + threadIdx.x);
    const int64_t full_rank = before.full + static_cast<int32_t>(ranks.first_of(rank[i]));
    const int64_t partial_rank = before.partial + static_cast<int32_t>(ranks.second_of(rank[i]));
    const int64_t position = base + full_rank + partial_rank;
    plan.kept_index[position] = key;
    plan.kept_start[position] = rows[i].start;
    plan.kept_end[position] = rows[i].end;
    if (only_tile) columns[full[i] ? full_rank : plan.tile_keys - 1 - partial_rank] = key;
  }
  const ChunkCounts counts{before.full + static_cast<int32_t>(ranks.first_of(total)),
                           before.partial + static_cast<int32_t>(ranks.second_of(total))};
  if (is_last && threadIdx.x == 0) {
    const int32_t kept = counts.full + counts.partial;
    plan.kept_count[work.list * list_sequences(p) + work.sequence_index] = kept;
    if (only_tile) plan.counts[slot] = {kept, counts.full};
  }
  return counts;
}

__global__ void __launch_bounds__(kChunkThreads)
    compact_kept_keys(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, ChunkCounts *counts,
                      int64_t chunks, bool only_tile) {
  __shared__ BlockRanks<kChunkThreads, kChunkItems> ranks;
  ptx::start_dependents();
  const ListWork work = list_work(p, plan, chunks);
  const int64_t first = work.part * kChunkKeys, last_part = max64(0, ceil_div(work.s.k_count, kChunkKeys) - 1);
  const bool idle = work.part > last_part;
  KeyRows rows[kChunkItems];
  if (!idle) read_chunk<kChunkThreads>(KeyRowsReader(p, work), first, work.s.k_count, rows);
  ptx::wait_for_kernel_ahead();
  if (idle) return;
  const ChunkCounts before = counts_before(chunk_counts(counts, p, work, chunks), work.part);
  compact_chunk(ranks, p, plan, work, rows, first, before, work.part == last_part, only_tile);
}

// The keys that a tile looks at, which are the kept ones or all. rows(n) and key(n) return those of number n < count.
struct KeptKeys {
  int32_t count;
  const int32_t *index, *start, *end;

  __device__ KeptKeys(const fdm_problem &p, const Plan &plan, const ListWork &work) {
    const int64_t list = work.list * plan.list_keys + work.s.k_begin;
    count = plan.kept_count[work.list * list_sequences(p) + work.sequence_index];
    index = plan.kept_index + list;
    start = plan.kept_start + list;
    end = plan.kept_end + list;
  }
  __device__ int32_t key(int32_t n) const { return index[n]; }
  __device__ KeyRows rows(int32_t n) const { return {start[n], end[n]}; }
};
struct AllKeys {
  int32_t count;
  KeyRowsReader reader;

  __device__ AllKeys(const fdm_problem &p, const ListWork &work)
      : count(static_cast<int32_t>(work.s.k_count)), reader(p, work) {}
  __device__ int32_t key(int32_t n) const { return n; }
  __device__ KeyRows rows(int32_t n) const { return reader(n); }
};

template <class Keys>
__device__ void list_columns(BlockRanks<kTileThreads, kTileItems> &ranks, const fdm_problem &p, const Plan &plan,
                             const ListWork &work, const Keys &keys) {
  const int64_t first_row = work.part * kTileRows;
  const int32_t first = static_cast<int32_t>(first_row);
  const int32_t past = static_cast<int32_t>(min64(work.s.q_count, first_row + kTileRows));
  const int64_t visible = is_causal(p) ? min64(work.s.k_count, past + work.s.causal_off) : work.s.k_count;
  const int64_t slot = work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, work.part);
  int32_t *columns = plan.columns + slot * plan.tile_keys;

  int32_t full_count = 0, partial_count = 0;
  for (int32_t step = 0; step < keys.count && keys.key(step) < visible; step += kTileStep) {
    bool full[kTileItems], partial[kTileItems];
    uint32_t rank[kTileItems];
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      const int32_t position = step + i * kTileThreads + static_cast<int32_t>(threadIdx.x);
      const TileKey key(position < keys.count ? keys.rows(position) : KeyRows{0, 0}, first, past);
      full[i] = key.full;
      partial[i] = key.partial;
    }
    const uint32_t total = ranks.rank(full, partial, rank);
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      if (!full[i] && !partial[i]) continue; // most are neither: their keys need not be read
      const int64_t column = full[i] ? full_count + ranks.first_of(rank[i])
                                     : plan.tile_keys - 1 - partial_count - ranks.second_of(rank[i]);
      columns[column] = keys.key(step + i * kTileThreads + static_cast<int32_t>(threadIdx.x));
    }
    full_count += ranks.first_of(total);
    partial_count += ranks.second_of(total);
  }
  if (threadIdx.x == 0) plan.counts[slot] = {full_count + partial_count, full_count};
}

__global__ void __launch_bounds__(kTileThreads)
    list_tile_columns(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, int64_t tiles) {
  __shared__ BlockRanks<kTileThreads, kTileItems> ranks;
  const ListWork work = list_work(p, plan, tiles);
  ptx::start_dependents();
  ptx::wait_for_kernel_ahead();
  if (work.part * kTileRows < work.s.q_count) list_columns(ranks, p, plan, work, KeptKeys(p, plan, work));
}

// The parts of a short list are its tiles, unless there is only one, and the compaction.
__global__ void __launch_bounds__(kTileThreads, 2)
    plan_short_lists(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, int64_t tiles) {
  __shared__ BlockRanks<kTileThreads, kTileItems> ranks;
  ptx::start_dependents();
  const ListWork work = list_work(p, plan, tiles + 1);
  if (work.part < tiles) {
    if (work.part * kTileRows < work.s.q_count) list_columns(ranks, p, plan, work, AllKeys(p, work));
    return;
  }
  const KeyRowsReader reader(p, work);
  ChunkCounts counts{0, 0};
  int64_t first = 0;
  do {
    KeyRows rows[kTileItems];
    read_chunk<kTileThreads>(reader, first, work.s.k_count, rows);
    const int64_t past = first + kTileStep;
    counts = compact_chunk(ranks, p, plan, work, rows, first, counts, past >= work.s.k_count, tiles == 0);
    first = past;
  } while (first < work.s.k_count);
}

} // namespace

int64_t interval_plan_workspace_bytes(const fdm_problem &p) {
  if (p.keys <= kShortKeys) return 0;
  const int64_t lists = list_tensor(p).shape[0] * list_tensor(p).shape[1];
  return align_256(int64_t(sizeof(ChunkCounts)) * lists * list_sequences(p) * ceil_div(p.keys, kChunkKeys));
}

cudaError_t make_interval_plan(const fdm_problem &p, void *base, void *workspace, cudaStream_t stream) {
  int64_t bytes;
  const Plan plan = lay_out_plan(p, base, &bytes);
  const int64_t lists = plan.lists * list_sequences(p);
  const int64_t chunks = ceil_div(p.keys, kChunkKeys), tiles = ceil_div(p.queries, kTileRows);
  const int64_t listed_tiles = tiles > 1 ? tiles : 0; // compaction writes the columns of a single tile
  if (p.keys <= kShortKeys)
    return launch(plan_short_lists, lists * (listed_tiles + 1), kTileThreads, 0, stream, p, plan, listed_tiles);
  auto *counts = static_cast<ChunkCounts *>(workspace);
  cudaError_t error = launch(count_kept_keys, lists * chunks, kChunkThreads, 0, stream, p, plan, counts, chunks);
  if (!error)
    error = launch<Overlap::kernel_ahead>(compact_kept_keys, lists * chunks, kChunkThreads, 0, stream, p, plan, counts,
                                          chunks, listed_tiles == 0);
  if (error || listed_tiles == 0) return error;
  return launch<Overlap::kernel_ahead>(list_tile_columns, lists * tiles, kTileThreads, 0, stream, p, plan, tiles);
}

} // namespace fdm::cuda
