// SPDX-License-Identifier: BSD-3-Clause
// A thread block finds the columns of a tile.
//
// Each warp has consecutive keys, 32 in a step, and a lane holds the ballots of one step. So warps exchange their
// counts once for up to 32 keys of each thread, after these keys have been read.
#pragma once

#include "../tile/block_scan.cuh"
#include "list_rows.cuh"

namespace fdm::cuda {

template <int kThreads> struct TileColumnsShared {
  BlockSum<kThreads> sums;
  int32_t first, past; // of a tile that overflows: the first position, and past the last
};

// The keys that tiles read, in key order: all keys of a list, or the kept ones, which have been found before.
struct TileKeys {
  const int32_t *start, *end; // of the first key
  int64_t start_stride, end_stride;
  const int32_t *index; // null: all keys
  int32_t count;
  int32_t seen_from,
      seen_step; // the first row that sees the first key, and the rows from each key to the next
  int32_t queries;

  __device__ static TileKeys all(const fdm_problem &p, const ListWork &work) {
    const ListRows list(p, work);
    const bool causal = is_causal(p);
    return {list.start,
            list.end,
            list.start_stride,
            list.end_stride,
            nullptr,
            static_cast<int32_t>(work.s.k_count),
            causal ? static_cast<int32_t>(-work.s.causal_off) : 0,
            causal ? 1 : 0,
            static_cast<int32_t>(work.s.q_count)};
  }
  __device__ static TileKeys kept(const fdm_problem &p, const Plan &plan, const ListWork &work) {
    const int64_t list = work.list * plan.list_keys + work.s.k_begin;
    return {plan.kept_start + list,
            plan.kept_end + list,
            1,
            1,
            plan.kept_index + list,
            plan.kept_count[work.list * list_sequences(p) + work.sequence_index],
            0,
            0,
            static_cast<int32_t>(work.s.q_count)};
  }

  __device__ int32_t key(int32_t n) const { return index ? index[n] : n; }

  // The counts of a tile that overflows: the place among the kept keys of its columns, which are at positions [first,
  // past). All threads of the block call this.
  template <int kThreads>
  __device__ TileCounts kept_between(BlockSum<kThreads> &sums, int32_t first, int32_t past) const {
    if (index) return {past - first, ~first};
    uint32_t before = 0, between = 0, total;
    for (int32_t n = static_cast<int32_t>(threadIdx.x); n < past; n += kThreads) {
      const int32_t seen = max(0, seen_from + n * seen_step);
      const bool any = max(start[n * start_stride], seen) < min(end[n * end_stride], queries);
      before += any && n < first;
      between += any && n >= first;
    }
    sums.exclusive(before | between << 16, &total);
    return {static_cast<int32_t>(total >> 16), ~static_cast<int32_t>(total & 0xffffu)};
  }
};

// The rows [first, past) of a tile. There is at least one.
struct TileRows {
  int32_t first, past;
};

// The ballots of the step with this lane's number: keys that some row of the tile keeps, and keys that all rows keep.
struct StepBallots {
  uint32_t any = 0, full = 0;

