// SPDX-License-Identifier: BSD-3-Clause
// Orders the keys that each segment of rows keeps, so that the same rows keep the keys of a block.
//
// If a selection keeps w keys for each row, n consecutive rows keep at most w + n - 1 keys together. Over all rows,
// the keys of a block are kept by different ranges of rows, so many of its pairs are not kept. Within a segment of
// about w rows, most keys are kept by all rows, or only begin or only end there. In that order, the pairs computed
// are 1.15 times the pairs kept; with blocks over all rows, 1.6 times (simulated: N 8192, w 1024, random biases).
//
// The gradients of a key that several segments keep are sums over thread blocks, in no fixed order.
#pragma once

#include "../tile/block_scan.cuh"
#include "key_blocks.cuh"

namespace fdm::cuda {

// A thread block orders the keys of a segment. For its head, it clears the sums of keys that begin in the segment.
template <int kThreads> struct SegmentOrder {
  static constexpr int kItemsPerThread = 2, kStep = kThreads * kItemsPerThread, kClasses = 256;
  static_assert(kClasses <= kThreads);

  struct Shared {
    BlockRanks<kThreads, kItemsPerThread> ranks;
    BlockSum<kThreads> sum;
    uint32_t next_position[kClasses];
    int32_t low[kThreads], high[kThreads]; // the rows of each key block
  };

  // This thread's keys of a step of the list.
  struct Step {
    KeyRows rows[kItemsPerThread];
    uint32_t own_class[kItemsPerThread]; // kClasses: the segment does not keep the key
  };

  const BackwardParams &params;
  Shared &shared;
  int64_t base;               // the index of the first kept key of the list and sequence
  int32_t sequence_number;    // list_sequence() of the list and sequence
  int32_t head, list, number; // `head` is counted over sequences, except packed ones; segment `number` over lists
  int32_t first, past;
  int32_t list_kept_count; // of the list and sequence; 0: the segment does not exist
  int32_t visible;
  int32_t first_sum, past_sums;
  bool writes; // only one of the heads that share the list writes it
  bool last;   // this is the last segment of its sequence

  __device__ SegmentOrder(const BackwardParams &parameters, Shared &memory, int64_t block)
      : params(parameters), shared(memory) {
    const fdm_problem &p = params.p;
    const KeySegments &segments = params.keys.segments;
    const auto of_list = static_cast<int32_t>(quotient(block, params.keys.heads));
    head = static_cast<int32_t>(block - int64_t(of_list) * params.keys.heads);
    const SegmentPlace place(params, static_cast<uint32_t>(head), of_list);
    const Sequence &s = place.s;
    list = static_cast<int32_t>(place.list);
    number = list * segments.count + of_list;
    const ListSegments list_segments(params, s, place.sequence_index, list);
    const fdm_tensor &t = mask_tensor(p);
    writes = (t.shape[0] > 1 || s.batch == 0) && (t.shape[1] > 1 || place.kv_head == 0);
    sequence_number = static_cast<int32_t>(list_sequence(p, list, place.sequence_index));
    base = list * params.plan.list_keys + s.k_begin;
    const bool exists = list_segments.has_segment(place.segment);
    list_kept_count = exists ? params.plan.kept_count[sequence_number] : 0;
    first = exists ? place.segment * segments.rows : 0;
    past = exists ? static_cast<int32_t>(min64(s.q_count, int64_t(first) + segments.rows)) : 0;
    visible = static_cast<int32_t>(is_causal(p) ? min64(s.k_count, past + s.causal_off) : s.k_count);
    first_sum = list_segments.first_sum;
    past_sums = list_segments.past_sums;
    last = exists && place.segment == list_segments.count - 1;
  }

  __device__ void run() const {
    const KeySegments &segments = params.keys.segments;
    if (threadIdx.x < kClasses) shared.next_position[threadIdx.x] = 0;
    shared.low[threadIdx.x] = past;
    shared.high[threadIdx.x] = first - 1;
    // If true, the list is loaded only once, and its keys claim positions in the first pass.
    const bool once = list_kept_count <= kStep;
    Step step;
    uint32_t position[kItemsPerThread];
    int32_t sums = first_sum;
    for (int32_t start = 0; has_step(start); start += kStep) {
      sums += load(step, start, sums);
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i)
        position[i] = step.own_class[i] < kClasses ? claim(step.own_class[i]) : 0;
    }
    __syncthreads();
    uint32_t kept_count;
    const uint32_t class_keys = threadIdx.x < kClasses ? shared.next_position[threadIdx.x] : 0;
    const uint32_t first_position = shared.sum.exclusive(class_keys, &kept_count);
    if (threadIdx.x < kClasses) shared.next_position[threadIdx.x] = first_position;
    __syncthreads();
    const int32_t room = segments.blocks * params.keys.block_keys;
    bool fits = static_cast<int32_t>(kept_count) <= room;
    KeyRows *ordered = params.keys.ordered + int64_t(number) * room;
    sums = once ? sums : first_sum;
    for (int32_t start = 0; has_step(start); start += kStep) {
      if (!once) sums += load(step, start, sums);
#pragma unroll
      for (int i = 0; i < kItemsPerThread; ++i) {
        const KeyRows &rows = step.rows[i];
        const bool begins = rows.key >= 0 && rows.start >= first && rows.start < past;
        clear_sums(rows, begins);
        fits = fits && rows.sum < past_sums;
        if (!writes || !fits) continue;
        const uint32_t own_class = step.own_class[i];
        if (own_class < kClasses)
          put(ordered, once ? shared.next_position[own_class] + position[i] : claim(own_class), rows);
        if (begins && rows.sum >= 0) segments.sum_keys[int64_t(list) * segments.max_sums + rows.sum] = rows.key;
      }
    }
    fits = __syncthreads_and(fits);
    if (!writes) return;
    if (threadIdx.x == 0) {
      segments.kept_count[number] = fits ? static_cast<int32_t>(kept_count) : INT32_MAX;
      if (last) segments.sum_count[sequence_number] = sums - first_sum;
    }
    if (fits) order_blocks(static_cast<int32_t>(kept_count), segments.order + int64_t(number) * segments.blocks);
  }

private:
  // Returns the next free position of a class.
  __device__ uint32_t claim(uint32_t own_class) const { return atomicAdd(&shared.next_position[own_class], 1); }

