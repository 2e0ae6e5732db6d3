// SPDX-License-Identifier: BSD-3-Clause
// Interval plans: the kept keys of each list, and the columns of each tile.
//
// Tiles of long lists read kept keys only: a window of w keys over K keys in random order keeps about
// w (1 + ln(K / w)) of them, so the work of a tile hardly grows with K. With fewer keys, reading all of them takes
// less time than waiting for the kept ones, so one kernel makes the plan. Problems of few keys have their own kernel
// (short_lists.cu).
#include "../host/launch.cuh"
#include "../tile/block_scan.cuh"
#include "key_tile_counts.cuh"
#include "make_plan.h"
#include "ptx/dependent.cuh"
#include "tile_columns.cuh"

namespace fdm::cuda {
namespace {

// Tiles of shorter lists read all keys. Other thread blocks list the kept keys at the same time: each has parts of a
// list that follow each other, and counts the kept keys before the first one by itself. Longer lists are compacted
// chunk by chunk; small chunks keep more SMs busy. With many lists, a thread block goes through several chunks.
constexpr int kChunkThreads = 1024, kChunkItems = kPlanChunkKeys / kChunkThreads, kChunkKeys = kPlanChunkKeys;

template <int kThreads, int kItemsPerThread>
__device__ void read_chunk(const ListRows &reader, int64_t first, int64_t keys, RowInterval (&rows)[kItemsPerThread]) {
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const int64_t j = first + i * kThreads + threadIdx.x;
    rows[i] = j < keys ? reader(j) : RowInterval{0, 0};
  }
}

__device__ int32_t *chunk_counts(int32_t *counts, const fdm_problem &p, const ListWork &work, int64_t chunks) {
  return counts + (work.list * list_sequences(p) + work.sequence_index) * chunks;
}

__global__ void __launch_bounds__(kChunkThreads)
    count_kept_keys(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, int32_t *counts,
                    PlanParts parts) {
  __shared__ BlockSum<kChunkThreads> sums;
  ptx::start_dependents();
  const ListWork work = part_of_list(p, plan, parts.blocks, blockIdx.x);
  const int64_t first = work.part * parts.steps * kChunkKeys,
                past = min64(work.s.k_count, first + int64_t(parts.steps) * kChunkKeys);
  if (first >= past) return;
  const ListRows reader(p, work);
  uint32_t thread_keys = 0, total;
  for (int64_t chunk = first; chunk < past; chunk += kChunkKeys) {
    RowInterval rows[kChunkItems];
    read_chunk<kChunkThreads>(reader, chunk, past, rows);
#pragma unroll
    for (int i = 0; i < kChunkItems; ++i) thread_keys += rows[i].any();
  }
  sums.exclusive(thread_keys, &total);
  if (threadIdx.x == 0) chunk_counts(counts, p, work, parts.blocks)[work.part] = static_cast<int32_t>(total);
}

// The kept keys of all blocks of a list before this one. All lanes of a warp get the sum.
__device__ int32_t count_before(const int32_t *counts, int64_t part) {
  int32_t before = 0;
  for (int64_t n = lane_id(); n < part; n += 32) before += counts[n];
  return __reduce_add_sync(kAllLanes, before);
}

// Writes the plan's entries for the keys of a part of a list.
struct KeptWriter {
  const Plan &plan;
  const ListWork &work;
  KeyTileCounts tile_counts;
  int32_t before; // kept keys of the parts before

  __device__ KeptWriter(const fdm_problem &p, const Plan &own_plan, const ListWork &own_work, int32_t kept_before)
      : plan(own_plan), work(own_work), tile_counts(p, own_plan, own_work), before(kept_before) {}

