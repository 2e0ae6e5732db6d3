// SPDX-License-Identifier: BSD-3-Clause
// Problems of few keys: one launch selects the keys, if a selection is wanted, and makes the interval plan. A thread
// block has a list in its registers and shared memory; each of its warps writes the columns of a tile. Separate
// kernels for these steps take longer to start than to run. If there are few lists, several blocks make each list and
// divide its tiles. The first of them writes all else.
#include "../host/launch.cuh"
#include "../select/candidates.cuh"
#include "../select/chunk_exits.cuh"
#include "../select/seen_keys.cuh"
#include "../select/window_exits.cuh"
#include "key_tile_counts.cuh"
#include "list_rows.cuh"
#include "make_plan.h"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

struct ShortParams {
  fdm_selection s;
  fdm_problem p;
  Plan plan;
  bool plans;
  uint32_t lists; // over all sequences
  int32_t parts;  // blocks per list
};

// The source of each key's rows.
enum class RowsFrom { mask, selection };

// The kept keys of a list, in key order.
template <int kKeys> struct KeptIntervals {
  uint16_t index[kKeys];
  int32_t start[kKeys], end[kKeys];
};

// The method by which a thread block finds when its keys leave the window.
template <int kThreads, int kItemsPerThread> struct Selecting {
  // With more keys ChunkExits takes longer, because each key makes steps for every chunk.
  static constexpr bool kInChunks = kItemsPerThread == 2 && kThreads <= 512;
  template <int kBits> using Chunks = ChunkExits<std::conditional_t<kBits == 32, uint64_t, uint32_t>, kThreads>;

  union ChunksShared {
    typename Chunks<32>::Shared float32;
    typename Chunks<16>::Shared narrow;

    template <int kBits> __device__ auto &of() {
      if constexpr (kBits == 32)
        return float32;
      else
        return narrow;
    }
  };
  using Shared = std::conditional_t<kInChunks, ChunksShared, typename WindowExits<kThreads, kItemsPerThread>::Shared>;
};

template <int kThreads, int kItemsPerThread> struct ShortShared {
  static constexpr int kKeys = kThreads * kItemsPerThread;
  union {
    typename Selecting<kThreads, kItemsPerThread>::Shared selecting;
    KeptIntervals<kKeys> kept;
  };
  BlockRanks<kThreads, kItemsPerThread> ranks;
  SeenWord seen[kKeys / 32];
};

// The list of a selection's result with a number, like list_work() for a plan.
__device__ ListWork selected_list(const fdm_selection &s, uint32_t number) {
  const auto heads = static_cast<uint32_t>(s.start.shape[1]);
  const bool varlen = present(s.cu_seqlens_q);
  const uint32_t sequences = varlen ? static_cast<uint32_t>(s.batch) : 1, list = number / sequences;
  const int64_t index = number % sequences, batch = list / heads;
  return {sequence(s, varlen ? index : batch), list, index, batch, list % heads, 0};
}

// Finds the exits of all keys. If keep_last or keep_first is set, usable[i] becomes whether key i * kThreads + t may
// be kept at all.
template <int kBits, int kThreads, int kItemsPerThread>
__device__ const int32_t *find_exits(typename Selecting<kThreads, kItemsPerThread>::Shared &shared,
                                     const fdm_selection &s, const SelectionRow &row, int32_t first_ranked,
                                     bool (&usable)[kItemsPerThread]) {
  Candidates<kBits> candidates(s, row, 0);
  if (s.keep_last > 0 || s.keep_first > 0) {
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      const int32_t j = i * kThreads + static_cast<int32_t>(threadIdx.x);
      usable[i] = j < row.k_count && candidates.value(j) != 0;
    }
  }
  candidates.first_ranked = first_ranked;
  const auto value_of = [&](int32_t j) { return j < row.k_count ? candidates(j) : 0; };
  if constexpr (Selecting<kThreads, kItemsPerThread>::kInChunks) {
    auto &exits = shared.template of<kBits>();
    Selecting<kThreads, kItemsPerThread>::template Chunks<kBits>::find(exits, s.window, value_of);
    return exits.exit;
  } else {
    uint32_t value[kItemsPerThread];
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) value[i] = value_of(i * kThreads + static_cast<int32_t>(threadIdx.x));
    WindowExits<kThreads, kItemsPerThread> exits;
    exits.sort(shared.sorting, value, 32 - kBits);
    exits.divide(shared.dividing);
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i)
      shared.dividing.exit[exits.key[i]] = static_cast<int32_t>(exits.exit_of(shared.dividing, i, s.window));
    return shared.dividing.exit;
  }
}

