// SPDX-License-Identifier: BSD-3-Clause
// Divides the work of the key-stationary kernel. Blocks of keys with many more steps than the average are divided into
// parts: otherwise a few heads or a few long intervals would leave most of the chip idle. The longest parts come
// first, and all SMs end at about the same time.
//
// How many keys are kept is known on the device only, so the division is made there. It depends on the problem alone;
// the order of parts of about the same length, and the slot of a block's partial sums, may differ, and change no
// result.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "key_blocks.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kLengths = 64; // lengths that are told apart
constexpr int kMostTries = 64;

// How many parts a block has, and which of the lengths they have; length 0 is the longest.
struct Parts {
  int32_t count, length;
};

__device__ Parts divide(int64_t steps, int64_t most) {
  if (steps < 0) return {0, 0};
  const int32_t count = int32_t(max64(1, (2 * steps + most) / (2 * most)));
  return {count, kLengths - 1 - int32_t(min64(kLengths - 1, steps * (kLengths / 2) / (most * count)))};
}

// Blocks are numbered as if every packed sequence were as long as the longest. This goes through those that a sequence
// has keys for; a few threads share a head, since sequences may be many and short, or few and long.
template <class Function>
__device__ void for_each_packed_block(const BackwardParams &params, const Function &function) {
  const KeyWork &keys = params.keys;
  const int together = keys.blocks >= 8 ? 8 : keys.blocks >= 4 ? 4 : keys.blocks >= 2 ? 2 : 1; // a divisor of kThreads
  const int32_t own = int32_t(threadIdx.x) % together, stride = keys.listed ? keys.buckets : 1;
  for (int32_t head = int32_t(threadIdx.x) / together; head < keys.heads; head += kThreads / together) {
    const KeyBlockPlace place = key_block_place(params, head);
    const auto count = int32_t(keys.listed ? params.plan.kept_count[place.list_sequence] : place.s.k_count);
    const int32_t bucket_keys = keys.listed ? min(count, kBucketKeys) : count;
    const int32_t buckets = keys.listed ? min(stride, (count + kBucketKeys - 1) / kBucketKeys) : 1;
    const int32_t past = buckets * ((bucket_keys + keys.block_keys - 1) / keys.block_keys);
    for (int32_t n = own; n < past; n += together)
      function(int64_t(n / buckets * stride + n % buckets) * keys.heads + head);
  }
}

__global__ void __launch_bounds__(kThreads, 1) schedule_keys(const __grid_constant__ BackwardParams params) {
  __shared__ unsigned long long all;
  __shared__ int32_t slots, items[kLengths];
  ptx::start_dependents();
  // The kernel ahead orders the keys of lists. What else this reads was there before.
  if (params.keys.listed) ptx::wait_for_kernel_ahead();
  const int64_t blocks = int64_t(params.keys.blocks) * params.keys.heads;
  const auto count_steps = [&](int64_t block) -> int64_t { // -1: no such block
    if (block >= blocks) return -1;
    const RowRange rows = key_block_rows(params, key_block_place(params, block));
    return rows.past < rows.first ? -1 : key_steps(params, rows).count;
  };
  const bool packed = is_varlen(params.p);
  const int64_t own = packed ? -1 : count_steps(threadIdx.x); // most often the only one
  const auto for_each_block = [&](const auto &function) {
    if (packed) return for_each_packed_block(params, [&](int64_t block) { function(block, count_steps(block)); });
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads)
      function(block, block == threadIdx.x ? own : count_steps(block));
  };

  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  unsigned long long known = 0;
  for_each_block([&](int64_t, int64_t steps) { known += uint64_t(max64(0, steps)); });
  if (known) atomicAdd(&all, known);
  __syncthreads();
  // Parts grow longer until there are slots for all of them.
  int64_t most = max64(kLeastSteps, ceil_div(int64_t(all), kWantedItems));
  for (int tries = 0; tries < kMostTries; ++tries) {
    __syncthreads();
    if (threadIdx.x == 0) slots = 0;
    __syncthreads();
    int32_t known_slots = 0;
    for_each_block([&](int64_t, int64_t steps) {
      const Parts parts = divide(steps, most);
      if (parts.count > 1) known_slots += parts.count;
    });
    if (known_slots) atomicAdd(&slots, known_slots);
    __syncthreads();
    if (slots <= params.keys.slot_count) break;
    most += most / 8;
  }

  if (int(threadIdx.x) < kLengths) items[threadIdx.x] = 0;
  __syncthreads();
  for_each_block([&](int64_t, int64_t steps) {
    const Parts parts = divide(steps, most);
    if (parts.count > 0) atomicAdd(&items[parts.length], parts.count);
  });
  __syncthreads();
  int32_t before = 0;
  for (int length = 0; length < kLengths && length < int(threadIdx.x); ++length) before += items[length];
  __syncthreads();
  if (int(threadIdx.x) < kLengths) items[threadIdx.x] = before;
  // Bounds of packed sequences that overlap would make more items than there is room for.
  if (threadIdx.x == kLengths) *params.keys.item_count = min(before, params.keys.max_items);
  if (threadIdx.x == 0) slots = 0;
  __syncthreads();
  for_each_block([&](int64_t block, int64_t steps) {
    const Parts parts = divide(steps, most);
    if (parts.count == 0) return;
    const int32_t first = atomicAdd(&items[parts.length], parts.count);
    const int32_t slot = parts.count > 1 ? atomicAdd(&slots, parts.count) : 0;
    for (int32_t part = 0; part < parts.count && first + part < params.keys.max_items; ++part)
      params.keys.items[first + part] = {int32_t(block), part, parts.count, slot};
  });
  if (!params.keys.listed) ptx::wait_for_kernel_ahead();
}

} // namespace

cudaError_t launch_key_schedule(const BackwardParams &params, cudaStream_t stream) {
  return launch<Overlap::kernel_ahead>(schedule_keys, 1, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