  // `rank` kept keys of the part come before the key.
  __device__ void write(int64_t key, int32_t rank, const RowInterval &rows) const {
    if (key < work.s.k_count) tile_counts.pass(key, before + rank + rows.any());
    if (!rows.any()) return;
    const int64_t n = work.list * plan.list_keys + work.s.k_begin + before + rank;
    plan.kept_index[n] = static_cast<int32_t>(key);
    plan.kept_start[n] = rows.start;
    plan.kept_end[n] = rows.end;
  }
  // A thread block calls this for the last part, of which `kept` keys are kept.
  __device__ void finish(const fdm_problem &p, int32_t kept, int threads) const {
    if (threadIdx.x == 0) plan.kept_count[work.list * list_sequences(p) + work.sequence_index] = before + kept;
    tile_counts.finish(before + kept, threads);
  }
};

__global__ void __launch_bounds__(kChunkThreads)
    compact_kept_keys(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, int32_t *counts,
                      PlanParts parts) {
  __shared__ BlockRanks<kChunkThreads, kChunkItems> ranks;
  ptx::start_dependents();
  const ListWork work = part_of_list(p, plan, parts.blocks, blockIdx.x);
  const int64_t first_chunk = work.part * parts.steps, last_chunk = max64(0, ceil_div(work.s.k_count, kChunkKeys) - 1);
  const bool idle = first_chunk > last_chunk;
  const ListRows reader(p, work);
  RowInterval rows[kChunkItems];
  if (!idle) read_chunk<kChunkThreads>(reader, first_chunk * kChunkKeys, work.s.k_count, rows);
  ptx::wait_for_kernel_ahead();
  if (idle) return;
  int32_t before = count_before(chunk_counts(counts, p, work, parts.blocks), work.part);
  const int64_t past_chunk = min64(last_chunk + 1, first_chunk + parts.steps);
  for (int64_t chunk = first_chunk; chunk < past_chunk; ++chunk) {
    const KeptWriter writer(p, plan, work, before);
    bool kept[kChunkItems];
    uint32_t rank[kChunkItems];
#pragma unroll
    for (int i = 0; i < kChunkItems; ++i) kept[i] = rows[i].any();
    const auto total = static_cast<int32_t>(ranks.rank(kept, rank));
    RowInterval next[kChunkItems];
    if (chunk + 1 < past_chunk) read_chunk<kChunkThreads>(reader, (chunk + 1) * kChunkKeys, work.s.k_count, next);
#pragma unroll
    for (int i = 0; i < kChunkItems; ++i)
      writer.write(chunk * kChunkKeys + i * kChunkThreads + threadIdx.x, static_cast<int32_t>(rank[i]), rows[i]);
    if (chunk == last_chunk) writer.finish(p, total, kChunkThreads);
    before += total;
#pragma unroll
    for (int i = 0; i < kChunkItems; ++i) rows[i] = next[i];
  }
}

template <int kThreads> constexpr int kPartKeys = kPartKeysPerThread * kThreads;

// Lists the kept keys of the parts of a thread block.
template <int kThreads>
__device__ void compact_parts(BlockSum<kThreads> &sums, const fdm_problem &p, const Plan &plan, const ListWork &work,
                              int32_t steps) {
  const auto keys = static_cast<int32_t>(work.s.k_count), first_part = static_cast<int32_t>(work.part) * steps;
  constexpr int32_t kKeys = kPartKeys<kThreads>;
  const int32_t last_part = max(0, (keys + kKeys - 1) / kKeys - 1);
  if (first_part > last_part) return;
  const ListRows reader(p, work);
  uint32_t own_before = 0;
#pragma unroll 8
  for (auto n = static_cast<int32_t>(threadIdx.x); n < first_part * kKeys; n += kThreads) own_before += reader(n).any();
  int32_t before = 0;
  for (int32_t part = first_part; part < min(first_part + steps, last_part + 1); ++part) {
    const int32_t first = part * kKeys + 32 * kPartKeysPerThread * warp_id() + lane_id();
    RowInterval rows[kPartKeysPerThread];
#pragma unroll
    for (int i = 0; i < kPartKeysPerThread; ++i)
      rows[i] = first + 32 * i < keys ? reader(first + 32 * i) : RowInterval{0, 0};
    // Lane i has the ballot of step i.
    uint32_t own_kept = 0, total;
#pragma unroll
    for (int i = 0; i < kPartKeysPerThread; ++i) {
      const uint32_t kept = __ballot_sync(kAllLanes, rows[i].any());
      if (lane_id() == i) own_kept = kept;
    }
    const uint32_t rank = sums.exclusive(__popc(own_kept) << 16 | own_before, &total) >> 16;
    before += static_cast<int32_t>(total & 0xffffu);
    own_before = 0;
    const KeptWriter writer(p, plan, work, before);
#pragma unroll
    for (int i = 0; i < kPartKeysPerThread; ++i) {
      const uint32_t kept = __shfl_sync(kAllLanes, own_kept, i), first_rank = __shfl_sync(kAllLanes, rank, i);
      writer.write(first + 32 * i, static_cast<int32_t>(first_rank + __popc(kept & ((1u << lane_id()) - 1))), rows[i]);
    }
    if (part == last_part) writer.finish(p, static_cast<int32_t>(total >> 16), kThreads);
    before += static_cast<int32_t>(total >> 16);
  }
}

template <int kThreads>
__device__ void list_tile(TileColumnsShared<kThreads> &shared, const fdm_problem &p, const Plan &plan,
                          const ListWork &work, const TileKeys &keys) {
  const int64_t list_tile = work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, work.part);
  const int64_t first_row = work.part * kTileRows, past_row = min64(work.s.q_count, first_row + kTileRows);
  TileCounts counts{0, 0};
  if (first_row < past_row) // else a number without a tile
    counts = list_columns(shared, keys, {static_cast<int32_t>(first_row), static_cast<int32_t>(past_row)},
                          is_causal(p) ? past_row + work.s.causal_off : work.s.k_count,
                          plan.columns + list_tile * plan.tile_keys, plan.tile_keys);
  if (threadIdx.x == 0) plan.counts[list_tile] = counts;
}