// Selects the keys of a list with a causal limit. The first part writes their intervals.
template <int kThreads, int kItemsPerThread>
__device__ void select_rows(ShortShared<kThreads, kItemsPerThread> &shared, const fdm_selection &s,
                            const ListWork &work, bool writes, RowInterval (&rows)[kItemsPerThread]) {
  const SelectionRow row{work.s, work.list_head * (s.heads / s.start.shape[1])};
  SeenKeys seen{nullptr, static_cast<int32_t>(row.k_count)};
  if (counts_seen_keys(s)) {
    const KeyRow<uint8_t> mask(s, s.mask, row, 0);
    write_seen(shared.seen, ShortShared<kThreads, kItemsPerThread>::kKeys / 32, shared.ranks, mask, 0, seen.keys, 0);
    seen.words = shared.seen;
    __syncthreads();
  }
  const int32_t first_ranked = s.keep_first > 0 ? seen.key_of_rank(static_cast<int32_t>(s.keep_first), 0) : 0;
  bool usable[kItemsPerThread];
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) usable[i] = true;
  const int32_t *exits;
  if (s.bias.dtype == FDM_FLOAT32)
    exits = find_exits<32, kThreads, kItemsPerThread>(shared.selecting, s, row, first_ranked, usable);
  else
    exits = find_exits<16, kThreads, kItemsPerThread>(shared.selecting, s, row, first_ranked, usable);
  __syncthreads();

  const int64_t start_stride = s.start.stride[3], end_stride = s.end.stride[3];
  const bool varlen = present(s.cu_seqlens_q);
  const auto list_of = [&](const fdm_tensor &t, int64_t stride) {
    return static_cast<int32_t *>(t.data) + (varlen ? 0 : work.list_batch) * t.stride[0] +
           work.list_head * t.stride[1] + row.k_begin * stride;
  };
  int32_t *start = list_of(s.start, start_stride), *end = list_of(s.end, end_stride);
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const int32_t j = i * kThreads + static_cast<int32_t>(threadIdx.x), exit = exits[j];
    rows[i] = {0, 0};
    if (j >= row.k_count) continue;
    const int64_t first = max64(0, j - row.causal_off);
    const bool stays = j < first_ranked || exit == ShortShared<kThreads, kItemsPerThread>::kKeys;
    // A key that never enters leaves the window with its own arrival.
    const int64_t past = stays ? row.q_count : row_of_arrival(row, seen.key_after(max(exit, j), s.keep_last));
    if (usable[i] && first < past) rows[i] = {static_cast<int32_t>(first), static_cast<int32_t>(past)};
    if (!writes) continue;
    start[j * start_stride] = rows[i].start;
    end[j * end_stride] = rows[i].end;
  }
  __syncthreads(); // the kept keys overwrite the exits
}

// Compacts the kept keys of a list. Returns their number.
template <int kThreads, int kItemsPerThread>
__device__ int32_t compact_list(ShortShared<kThreads, kItemsPerThread> &shared, const fdm_problem &p, const Plan &plan,
                                const ListWork &work, bool writes, const RowInterval (&rows)[kItemsPerThread]) {
  bool kept[kItemsPerThread];
  uint32_t rank[kItemsPerThread];
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) kept[i] = rows[i].any();
  const auto count = static_cast<int32_t>(shared.ranks.rank(kept, rank));
  const KeyTileCounts tile_counts(p, plan, work);
  const int64_t base = work.list * plan.list_keys + work.s.k_begin;
#pragma unroll
  for (int i = 0; i < kItemsPerThread; ++i) {
    const int32_t j = i * kThreads + static_cast<int32_t>(threadIdx.x);
    if (writes && j < work.s.k_count) tile_counts.pass(j, static_cast<int32_t>(rank[i]) + kept[i]);
    if (!kept[i]) continue;
    shared.kept.index[rank[i]] = static_cast<uint16_t>(j);
    shared.kept.start[rank[i]] = rows[i].start;
    shared.kept.end[rank[i]] = rows[i].end;
    if (!writes) continue;
    plan.kept_index[base + rank[i]] = j;
    plan.kept_start[base + rank[i]] = rows[i].start;
    plan.kept_end[base + rank[i]] = rows[i].end;
  }
  if (writes) {
    if (threadIdx.x == 0) plan.kept_count[work.list * list_sequences(p) + work.sequence_index] = count;
    tile_counts.finish(count, kThreads);
  }
  __syncthreads();
  return count;
}

