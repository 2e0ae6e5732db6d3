// SPDX-License-Identifier: BSD-3-Clause
// Merges the parts of a forward pass whose columns were divided over several blocks: a warp for each query of each head.
#include "forward.h"

#include "../../problem.h"
#include "key_ring.cuh"
#include "products.cuh"

namespace fdm::cuda {
namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(32 * kWarps) combine_kernel(const __grid_constant__ ForwardParams params) {
  const fdm_problem &p = params.p;
  const int64_t rows = p.batch * p.heads * p.queries;
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t i = row % p.queries, head = row / p.queries % p.heads, b = row / p.queries / p.heads;
  const Sequence s = sequence(p, b);
  if (i >= s.q_count) return;

  float largest = -INFINITY;
  for (int split = 0; split < params.splits; ++split) largest = fmaxf(largest, params.partial_max[split * rows + row]);
  const float shift = largest == -INFINITY ? 0.0f : largest;
  float total = 0.0f;
  for (int split = 0; split < params.splits; ++split)
    total += params.partial_sum[split * rows + row] * exp2f(params.partial_max[split * rows + row] - shift);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;

  const fdm_tensor &out = params.a.out;
  const int64_t to = row_offset(out, s, i, head);
  for (int d = threadIdx.x % 32; d < p.head_dim; d += 32) {
    float sum = 0.0f;
    for (int split = 0; split < params.splits; ++split) {
      const int64_t from = split * rows + row;
      sum += params.partial_out[from * p.head_dim + d] * exp2f(params.partial_max[from] - shift);
    }
    store_element(out, to + d * out.stride[3], sum * inverse);
  }
  if (threadIdx.x % 32 == 0)
    static_cast<float *>(params.a.lse.data)[lse_offset(params.a.lse, s, i, head)] =
        total == 0.0f ? -INFINITY : (largest + log2f(total)) / kLog2E;
}

} // namespace

cudaError_t launch_combine(const ForwardParams &params, cudaStream_t stream) {
  const int64_t rows = params.p.batch * params.p.heads * params.p.queries;
  combine_kernel<<<unsigned((rows + kWarps - 1) / kWarps), 32 * kWarps, 0, stream>>>(params);
  return cudaGetLastError();
}

} // namespace fdm::cuda
