// SPDX-License-Identifier: BSD-3-Clause
// Divides the work of the key-stationary kernel. Key blocks with many more steps than the average are divided into
// parts: otherwise a few heads or a few long intervals would leave most SMs idle. The order of the parts lets all SMs
// end at about the same time (key_parts.cuh).
//
// Only the device knows how many keys are kept, so a kernel makes the division. It depends on the problem alone, and
// for kernels that add to dQ in no fixed order also on the number of SMs. The order of parts of a class and the
// places of stored parts may vary between runs. They change no result.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "key_blocks.cuh"
#include "key_parts.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kKnownBlocks = 6144; // the step counts of this many blocks stay in shared memory
constexpr int kMaxTries = 64;

// Blocks are numbered as if every packed sequence were as long as the longest. This function visits only the blocks
// for which a sequence has keys. A few threads share a head, since sequences may be many and short, or few and long.
template <class Function>
__device__ void for_each_packed_block(const BackwardParams &params, const Function &function) {
  const KeyWork &keys = params.keys;
  const int lanes = keys.blocks >= 8 ? 8 : keys.blocks >= 4 ? 4 : keys.blocks >= 2 ? 2 : 1; // a divisor of kThreads
  const int32_t first_lane = int32_t(threadIdx.x) % lanes, stride = keys.takes_planned_keys ? keys.buckets : 1;
  for (int32_t head = int32_t(threadIdx.x) / lanes; head < keys.heads; head += kThreads / lanes) {
    const KeyBlockPlace place = key_block_place(params, head);
    const auto count = int32_t(keys.takes_planned_keys ? params.plan.kept_count[place.list_sequence] : place.s.k_count);
    const int32_t bucket_keys = keys.takes_planned_keys ? min(count, kBucketKeys) : count;
    const int32_t buckets = keys.takes_planned_keys ? min(stride, (count + kBucketKeys - 1) / kBucketKeys) : 1;
    const int32_t past = buckets * ((bucket_keys + keys.block_keys - 1) / keys.block_keys);
    for (int32_t n = first_lane; n < past; n += lanes)
      function(int64_t(n / buckets * stride + n % buckets) * keys.heads + head);
  }
}

__global__ void __launch_bounds__(kThreads, 1) schedule_keys(const __grid_constant__ BackwardParams params) {
  __shared__ unsigned long long all;
  __shared__ int32_t existing, stored_parts, classes[PartOrder::kClasses], known_steps[kKnownBlocks];
  __shared__ BlockSum<kThreads> sum;
  __shared__ LengthChoices lengths;
  ptx::start_dependents();
  const KeyWork &keys = params.keys;
  // The kernel ahead orders the keys of lists. It writes nothing else that this kernel reads.
  if (keys.takes_planned_keys) ptx::wait_for_kernel_ahead();
  const int64_t blocks = int64_t(keys.blocks) * keys.heads;
  const auto count_steps = [&](int64_t block) -> int32_t { // -1: the block does not exist
    const RowRange rows = key_block_rows(params, key_block_place(params, block));
    return rows.past < rows.first ? -1 : int32_t(min64(kStepLimit, key_steps(params, rows).count));
  };
  const bool packed = is_varlen(params.p);
  if (!packed) // each thread reads its own stores
    for (int64_t block = threadIdx.x; block < min64(blocks, kKnownBlocks); block += kThreads)
      known_steps[block] = count_steps(block);
  const auto for_each_block = [&](const auto &function) {
    if (packed) return for_each_packed_block(params, [&](int64_t block) { function(block, count_steps(block)); });
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads)
      function(block, block < kKnownBlocks ? known_steps[block] : count_steps(block));
  };

  if (threadIdx.x == 0) all = existing = 0;
  __syncthreads();
  unsigned long long own_steps = 0;
  int32_t own_blocks = 0;
  for_each_block([&](int64_t, int32_t steps) {
    own_steps += uint64_t(max(0, steps));
    own_blocks += steps >= 0;
  });
  if (own_steps) atomicAdd(&all, own_steps);
  own_blocks = __reduce_add_sync(kAllLanes, own_blocks);
  if (lane_id() == 0 && own_blocks) atomicAdd(&existing, own_blocks);
  __syncthreads();
  const auto all_steps = int64_t(all);
  // With more blocks than two for each SM, the length of parts matters little.
  const bool chooses_length =
      (keys.takes_planned_keys || params.plan.spans) && keys.sms > 0 && existing <= 2 * keys.sms;
  int32_t length = chooses_length ? lengths.choose(keys, all_steps, for_each_block) : 0;
  const bool chosen = length > 0;
  if (!chosen) length = int32_t(max64(kMinPartSteps, min64(kStepLimit, ceil_div(all_steps, kWantedItems))));
  // Without a chosen length, parts grow longer until all of them can be stored.
  for (int tries = 0; !chosen && tries < kMaxTries; ++tries) {
    __syncthreads();
    if (threadIdx.x == 0) stored_parts = 0;
    __syncthreads();
    int32_t thread_stored_parts = 0;
    for_each_block([&](int64_t, int32_t steps) {
      const int32_t parts = part_count(steps, length);
      if (parts > 1) thread_stored_parts += parts;
    });
    if (thread_stored_parts) atomicAdd(&stored_parts, thread_stored_parts);
    __syncthreads();
    if (stored_parts <= keys.stored_parts) break;
    length += length / 8;
  }

  static_assert(PartOrder::kClasses == kThreads);
  const PartOrder order(params, length, all_steps, existing);
  classes[threadIdx.x] = 0;
  __syncthreads();
  for_each_block([&](int64_t block, int32_t steps) {
    const int32_t parts = part_count(steps, length);
    for (int32_t part = 0; part < parts; ++part)
      atomicAdd(&classes[order.class_of(keys, block, steps, parts, part)], 1);
  });
  __syncthreads();
  uint32_t items;
  classes[threadIdx.x] = int32_t(sum.exclusive(uint32_t(classes[threadIdx.x]), &items));
  if (threadIdx.x == 0) {
    // If the bounds of packed sequences overlap, there are more items than room.
    *keys.item_count = min(int32_t(items), keys.max_items);
    stored_parts = 0;
  }
  __syncthreads();
  for_each_block([&](int64_t block, int32_t steps) {
    const int32_t parts = part_count(steps, length);
    const int32_t stored_part = parts > 1 ? atomicAdd(&stored_parts, parts) : 0;
    for (int32_t part = 0; part < parts; ++part) {
      const int32_t item = atomicAdd(&classes[order.class_of(keys, block, steps, parts, part)], 1);
      if (item < keys.max_items) keys.items[item] = {int32_t(block), part, parts, stored_part};
    }
  });
  if (!keys.takes_planned_keys) ptx::wait_for_kernel_ahead();
}

} // namespace

cudaError_t launch_key_schedule(const BackwardParams &params, cudaStream_t stream) {
  return launch<Overlap::kernel_ahead>(schedule_keys, 1, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