// A warp writes the columns of the row tile [first, past), which sees the keys below `visible`.
template <int kKeys>
__device__ void list_columns(const KeptIntervals<kKeys> &kept, int32_t count, const Plan &plan, int64_t list_tile,
                             int32_t first, int32_t past, int64_t visible) {
  const uint32_t below = (1u << lane_id()) - 1;
  int32_t *columns = plan.columns + list_tile * plan.tile_keys;
  int32_t full_count = 0, partial_count = 0, first_found = -1, past_found = 0;
#pragma unroll 2
  for (int32_t step = 0; step < count && kept.index[step] < visible; step += 32) {
    const int32_t n = step + lane_id();
    const TileKey key(n < count ? RowInterval{kept.start[n], kept.end[n]} : RowInterval{0, 0}, first, past);
    const uint32_t full = __ballot_sync(kAllLanes, key.full), partial = __ballot_sync(kAllLanes, key.partial);
    if ((full | partial) == 0) continue;
    if (first_found < 0) first_found = step + __ffs(full | partial) - 1;
    past_found = step + 32 - __clz(full | partial);
    const int32_t column =
        key.full ? full_count + __popc(full & below) : plan.tile_keys - 1 - partial_count - __popc(partial & below);
    full_count += __popc(full);
    partial_count += __popc(partial);
    if ((key.full || key.partial) && full_count + partial_count <= plan.tile_keys) columns[column] = kept.index[n];
  }
  if (lane_id() == 0)
    plan.counts[list_tile] = full_count + partial_count > plan.tile_keys
                                 ? TileCounts{past_found - first_found, ~first_found}
                                 : TileCounts{full_count + partial_count, full_count};
}

template <int kThreads, int kItemsPerThread, RowsFrom kFrom>
__global__ void __launch_bounds__(kThreads, 1) short_lists(const __grid_constant__ ShortParams params) {
  __shared__ ShortShared<kThreads, kItemsPerThread> shared;
  static_assert(sizeof shared <= 48 * 1024, "more would have to be asked for at the launch");
  ptx::start_dependents();
  const fdm_problem &p = params.p;
  const Plan &plan = params.plan;
  const uint32_t number = blockIdx.x % params.lists;
  const auto part = static_cast<int32_t>(blockIdx.x / params.lists);
  RowInterval rows[kItemsPerThread];
  if constexpr (kFrom == RowsFrom::selection) {
    select_rows(shared, params.s, selected_list(params.s, number), part == 0, rows);
    if (!params.plans) return;
  }
  const auto sequences = static_cast<uint32_t>(list_sequences(p));
  const ListWork work = list_work(p, plan, number / sequences, number % sequences, part);
  if constexpr (kFrom == RowsFrom::mask) {
    const ListRows reader(p, work);
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      const int64_t j = i * kThreads + threadIdx.x;
      rows[i] = j < work.s.k_count ? reader(j) : RowInterval{0, 0};
    }
  }
  const int32_t count = compact_list(shared, p, plan, work, part == 0, rows);
  if (!plan.columns) return;
  const auto queries = static_cast<int32_t>(work.s.q_count);
  const int32_t tiles = (queries + kTileRows - 1) / kTileRows;
  const int64_t list_tile = work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, 0);
  for (int32_t tile = part + params.parts * warp_id(); tile < tiles; tile += params.parts * (kThreads / 32)) {
    const int32_t past = min(queries, (tile + 1) * kTileRows);
    const int64_t visible = is_causal(p) ? past + work.s.causal_off : work.s.k_count;
    list_columns(shared.kept, count, plan, list_tile + tile, tile * kTileRows, past, visible);
  }
}

// `route` is that of the plan, or of the selection.
template <RowsFrom kFrom, class Route>
cudaError_t launch_for(const ShortParams &params, const Route &route, cudaStream_t stream) {
  const auto launch_with = [&](auto kernel) { return launch(kernel, route.blocks, route.threads, 0, stream, params); };
  if (route.threads == 128) return launch_with(short_lists<128, 2, kFrom>);
  if (route.threads == 256) return launch_with(short_lists<256, 2, kFrom>);
  if constexpr (kFrom == RowsFrom::selection) {
    if (route.keys_of_thread == 4) return launch_with(short_lists<1024, 4, kFrom>);
    if (route.threads == 1024) return launch_with(short_lists<1024, 2, kFrom>);
  }
  return launch_with(short_lists<512, 2, kFrom>);
}

uint32_t selected_lists(const fdm_selection &s) {
  return uint32_t(s.start.shape[0] * s.start.shape[1] * (is_varlen(s) ? s.batch : 1));
}

} // namespace

cudaError_t launch_short_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream) {
  const auto lists = uint32_t(plan.lists * list_sequences(p));
  return launch_for<RowsFrom::mask>({{}, p, plan, true, lists, route.parts}, route, stream);
}

cudaError_t launch_short_selection(const fdm_selection &s, const SelectionRoute &route, cudaStream_t stream) {
  return launch_for<RowsFrom::selection>({s, {}, {}, false, selected_lists(s), route.parts}, route, stream);
}

cudaError_t launch_short_lists(const fdm_selection &s, const fdm_problem &p, const Plan &plan,
                               const SelectionRoute &route, cudaStream_t stream) {
  return launch_for<RowsFrom::selection>({s, p, plan, true, selected_lists(s), route.parts}, route, stream);
}

} // namespace fdm::cuda
