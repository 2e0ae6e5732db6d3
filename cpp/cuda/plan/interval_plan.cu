// SPDX-License-Identifier: BSD-3-Clause
// Interval plans: the kept keys of each list, and the columns of each tile.
//
// Tiles look at kept keys only: a window of w keys over K keys in random order keeps about w (1 + ln(K / w)) of them,
// so the work of a tile hardly grows with K. Problems of few keys have a kernel of their own (short_lists.cu).
#include "../host/launch.cuh"
#include "../tile/block_scan.cuh"
#include "key_tile_counts.cuh"
#include "list_rows.cuh"
#include "make_plan.h"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kTileThreads = 512, kTileItems = 8, kTileStep = kTileThreads * kTileItems;
// A block of threads compacts a list of up to so many keys by itself, sooner than two kernels would.
constexpr int64_t kListKeys = 4 * kTileStep;
// Longer lists are compacted chunk by chunk; small chunks keep more SMs at work.
constexpr int kChunkThreads = 1024, kChunkItems = 2, kChunkKeys = kChunkThreads * kChunkItems;

template <int kThreads, int kItems>
__device__ void read_chunk(const ListRows &reader, int64_t first, int64_t keys, RowInterval (&rows)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t j = first + i * kThreads + threadIdx.x;
    rows[i] = j < keys ? reader(j) : RowInterval{0, 0};
  }
}

__device__ int32_t *chunk_counts(int32_t *counts, const fdm_problem &p, const ListWork &work, int64_t chunks) {
  return counts + (work.list * list_sequences(p) + work.sequence_index) * chunks;
}

__global__ void __launch_bounds__(kChunkThreads)
    count_kept_keys(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, int32_t *counts,
                    int64_t chunks) {
  __shared__ BlockSum<kChunkThreads> sums;
  ptx::start_dependents();
  const ListWork work = part_of_list(p, plan, chunks);
  const int64_t first = work.part * kChunkKeys;
  if (first >= work.s.k_count) return;
  RowInterval rows[kChunkItems];
  read_chunk<kChunkThreads>(ListRows(p, work), first, work.s.k_count, rows);
  uint32_t own = 0, total;
#pragma unroll
  for (int i = 0; i < kChunkItems; ++i) own += rows[i].any();
  sums.exclusive(own, &total);
  if (threadIdx.x == 0) chunk_counts(counts, p, work, chunks)[work.part] = static_cast<int32_t>(total);
}

// The kept keys of all chunks before a block's. All lanes of a warp get them.
__device__ int32_t count_before(const int32_t *counts, int64_t part) {
  int32_t before = 0;
  for (int64_t n = lane_id(); n < part; n += 32) before += counts[n];
  return __reduce_add_sync(kAllLanes, before);
}

// Compacts a chunk of keys from `first` on, and returns how many of it are kept.
template <int kThreads, int kItems>
__device__ int32_t compact_chunk(BlockRanks<kThreads, kItems> &ranks, const Plan &plan, const ListWork &work,
                                 const KeyTileCounts &tile_counts, const RowInterval (&rows)[kItems], int64_t first,
                                 int32_t before) {
  bool kept[kItems], none[kItems];
  uint32_t rank[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    kept[i] = rows[i].any();
    none[i] = false;
  }
  const uint32_t total = ranks.rank(kept, none, rank);
  const int64_t base = work.list * plan.list_keys + work.s.k_begin + before;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int64_t key = first + i * kThreads + threadIdx.x;
    if (key < work.s.k_count) tile_counts.pass(key, before + static_cast<int32_t>(rank[i]) + kept[i]);
    if (!kept[i]) continue;
    plan.kept_index[base + rank[i]] = static_cast<int32_t>(key);
    plan.kept_start[base + rank[i]] = rows[i].start;
    plan.kept_end[base + rank[i]] = rows[i].end;
  }
  return static_cast<int32_t>(total);
}

__device__ void finish_list(const fdm_problem &p, const Plan &plan, const ListWork &work,
                            const KeyTileCounts &tile_counts, int32_t kept, int threads) {
  if (threadIdx.x == 0) plan.kept_count[work.list * list_sequences(p) + work.sequence_index] = kept;
  tile_counts.finish(kept, threads);
}

__global__ void __launch_bounds__(kChunkThreads)
    compact_kept_keys(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, int32_t *counts,
                      int64_t chunks) {
  __shared__ BlockRanks<kChunkThreads, kChunkItems> ranks;
  ptx::start_dependents();
  const ListWork work = part_of_list(p, plan, chunks);
  const int64_t first = work.part * kChunkKeys, last_part = max64(0, ceil_div(work.s.k_count, kChunkKeys) - 1);
  const bool idle = work.part > last_part;
  RowInterval rows[kChunkItems];
  if (!idle) read_chunk<kChunkThreads>(ListRows(p, work), first, work.s.k_count, rows);
  ptx::wait_for_kernel_ahead();
  if (idle) return;
  const KeyTileCounts tile_counts(p, plan, work);
  const int32_t before = count_before(chunk_counts(counts, p, work, chunks), work.part);
  const int32_t kept = compact_chunk(ranks, plan, work, tile_counts, rows, first, before);
  if (work.part == last_part) finish_list(p, plan, work, tile_counts, before + kept, kChunkThreads);
}