  // Keys that all rows keep come first, then keys that end here, then keys that begin here, the longest of each kind
  // first. kClasses: the segment does not keep the key.
  __device__ uint32_t class_of(const KeyRows &rows) const {
    if (rows.start >= past || rows.end <= first) return kClasses;
    const int shift = __ffs(params.keys.tile_rows) - 1, size = params.keys.tile_rows; // a power of two
    const int tiles = params.keys.segments.rows >> shift, all = (past - first + size - 1) >> shift;
    const int late = max(0, rows.start - first) >> shift;
    const int early = all - ((min(past, rows.end) - first + size - 1) >> shift);
    if (late == 0 && early == 0) return 0;
    return late <= early ? 1 + early : tiles + late;
  }

  // Whether the list has keys from `start` on that this segment or an earlier one may keep.
  __device__ bool has_step(int32_t start) const {
    return start < list_kept_count && (start == 0 || params.plan.kept_index[base + start] < visible);
  }

  // Loads the keys of a step. Numbers the sums of keys that several segments keep from `sums` on, and returns how
  // many such keys there are. All threads of the block call this.
  __device__ int32_t load(Step &step, int32_t start, int32_t sums) const {
    const Plan &plan = params.plan;
    const int shift = __ffs(params.keys.segments.rows) - 1; // a power of two
    bool several[kItemsPerThread];
    uint32_t rank[kItemsPerThread];
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i) {
      const int32_t n = start + i * kThreads + static_cast<int32_t>(threadIdx.x);
      KeyRows &rows = step.rows[i];
      rows = {-1, 0, 0, -1};
      if (n < list_kept_count)
        rows = {plan.kept_index[base + n], plan.kept_start[base + n], plan.kept_end[base + n], -1};
      several[i] = rows.end > rows.start && (rows.end - 1) >> shift > rows.start >> shift;
      step.own_class[i] = rows.key < 0 ? kClasses : class_of(rows);
    }
    const auto total = static_cast<int32_t>(shared.ranks.rank(several, rank));
#pragma unroll
    for (int i = 0; i < kItemsPerThread; ++i)
      if (several[i]) step.rows[i].sum = sums + static_cast<int32_t>(rank[i]);
    return total;
  }

  // Writes a key to its position, and extends the rows of its block.
  __device__ void put(KeyRows *ordered, uint32_t position, const KeyRows &rows) const {
    ordered[position] = rows;
    const uint32_t block = position / static_cast<uint32_t>(params.keys.block_keys);
    atomicMin(&shared.low[block], max(first, rows.start));
    atomicMax(&shared.high[block], min(past, rows.end));
  }

  // Clears the sums of the warp's keys that begin in this segment.
  __device__ void clear_sums(const KeyRows &rows, bool begins) const {
    uint32_t wanting = __ballot_sync(kAllLanes, begins && rows.sum >= 0 && rows.sum < past_sums);
    for (; wanting; wanting &= wanting - 1) {
      const int32_t sum = __shfl_sync(kAllLanes, rows.sum, __ffs(wanting) - 1);
      auto *row = reinterpret_cast<float4 *>(key_segment_sums(params.keys, head, sum));
      for (int n = lane_id(); n < params.keys.sum_dim / 2; n += 32) row[n] = float4{};
      if (lane_id() == 0) *bias_segment_sum(params.keys, head, sum) = 0.0f;
    }
  }

  // Writes the blocks, the longest first.
  __device__ void order_blocks(int32_t kept_count, SegmentBlock *order) const {
    const int32_t size = params.keys.block_keys, count = params.keys.segments.blocks;
    const auto block = static_cast<int32_t>(threadIdx.x);
    if (block >= count) return;
    const int32_t low = shared.low[block], high = shared.high[block];
    int32_t rank = 0;
    for (int32_t n = 0; n < count; ++n) {
      const int32_t longer = (shared.high[n] - shared.low[n]) - (high - low);
      rank += longer > 0 || (longer == 0 && n < block);
    }
    order[rank] = {low, high, block, min(size, kept_count - block * size)};
  }
};

} // namespace fdm::cuda
