// SPDX-License-Identifier: BSD-3-Clause
// The number of parts of a key block, and the order of the parts of all blocks. The thread block of key_schedule.cu
// calls these functions.
#pragma once

#include "../tile/block_scan.cuh"
#include "key_places.cuh"

namespace fdm::cuda {

// The approximate number of parts of all key blocks together, and the least length of a part in steps.
constexpr int64_t kWantedItems = kRouteTable.target_parts, kMinPartSteps = kRouteTable.part_steps;
// Step counts of a block are cut off at this limit, so that sums of a few of them fit in 32 bits.
constexpr int32_t kStepLimit = 1 << 29;

// The number of parts of a block, if each part should have about `length` steps. A block with -1 steps does not
// exist.
__device__ __forceinline__ int32_t part_count(int32_t steps, int32_t length) {
  if (steps < 0) return 0;
  return max(1, int32_t((2 * uint32_t(steps) + uint32_t(length)) / (2 * uint32_t(length))));
}

// A candidate for the length of parts. Candidate n makes about (n + 2) / 2 parts for each SM.
struct LengthChoice {
  static constexpr int kLengths = 8;
  // A part's prologue and partial sums take about as long as this many steps (measured on an H100).
  static constexpr int32_t kPartOverhead = 8;
  int32_t length, parts, stored_parts, longest, shortest;

  // The estimated time until all SMs are done, in steps. Parts come longest first. So at the end an SM is idle for at
  // most the time of the shortest part, and not at all if the last round of parts is full.
  __device__ int64_t time(int64_t all_steps, int32_t sms) const {
    const int64_t idle = int64_t((parts + sms - 1) / sms) * sms - parts;
    const int64_t lost = min64(idle * all_steps / parts, int64_t(sms) * shortest);
    return max64((all_steps + int64_t(parts) * kPartOverhead + lost) / sms, longest + kPartOverhead);
  }
};

struct LengthChoices {
  LengthChoice choices[LengthChoice::kLengths];
  int32_t best;

  // Returns the length with the least estimated time among those whose parts can be stored, or 0 if there is none.
  // All threads of the block call this.
  template <class ForEachBlock>
  __device__ int32_t choose(const KeyWork &keys, int64_t all_steps, const ForEachBlock &for_each_block) {
    constexpr int kLengths = LengthChoice::kLengths;
    const int n = int(threadIdx.x);
    if (n < kLengths) {
      const int64_t length = ceil_div(2 * all_steps, int64_t(n + 2) * keys.sms);
      choices[n] = {int32_t(max64(kMinPartSteps, min64(kStepLimit, length))), 0, 0, 0, INT32_MAX};
    }
    __syncthreads();
    LengthChoice thread_choices[kLengths];
#pragma unroll
    for (LengthChoice &choice : thread_choices) choice = {0, 0, 0, 0, INT32_MAX};
    for_each_block([&](int64_t, int32_t steps) {
#pragma unroll
      for (int i = 0; i < kLengths; ++i) add(thread_choices[i], steps, choices[i].length);
    });
#pragma unroll
    for (int i = 0; i < kLengths; ++i) add_warp(choices[i], thread_choices[i]);
    __syncthreads();
    if (warp_id() == 0) {
      uint32_t time = UINT32_MAX;
      const LengthChoice choice = choices[min(n, kLengths - 1)];
      if (n < kLengths && choice.parts > 0 && choice.stored_parts <= keys.stored_parts)
        time = uint32_t(min64(UINT32_MAX - 1, choice.time(all_steps, keys.sms)));
      const uint32_t min_time = __reduce_min_sync(kAllLanes, time), lanes = __ballot_sync(kAllLanes, time == min_time);
      if (n == __ffs(lanes) - 1) best = min_time == UINT32_MAX ? 0 : choice.length;
    }
    __syncthreads();
    return best;
  }

private:
  __device__ static void add(LengthChoice &choice, int32_t steps, int32_t length) {
    const int32_t parts = part_count(steps, length);
    if (parts == 0) return;
    const int32_t each = (steps + parts - 1) / parts;
    choice.parts += parts;
    if (parts > 1) choice.stored_parts += parts;
    choice.longest = max(choice.longest, each);
    choice.shortest = min(choice.shortest, each);
  }
  __device__ static void add_warp(LengthChoice &choice, const LengthChoice &lane_choice) {
    const int32_t parts = __reduce_add_sync(kAllLanes, lane_choice.parts),
                  stored_parts = __reduce_add_sync(kAllLanes, lane_choice.stored_parts);
    const int32_t longest = __reduce_max_sync(kAllLanes, lane_choice.longest);
    const int32_t shortest = __reduce_min_sync(kAllLanes, lane_choice.shortest);
    if (lane_id() > 0 || parts == 0) return;
    atomicAdd(&choice.parts, parts);
    atomicAdd(&choice.stored_parts, stored_parts);
    atomicMax(&choice.longest, longest);
    atomicMin(&choice.shortest, shortest);
  }
};

// The order of parts. The longest come first. Concurrent blocks should add to the dQ sums of few rows, which then
// stay in L2. If blocks have equal numbers of steps, or go through the rows of lists from the last tile on, heads
// therefore come in groups that are just large enough for all SMs. If lists have at most two such groups, and blocks
// have two parts or more on average, the last rows come first instead. Without a mask, forward and backward of 2 x 16
// heads of 128 with 8192 tokens take 4 % less time in this order [head-order].
struct PartOrder {
  static constexpr int kLengths = 64, kPlaces = 16, kClasses = kPlaces * kLengths;

