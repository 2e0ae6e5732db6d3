// SPDX-License-Identifier: BSD-3-Clause
// Divides the work of the key-stationary kernel: blocks of keys with many more steps than the average are divided into
// parts, so that neither a few heads nor a few long intervals leave most of the chip idle.
//
// How many keys are kept is known on the device only, so the division is made there. It depends on the problem alone.
#include <cuda_runtime.h>

#include "../block_scan.cuh"
#include "key_blocks.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) schedule_keys(const __grid_constant__ BackwardParams params) {
  __shared__ BlockSum<kThreads> sums;
  __shared__ unsigned long long all;
  const int64_t blocks = int64_t(params.keys.blocks) * params.keys.heads;
  const auto steps = [&](int64_t block) -> int64_t { // -1: no such block
    if (block >= blocks) return -1;
    const RowRange rows = key_block_rows(params, key_block_place(params, block));
    return rows.past < rows.first ? -1 : key_steps(params, rows).count;
  };

  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int64_t block = threadIdx.x; block < blocks; block += kThreads) own += uint64_t(max64(0, steps(block)));
  atomicAdd(&all, own);
  __syncthreads();
  const int64_t most = max64(kLeastSteps, ceil_div(int64_t(all), kWantedItems));

  int32_t items = 0, slots = 0;
  for (int64_t first = 0; first < blocks; first += kThreads) {
    const int64_t block = first + threadIdx.x, count = steps(block);
    const int32_t parts = count < 0 ? 0 : int32_t(max64(1, ceil_div(count, most)));
    uint32_t all_items, all_slots;
    const int32_t item = items + int32_t(sums.exclusive(uint32_t(parts), &all_items));
    const int32_t slot = slots + int32_t(sums.exclusive(parts > 1 ? uint32_t(parts) : 0u, &all_slots));
    for (int32_t part = 0; part < parts; ++part) params.keys.items[item + part] = {int32_t(block), part, parts, slot};
    items += int32_t(all_items), slots += int32_t(all_slots);
  }
  if (threadIdx.x == 0) *params.keys.item_count = items;
}

} // namespace

cudaError_t launch_key_schedule(const BackwardParams &params, cudaStream_t stream) {
  schedule_keys<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

} // namespace fdm::cuda
