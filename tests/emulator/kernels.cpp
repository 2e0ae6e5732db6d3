// SPDX-License-Identifier: BSD-3-Clause
// Kernels with and without defects, which the emulator must tell apart. Prints one line for each kernel;
// tests/test_emulator.py reads them.
#include <cuda_runtime.h>

#include <cstdio>
#include <thread>

#include "cuda/host/row_map.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/wgmma.cuh"

namespace fdm::cuda {

constexpr int kThreads = 128;

// Groups of four lanes synchronize at different times, then all lanes of a warp.
void meetings(int *out) {
  const uint32_t quad = 0xfu << (threadIdx.x % 32 & ~3u);
  int sum = int(threadIdx.x);
  if (threadIdx.x % 8 < 4) sum += __shfl_xor_sync(quad, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 16);
  __shared__ int all[kThreads];
  all[threadIdx.x] = sum;
  __syncthreads();
  out[threadIdx.x] = all[kThreads - 1 - threadIdx.x] + __syncthreads_or(threadIdx.x == 77);
}

// Each thread copies 16 bytes to shared memory and reads those of another thread. Without the wait, the output tells
// whether some copies are complete and others are not.
template <bool kWaits> void copies(const int *in, int *out) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto *words = reinterpret_cast<int *>(dynamic_shared);
  ptx::cp_async_16(ptx::shared_address(words + 4 * threadIdx.x), in + 4 * threadIdx.x, true);
  ptx::cp_async_fence();
  if (kWaits) ptx::cp_async_wait<0>();
  __syncthreads();
  const int copied = words[4 * (threadIdx.x ^ 1)];
  const bool is_there = copied >= 0 && copied < 4 * kThreads;
  out[threadIdx.x] = kWaits ? copied : __syncthreads_or(is_there) && __syncthreads_or(!is_there);
}

// All warps of a block call __syncthreads_or in one place, or each role in its own.
template <bool kTogether> void asks(int *out) {
  const bool first = threadIdx.x < kThreads / 2;
  if (kTogether)
    out[threadIdx.x] = __syncthreads_or(first);
  else if (first)
    out[threadIdx.x] = __syncthreads_or(true);
  else
    out[threadIdx.x] = __syncthreads_or(false);
}

// 64 threads arrive at a barrier in shared memory that may expect more.
template <int kArrivals> void barriers(int *out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) ptx::init_barrier(barrier, kArrivals);
  __syncthreads();
  if (threadIdx.x < 64)
    ptx::arrive(barrier);
  else
    ptx::wait(barrier, 0);
  out[threadIdx.x] = 1;
}

// Some threads signal a read too early: others overwrite the number before the read.
void releases_early(int *out) {
  __shared__ uint64_t barrier;
  __shared__ int number;
  if (threadIdx.x == 0) {
    ptx::init_barrier(barrier, 64);
    number = 1;
  }
  __syncthreads();
  if (threadIdx.x < 64) {
    ptx::arrive(barrier);
    if (number == 2) out[0] = 1;
  } else {
    ptx::wait(barrier, 0);
    number = 2;
  }
}

void writes_beyond(int *) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  if (threadIdx.x == 5) dynamic_shared[2048] = 1;
}

// A wgmma product of ones: 64 x 16 by 16 x 32.
template <bool kWaits> void products(float *out) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  for (int n = int(threadIdx.x); n < 1024; n += kThreads) reinterpret_cast<uint16_t *>(dynamic_shared)[n] = 0x3f80;
  __syncthreads();
  float sums[4][4] = {};
  const uint32_t ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
  ptx::warpgroup_arrive();
  const uint64_t right = ptx::unswizzled_matrix_descriptor(ptx::shared_address(dynamic_shared), 128, 256);
  ptx::wgmma_rs<__nv_bfloat16, ptx::Major::k>(sums, ones, right, true);
  ptx::warpgroup_commit_batch();
  if (kWaits) ptx::warpgroup_wait<0>();
  out[threadIdx.x] = sums[3][2];
}

