// SPDX-License-Identifier: BSD-3-Clause
// Merges the parts of a forward pass whose columns were divided over several blocks (splits): warps for each query of each
// head, with two columns a thread. The splits are summed in their order; those without a kept key are left out, and their
// results not read.
#include "forward.h"

#include "../../indexing.h"
#include "../host/launch.cuh"
#include "../tile/block_scan.cuh"
#include "../tile/key_ring.cuh"
#include "../tile/products.cuh"
#include "../tile/sink.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kWarpColumns = 64;
// How many results a thread reads at a time.
constexpr int kReads = 16;

// Warps of a row, and rows of a block.
__host__ __device__ __forceinline__ int row_warps(int64_t head_dim) {
  const int wanted = (int(head_dim) + kWarpColumns - 1) / kWarpColumns;
  return wanted < kWarps ? wanted : kWarps;
}
__host__ __device__ __forceinline__ int block_rows(int64_t head_dim) { return kWarps / row_warps(head_dim); }

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
  const int head_dim = static_cast<int>(p.head_dim), warps = row_warps(head_dim);
  const int warp = static_cast<int>(threadIdx.x) / 32, own_row = warp / warps;
  const int64_t rows = p.batch * p.heads * p.queries;
  const uint32_t row = blockIdx.x * static_cast<uint32_t>(block_rows(head_dim)) + static_cast<uint32_t>(own_row);
  if (own_row >= block_rows(head_dim) || row >= rows) return;
  const int64_t i = row % queries, head = row / queries % heads, b = row / queries / heads;
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
  const bool even = head_dim % 2 == 0;
  const int own_warp = warp - own_row * warps;
  for (int first = own_warp * kWarpColumns; first < head_dim; first += warps * kWarpColumns) {
    const int d = first + 2 * lane_id();
    const float *const first_split = params.partial_out + row * p.head_dim + d;
    float sum[2] = {};
    for (uint32_t left = present; left;) {
      float2 value[kReads];
      uint32_t unread = left;
#pragma unroll
      for (int n = 0; n < kReads; ++n, unread &= unread - 1) {
        const int next = __ffs(static_cast<int>(unread)) - 1;
        value[n] = {};
        const float *const own = first_split + next * rows * head_dim;
        if (next >= 0 && d < head_dim && even) {
          value[n] = *reinterpret_cast<const float2 *>(own);
        } else if (next >= 0 && d < head_dim) {
          value[n].x = own[0];
          if (d + 1 < head_dim) value[n].y = own[1];
        }
      }
#pragma unroll
      for (int n = 0; n < kReads; ++n, left &= left - 1) {
        const float factor = __shfl_sync(kAllLanes, own_factor, __ffs(static_cast<int>(left)) - 1 & 31);
        sum[0] += value[n].x * factor;
        sum[1] += value[n].y * factor;
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (d + k < head_dim) store_element(out, out_offset + (d + k) * out.stride[3], sum[k] * inverse);
  }
  if (own_warp == 0 && lane_id() == 0)
    static_cast<float *>(params.a.lse.data)[lse_offset(params.a.lse, s, i, head)] =
        total == 0.0f ? -INFINITY : (largest + log2f(total)) / kLog2E;
}

} // namespace

cudaError_t launch_combine(const ForwardParams &params, cudaStream_t stream) {
  const int64_t rows = params.p.batch * params.p.heads * params.p.queries;
  return launch<Overlap::kernel_ahead>(combine_kernel, ceil_div(rows, block_rows(params.p.head_dim)), kThreads, 0,
                                       stream, params);
}

} // namespace fdm::cuda
