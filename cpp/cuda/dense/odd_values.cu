// SPDX-License-Identifier: BSD-3-Clause
// Finds what is odd in Q, K and V, whose rows are aligned: a row of this grid for each, 16 bytes for a thread.
#include "../host/launch.cuh"
#include "odd_values.cuh"
#include "sources.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256, kSteps = 8;

template <class Element>
__global__ void __launch_bounds__(kThreads) odd_values_kernel(const __grid_constant__ DenseBackward work) {
  const fdm_problem &p = work.call.p;
  const fdm_tensor &t = blockIdx.y == 0 ? p.q : blockIdx.y == 1 ? p.k : p.v;
  const int64_t across = p.head_dim / 8, count = t.shape[0] * t.shape[1] * t.shape[2] * across;
  bool odd = false;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t number = (int64_t(blockIdx.x) * kSteps + step) * kThreads + threadIdx.x;
    if (number >= count) break;
    const int64_t row = quotient(number, across), chunk = number - row * across;
    const int64_t rest = quotient(row, t.shape[2]), head = row - rest * t.shape[2];
    const int64_t batch = quotient(rest, t.shape[1]), i = rest - batch * t.shape[1];
    const auto *first =
        static_cast<const uint16_t *>(t.data) + batch * t.stride[0] + i * t.stride[1] + head * t.stride[2] + chunk * 8;
    odd |= has_odd_value<Element>(*reinterpret_cast<const uint4 *>(first));
  }
  if (odd) *work.odd = 1;
}

} // namespace

cudaError_t launch_odd_values(const DenseBackward &work, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const auto kernel = p.q.dtype == FDM_FLOAT16 ? odd_values_kernel<__half> : odd_values_kernel<__nv_bfloat16>;
  const int64_t rows = max64(p.queries * p.heads, p.keys * p.kv_heads), chunks = p.batch * rows * (p.head_dim / 8);
  return launch(kernel, Grid(ceil_div(chunks, kThreads * kSteps), 3), kThreads, 0, stream, work);
}

} // namespace fdm::cuda
