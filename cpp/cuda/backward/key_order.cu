// SPDX-License-Identifier: BSD-3-Clause
// Orders the kept keys of interval plans so that the keys of a block are kept by similar rows.
//
// The kept keys of a list, which come in key order, are divided into buckets; within a bucket those that are kept the
// longest come first, ties by position, and every kChunkKeys of them are put back into key order. With causal selection
// the keys of a chunk end within a few rows of each other, and those of a block of a chunk also start so: 75 to 80 % of
// the pairs of 64 keys and the rows that keep any of them are kept (simulated for random biases, N 8192 to 32768).
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../plan/list_work.cuh"
#include "../ptx/dependent.cuh"
#include "key_blocks.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = kBucketKeys / 2; // one for each comparison of a pass
constexpr int kChunkKeys = 256;
constexpr int kMaxBlocks = kBucketKeys / 32;

// Sorts every kRun values in shared memory in ascending order.
template <int kRun> __device__ void bitonic_sort(uint64_t (&values)[kBucketKeys]) {
  for (int size = 2; size <= kRun; size *= 2)
    for (int distance = size / 2; distance > 0; distance /= 2) {
      __syncthreads();
      const int low = 2 * int(threadIdx.x) - int(threadIdx.x) % distance, high = low + distance;
      const bool ascending = size == kRun || (low & size) == 0;
      const uint64_t a = values[low], b = values[high];
      if ((a > b) == ascending) {
        values[low] = b;
        values[high] = a;
      }
    }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) order_keys(const __grid_constant__ BackwardParams params) {
  __shared__ uint64_t order[kBucketKeys];
  __shared__ int32_t first[kMaxBlocks], past[kMaxBlocks];
  ptx::start_dependents();
  const fdm_problem &p = params.p;
  const KeyWork &keys = params.keys;
  const Plan &plan = params.plan;
  const int64_t bucket = blockIdx.x % keys.buckets, list_sequence = blockIdx.x / keys.buckets;
  const int64_t sequences = list_sequences(p), list = list_sequence / sequences;
  const int64_t base = list * plan.list_keys + sequence(p, list_sequence % sequences).k_begin + bucket * kBucketKeys;
  const int64_t count = min64(kBucketKeys, plan.kept_count[list_sequence] - bucket * kBucketKeys);

  if (int(threadIdx.x) < kMaxBlocks) {
    first[threadIdx.x] = INT32_MAX;
    past[threadIdx.x] = -1;
  }
  if (count > 0) {
    for (int i = threadIdx.x; i < kBucketKeys; i += kThreads) {
      const uint32_t rank = i < count ? uint32_t(INT32_MAX - plan.kept_end[base + i]) : ~0u;
      order[i] = uint64_t(rank) * kBucketKeys + i;
    }
    bitonic_sort<kBucketKeys>(order);
    // Chunks are sorted by position alone. The entries past the last key have the largest positions.
    for (int i = threadIdx.x; i < kBucketKeys; i += kThreads) order[i] %= kBucketKeys;
    bitonic_sort<kChunkKeys>(order);
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int64_t kept = base + int64_t(order[i]);
      const KeyRows rows{plan.kept_index[kept], plan.kept_start[kept], plan.kept_end[kept]};
      keys.ordered[base + i] = rows;
      const int block = i / keys.block_keys;
      atomicMin(&first[block], rows.start);
      atomicMax(&past[block], rows.end);
    }
  }
  __syncthreads();
  const int blocks = kBucketKeys / keys.block_keys;
  if (int(threadIdx.x) < blocks)
    keys.ranges[list_sequence * keys.blocks + threadIdx.x * keys.buckets + bucket] = {
        past[threadIdx.x] < 0 ? 0 : first[threadIdx.x], past[threadIdx.x]};
}

} // namespace

cudaError_t launch_key_order(const BackwardParams &params, cudaStream_t stream) {
  const fdm_tensor &mask = list_tensor(params.p);
  const int64_t blocks = mask.shape[0] * mask.shape[1] * list_sequences(params.p) * params.keys.buckets;
  return launch(order_keys, blocks, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
