// SPDX-License-Identifier: BSD-3-Clause
// The gradient of the sinks: sums the shares of the rows, a block of threads for each head, in a fixed order.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../tile/products.cuh"
#include "ptx/dependent.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) sink_reduce(const __grid_constant__ BackwardParams params) {
  __shared__ float partial[kThreads];
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = params.p;
  const int64_t rows = (is_varlen(p) ? 1 : p.batch) * total_rows(p);
  const float *shares = params.sink_shares + blockIdx.x * rows;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) sum += shares[i];
  partial[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) store_element(params.a.dsink, blockIdx.x * params.a.dsink.stride[0], partial[0]);
}

} // namespace

cudaError_t launch_sink_reduce(const BackwardParams &params, cudaStream_t stream) {
  return launch<Overlap::kernel_ahead>(sink_reduce, params.p.heads, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