// The first thread blocks have the parts of lists, the others the tiles. Without parts, an earlier launch has listed
// the kept keys, and tiles read those.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    list_keys_and_tiles(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, PlanParts parts) {
  __shared__ TileColumnsShared<kThreads> shared;
  ptx::start_dependents();
  ptx::wait_for_kernel_ahead();
  const uint32_t part_blocks = parts.blocks * static_cast<uint32_t>(plan.lists * list_sequences(p));
  if (blockIdx.x < part_blocks) {
    compact_parts(shared.sums, p, plan, part_of_list(p, plan, parts.blocks, blockIdx.x), parts.steps);
  } else {
    const ListWork work = tile_of_list(p, plan, blockIdx.x - part_blocks);
    list_tile(shared, p, plan, work, parts.blocks > 0 ? TileKeys::all(p, work) : TileKeys::kept(p, plan, work));
  }
}

template <int kThreads>
cudaError_t launch_list_keys_and_tiles(const fdm_problem &p, const Plan &plan, const PlanRoute &route,
                                       cudaStream_t stream) {
  const PlanParts parts = route.kernel == PlanKernel::tiles ? route.list_parts : PlanParts{};
  return launch<Overlap::kernel_ahead>(list_keys_and_tiles<kThreads>, route.blocks, kThreads, 0, stream, p, plan,
                                       parts);
}

} // namespace

cudaError_t launch_tile_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream) {
  if (route.threads == 512) return launch_list_keys_and_tiles<512>(p, plan, route, stream);
  if (route.threads == 256) return launch_list_keys_and_tiles<256>(p, plan, route, stream);
  return launch_list_keys_and_tiles<128>(p, plan, route, stream);
}

cudaError_t launch_chunk_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, void *workspace,
                               cudaStream_t stream) {
  int32_t *const counts = at<int32_t>(workspace, route.counts);
  const int64_t blocks = route.chunk_blocks;
  const PlanParts parts = route.list_parts;
  if (cudaError_t error = launch(count_kept_keys, blocks, kChunkThreads, 0, stream, p, plan, counts, parts))
    return error;
  if (cudaError_t error =
          launch<Overlap::kernel_ahead>(compact_kept_keys, blocks, kChunkThreads, 0, stream, p, plan, counts, parts))
    return error;
  return launch_tile_lists(p, plan, route, stream);
}

} // namespace fdm::cuda