// The last block of a cluster sums the values of all its blocks.
void of_all_blocks(float *out) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto *own = reinterpret_cast<float *>(dynamic_shared) + threadIdx.x;
  *own = float(1000 * blockIdx.y + threadIdx.x);
  ptx::sync_cluster();
  float sum = 0;
  for (uint32_t rank = 0; rank < gridDim.y; ++rank) sum += ptx::load_remote(own, rank);
  if (blockIdx.y + 1 == gridDim.y) out[threadIdx.x] = sum;
  ptx::sync_cluster();
}

// Two blocks send numbers to each other in two phases; each waits for all bytes of the other.
void exchange_of_blocks(float *out) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &received = *reinterpret_cast<uint64_t *>(dynamic_shared);
  auto &ready = *reinterpret_cast<uint64_t *>(dynamic_shared + 8);
  auto *own = reinterpret_cast<float *>(dynamic_shared + 1024);
  const uint32_t other = 1 - blockIdx.y;
  if (threadIdx.x == 0) {
    ptx::init_barrier(received, 1);
    ptx::init_barrier(ready, 2);
  }
  ptx::sync_cluster();
  float sum = 0;
  for (uint32_t phase = 0; phase < 2; ++phase) {
    if (threadIdx.x == 0) ptx::expect_from_cluster(received, 16 * 32);
    __syncthreads();
    if (threadIdx.x < 2) ptx::arrive_remote(ready, other);
    ptx::wait_for_cluster(ready, phase);
    __syncthreads(); // otherwise the other block may end the next phase while a thread waits for this one
    const auto x = float(100 * blockIdx.y + threadIdx.x + 1000 * phase);
    if (threadIdx.x < 32) ptx::RemoteBuffer(own + 4 * threadIdx.x, received, other).store(0, make_float4(x, x, x, x));
    ptx::wait_for_cluster(received, phase);
    sum += own[threadIdx.x];
  }
  if (blockIdx.y == 1) out[threadIdx.x] = sum;
  ptx::leave_cluster();
}

template <class T, class... Parameters, class... Inputs>
void run_grid(const char *name, void (*kernel)(Parameters...), dim3 grid, unsigned cluster, T first,
              const Inputs &...inputs) {
  T out[kThreads] = {first};
  cudaLaunchAttribute blocks{};
  blocks.id = cudaLaunchAttributeClusterDimension;
  blocks.val.clusterDim = {1, cluster, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = 2048;
  config.attrs = &blocks;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, inputs..., static_cast<T *>(out));
  std::printf("%s: %g %g %s\n", name, double(out[0]), double(out[100]), error ? cudaGetErrorString(error) : "done");
}

template <class T, class... Parameters, class... Inputs>
void run(const char *name, void (*kernel)(Parameters...), T first, const Inputs &...inputs) {
  run_grid(name, kernel, {1, 1}, 1, first, inputs...);
}

// Checks that a thread gets TMA boxes in its first call, and none for rows that are not aligned.
void boxes_of_new_thread(void *rows) {
  std::thread([rows] {
    CUtensorMap map;
    fdm_tensor t{rows, {1, 4, 1, 64}, {256, 64, 64, 1}, FDM_BFLOAT16, 0};
    const bool whole = make_row_map(t, 64, 4, &map);
    t.stride[1] = 63;
    std::printf("boxes of a new thread: %d %d done\n", whole, make_row_map(t, 64, 4, &map));
  }).join();
}

} // namespace fdm::cuda

int main() {
  using namespace fdm::cuda;
  alignas(16) int in[4 * kThreads];
  for (int n = 0; n < 4 * kThreads; ++n) in[n] = n;
  const int *from = in;
  boxes_of_new_thread(in);
  run("meetings", meetings, 0);
  run("copies", copies<true>, 0, from);
  run("copies too early", copies<false>, 0, from);
  run("asks", asks<true>, 0);
  run("asks in two places", asks<false>, 0);
  run("barriers", barriers<64>, 0);
  run("barriers for ever", barriers<65>, 0);
  run_grid("releases early", releases_early, {16, 1}, 1, 0);
  run("beyond", writes_beyond, 0);
  run_grid("clusters", of_all_blocks, {1, 4}, 4, 0.0f);
  run_grid("exchange", exchange_of_blocks, {1, 2}, 2, 0.0f);
  run("no cluster", of_all_blocks, 0.0f);
  run("products", products<true>, 0.0f);
  run("products too early", products<false>, 0.0f);
}