  int32_t length;              // the wanted length of parts
  int32_t heads_per_group = 0; // above 0: a place is a group of this many heads
  // Above 0: a place is a range of rows, and a block that all rows keep has this many steps.
  int64_t max_block_steps = 0;

  __device__ PartOrder(const BackwardParams &params, int32_t part_length, int64_t all_steps, int32_t existing_blocks)
      : length(part_length) {
    const KeyWork &keys = params.keys;
    // Heads that share a bias per query should read it at the same time, so they are not ordered by head.
    const bool has_equal_steps = keys.sms > 0 && !keys.takes_planned_keys && !params.plan.spans &&
                                 !is_causal(params.p) && !has_query_rows(params.p.bias);
    const bool walks_lists = keys.heads_inside == HeadsInside::all && keys.takes_planned_keys;
    if ((!has_equal_steps && !walks_lists) || is_varlen(params.p) || existing_blocks == 0) return;
    // A group has a third more blocks than there are SMs, so that blocks are left when the first ones end. With only
    // two groups, the SMs would end further apart (measured on an H100).
    const int64_t wanted = ceil_div(int64_t(keys.heads) * (keys.sms + keys.sms / 3), existing_blocks);
    const int64_t group_heads = max64(wanted, ceil_div(keys.heads, kPlaces));
    if (ceil_div(keys.heads, group_heads) > 2)
      heads_per_group = int32_t(group_heads);
    else if (walks_lists && all_steps >= 2 * int64_t(length) * existing_blocks)
      max_block_steps = ceil_div(params.p.queries, keys.tile_rows) * params.group;
  }

  // The class of a part. The parts of a class come in any order.
  __device__ int32_t class_of(const KeyWork &keys, int64_t block, int32_t steps, int32_t parts, int32_t part) const {
    const float own_length = float(steps) / float(parts);
    const auto rank = int32_t(own_length * float(kLengths / 2) / float(length));
    int32_t place = 0;
    if (heads_per_group > 0)
      place = int32_t(BlockOfHead(keys, uint32_t(block)).head / uint32_t(heads_per_group));
    else if (max_block_steps > 0)
      place = int32_t(own_length * float(part) * float(kPlaces) / float(max_block_steps));
    return min(kPlaces - 1, place) * kLengths + kLengths - 1 - min(kLengths - 1, rank);
  }
};

} // namespace fdm::cuda