  __device__ uint32_t partial() const { return any & ~full; }
};

// Classifies the keys at positions [first, past) for a tile; a warp calls this. Pointers advance along the intervals,
// and these are compared with the tile's rows, because one more instruction for each key is an eighth of the time.
__device__ __forceinline__ StepBallots classify(const TileKeys &keys, const TileRows &tile, int32_t first,
                                                int32_t past) {
  constexpr int kStepsInFlight = 8; // steps whose loads are under way at a time
  StepBallots ballots;
  int32_t n = first + lane_id(), seen = keys.seen_from + n * keys.seen_step;
  const int64_t start_step = 32 * keys.start_stride, end_step = 32 * keys.end_stride;
  const int32_t *start = keys.start + n * keys.start_stride, *end = keys.end + n * keys.end_stride;
#pragma unroll 1
  for (int32_t step = 0; first + 32 * step < past; step += kStepsInFlight) {
    int32_t starts[kStepsInFlight], ends[kStepsInFlight];
#pragma unroll
    for (int i = 0; i < kStepsInFlight; ++i) {
      starts[i] = 0;
      ends[i] = 0;
      if (n + 32 * i < past) {
        starts[i] = *start;
        ends[i] = *end;
      }
      start += start_step;
      end += end_step;
    }
#pragma unroll
    for (int i = 0; i < kStepsInFlight; ++i) {
      const int32_t from = max(starts[i], seen), to = min(ends[i], tile.past);
      const uint32_t any = __ballot_sync(kAllLanes, max(from, tile.first) < to);
      const uint32_t full = __ballot_sync(kAllLanes, from <= tile.first && to == tile.past);
      if (lane_id() == step + i) ballots = {any, full};
      seen += 32 * keys.seen_step;
    }
    n += 32 * kStepsInFlight;
  }
  return ballots;
}

// Writes the columns of a tile that sees keys below `visible`, if they fit `room`. Returns its counts. All threads of
// the block call this.
template <int kThreads>
__device__ TileCounts list_columns(TileColumnsShared<kThreads> &shared, const TileKeys &keys, const TileRows &tile,
                                   int64_t visible, int32_t *columns, int32_t room) {
  constexpr int32_t kStep = 32 * kThreads;
  const int32_t lane = lane_id();
  const uint32_t below = (1u << lane) - 1;
  const auto positions = static_cast<int32_t>(min64(keys.count, visible)); // a key's position is at most the key
  int32_t full_count = 0, partial_count = 0, first_found = INT32_MAX, past_found = 0;
#pragma unroll 1
  for (int32_t from = 0; from < positions; from += kStep) {
    const int32_t steps = (min(positions - from, kStep) + kThreads - 1) / kThreads;
    const int32_t first = from + 32 * steps * warp_id();
    int32_t past = min(positions, first + 32 * steps);
    if (first < past && keys.key(first) >= visible) past = first;
    const StepBallots ballots = classify(keys, tile, first, past);
    uint32_t total;
    const uint32_t before = shared.sums.exclusive(__popc(ballots.full) | __popc(ballots.partial()) << 16, &total);
    const auto full_total = static_cast<int32_t>(total & 0xffffu), partial_total = static_cast<int32_t>(total >> 16);
    if (full_count + full_total + partial_count + partial_total <= room) {
      int32_t *const next_full = columns + full_count, *const next_partial = columns + room - 1 - partial_count;
#pragma unroll 4
      for (int32_t step = 0; step < steps; ++step) {
        const StepBallots found{__shfl_sync(kAllLanes, ballots.any, step), __shfl_sync(kAllLanes, ballots.full, step)};
        const uint32_t rank = __shfl_sync(kAllLanes, before, step);
        if ((found.any >> lane & 1) == 0) continue;
        int32_t *const column = found.full >> lane & 1 ? next_full + (rank & 0xffffu) + __popc(found.full & below)
                                                       : next_partial - (rank >> 16) - __popc(found.partial() & below);
        *column = keys.key(first + 32 * step + lane);
      }
    }
    full_count += full_total;
    partial_count += partial_total;
    if (ballots.any != 0) {
      first_found = min(first_found, first + 32 * lane + __ffs(ballots.any) - 1);
      past_found = first + 32 * lane + 32 - __clz(ballots.any);
    }
  }
  if (full_count + partial_count <= room) return {full_count + partial_count, full_count};
  if (threadIdx.x == 0) {
    shared.first = INT32_MAX;
    shared.past = 0;
  }
  __syncthreads();
  atomicMin(&shared.first, first_found);
  atomicMax(&shared.past, past_found);
  __syncthreads();
  return keys.kept_between(shared.sums, shared.first, shared.past);
}

} // namespace fdm::cuda