__global__ void __launch_bounds__(kTileThreads, 1)
    compact_lists(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan) {
  __shared__ BlockRanks<kTileThreads, kTileItems> ranks;
  ptx::start_dependents();
  const ListWork work = part_of_list(p, plan, 1);
  const ListRows reader(p, work);
  const KeyTileCounts tile_counts(p, plan, work);
  int32_t kept = 0;
  for (int64_t first = 0; first < work.s.k_count; first += kTileStep) {
    RowInterval rows[kTileItems];
    read_chunk<kTileThreads>(reader, first, work.s.k_count, rows);
    kept += compact_chunk(ranks, plan, work, tile_counts, rows, first, kept);
  }
  finish_list(p, plan, work, tile_counts, kept, kTileThreads);
}

struct ListTilesShared {
  BlockRanks<kTileThreads, kTileItems> ranks;
  int32_t first, past; // positions among the kept keys, of a tile that overflows
};

__device__ void list_columns(ListTilesShared &shared, const fdm_problem &p, const Plan &plan, const ListWork &work) {
  const int64_t first_row = work.part * kTileRows;
  const int32_t first = static_cast<int32_t>(first_row);
  const int32_t past = static_cast<int32_t>(min64(work.s.q_count, first_row + kTileRows));
  const int64_t visible = is_causal(p) ? min64(work.s.k_count, past + work.s.causal_off) : work.s.k_count;
  const int64_t slot = work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, work.part);
  int32_t *columns = plan.columns + slot * plan.tile_keys;
  const int32_t kept = plan.kept_count[work.list * list_sequences(p) + work.sequence_index];
  const int64_t list = work.list * plan.list_keys + work.s.k_begin;
  const int32_t *index = plan.kept_index + list, *start = plan.kept_start + list, *end = plan.kept_end + list;

  int32_t full_count = 0, partial_count = 0, first_found = INT32_MAX, past_found = 0;
  for (int32_t step = 0; step < kept && index[step] < visible; step += kTileStep) {
    bool full[kTileItems], partial[kTileItems];
    uint32_t rank[kTileItems];
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      const int32_t position = step + i * kTileThreads + static_cast<int32_t>(threadIdx.x);
      const TileKey key(position < kept ? RowInterval{start[position], end[position]} : RowInterval{0, 0}, first, past);
      full[i] = key.full;
      partial[i] = key.partial;
    }
    const uint32_t total = shared.ranks.rank(full, partial, rank);
    const int32_t full_total = shared.ranks.first_of(total), partial_total = shared.ranks.second_of(total);
    const bool fits = full_count + full_total + partial_count + partial_total <= plan.tile_keys;
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
      if (!full[i] && !partial[i]) continue; // most are neither: their keys need not be read
      const int32_t position = step + i * kTileThreads + static_cast<int32_t>(threadIdx.x);
      first_found = min(first_found, position);
      past_found = position + 1;
      const int64_t column = full[i] ? full_count + shared.ranks.first_of(rank[i])
                                     : plan.tile_keys - 1 - partial_count - shared.ranks.second_of(rank[i]);
      if (fits) columns[column] = index[position];
    }
    full_count += full_total;
    partial_count += partial_total;
  }
  const bool overflows = full_count + partial_count > plan.tile_keys;
  if (overflows) {
    if (threadIdx.x == 0) {
      shared.first = INT32_MAX;
      shared.past = 0;
    }
    __syncthreads();
    atomicMin(&shared.first, first_found);
    atomicMax(&shared.past, past_found);
    __syncthreads();
  }
  if (threadIdx.x == 0)
    plan.counts[slot] = overflows ? TileCounts{shared.past - shared.first, ~shared.first}
                                  : TileCounts{full_count + partial_count, full_count};
}

__global__ void __launch_bounds__(kTileThreads, 2)
    list_tile_columns(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan) {
  __shared__ ListTilesShared shared;
  const ListWork work = tile_of_list(p, plan);
  ptx::start_dependents();
  ptx::wait_for_kernel_ahead();
  if (work.part * kTileRows < work.s.q_count)
    list_columns(shared, p, plan, work);
  else if (threadIdx.x == 0) // a number without a tile
    plan.counts[work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, work.part)] = {0, 0};
}

} // namespace

int64_t interval_plan_workspace_bytes(const fdm_problem &p) {
  if (p.keys <= kListKeys) return 0;
  const int64_t lists = list_tensor(p).shape[0] * list_tensor(p).shape[1];
  return align_256(int64_t(sizeof(int32_t)) * lists * list_sequences(p) * ceil_div(p.keys, kChunkKeys));
}

cudaError_t make_interval_plan(const fdm_problem &p, const Plan &plan, void *workspace, cudaStream_t stream) {
  const int64_t lists = plan.lists * list_sequences(p);
  if (fits_short_lists(p)) return launch_short_lists(p, plan, stream);
  cudaError_t error;
  if (p.keys <= kListKeys) {
    error = launch(compact_lists, lists, kTileThreads, 0, stream, p, plan);
  } else {
    const int64_t chunks = ceil_div(p.keys, kChunkKeys);
    auto *counts = static_cast<int32_t *>(workspace);
    error = launch(count_kept_keys, lists * chunks, kChunkThreads, 0, stream, p, plan, counts, chunks);
    if (!error)
      error = launch<Overlap::kernel_ahead>(compact_kept_keys, lists * chunks, kChunkThreads, 0, stream, p, plan,
                                            counts, chunks);
  }
  if (error || !plan.columns) return error;
  return launch<Overlap::kernel_ahead>(list_tile_columns, plan.lists * plan.tiles, kTileThreads, 0, stream, p, plan);
}

} // namespace fdm::cuda
