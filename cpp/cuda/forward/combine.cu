// SPDX-License-Identifier: BSD-3-Clause
// Merges the parts of a forward pass whose columns were divided over several blocks (splits): a block for each query of
// each head. The splits are summed in their order; those without a kept key are left out, and their results not read.
#include "forward.h"

#include "../../indexing.h"
#include "../host/launch.cuh"
#include "../ptx/dependent.cuh"
#include "../tile/block_scan.cuh"
#include "../tile/key_ring.cuh"
#include "../tile/products.cuh"
#include "../tile/sink.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 128;
// How many results a thread reads at a time.
constexpr int kReads = 16;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ ForwardParams params) {
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = params.p;
  const auto queries = static_cast<uint32_t>(p.queries), heads = static_cast<uint32_t>(p.heads);
  const int64_t rows = p.batch * p.heads * p.queries, row = blockIdx.x;
  const int64_t i = blockIdx.x % queries, head = blockIdx.x / queries % heads, b = blockIdx.x / queries / heads;
  const Sequence s = sequence(p, b);
  if (i >= s.q_count) return;

  const float sink = sink_score(p, head);

  // Each lane has a split, the same in every warp.
  const int split = lane_id();
  float own_max = -INFINITY, own_sum = 0.0f;
  if (split < params.splits) {
    own_max = params.partial_max[split * rows + row];
    own_sum = params.partial_sum[split * rows + row];
  }
  const float largest = warp_max(own_max), shift = largest == -INFINITY ? 0.0f : largest;
  const float own_factor = exp2f(own_max - shift);
  const float total = warp_sum(own_sum * own_factor), inverse = row_factor(sink, largest, total);
  const uint32_t present = __ballot_sync(kAllLanes, own_sum != 0.0f);

  const fdm_tensor &out = params.a.out;
  const int64_t out_offset = row_offset(out, s, i, head);
  const int head_dim = static_cast<int>(p.head_dim);
  for (int first = 0; first < head_dim; first += kThreads) {
    const int d = first + static_cast<int>(threadIdx.x);
    float sum = 0.0f;
    for (uint32_t left = present; left;) {
      float value[kReads], factor[kReads];
#pragma unroll
      for (int n = 0; n < kReads; ++n) {
        const int next = left ? __ffs(static_cast<int>(left)) - 1 : -1;
        factor[n] = __shfl_sync(kAllLanes, own_factor, next & 31);
        value[n] = 0.0f;
        if (next >= 0 && d < head_dim) value[n] = params.partial_out[(next * rows + row) * head_dim + d];
        left &= left - 1;
      }
#pragma unroll
      for (int n = 0; n < kReads; ++n) sum += value[n] * factor[n];
    }
    if (d < head_dim) store_element(out, out_offset + d * out.stride[3], sum * inverse);
  }
  if (threadIdx.x == 0)
    static_cast<float *>(params.a.lse.data)[lse_offset(params.a.lse, s, i, head)] =
        total == 0.0f ? -INFINITY : (largest + log2f(total)) / kLog2E;
}

} // namespace

cudaError_t launch_combine(const ForwardParams &params, cudaStream_t stream) {
  const int64_t rows = params.p.batch * params.p.heads * params.p.queries;
  return launch<Overlap::kernel_ahead>(combine_kernel, rows, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
