// SPDX-License-Identifier: BSD-3-Clause
// Merges the parts of a forward pass whose columns were divided over several blocks (splits). The splits are summed in
// their order; those without a kept key are left out, and their results not read.
//
// Of many splits each lane of a warp knows one, and has two columns of a row. Of few each thread knows all, and has
// four columns.
#include "combine.h"

#include "../../indexing.h"
#include "../host/launch.cuh"
#include "../tile/block_scan.cuh"
#include "../tile/copy_rows.cuh"
#include "../tile/key_ring.cuh"
#include "../tile/products.cuh"
#include "../tile/sink.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kWarpColumns = 64;
// How many results a thread reads at a time.
constexpr int kReads = 16;
// So many splits are few.
constexpr int kFewSplits = 8;

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

struct CombineParams {
  fdm_problem p;
  fdm_forward_args a;
  int32_t splits;
  Partials partials;
};

struct Row {
  int64_t batch, head, query;
  Sequence s;

  __device__ Row(const fdm_problem &p, uint32_t number) {
    const auto queries = static_cast<uint32_t>(p.queries), heads = static_cast<uint32_t>(p.heads);
    const uint32_t all_heads = number / queries;
    query = number - all_heads * queries;
    batch = all_heads / heads;
    head = all_heads - batch * heads;
    s = sequence(p, batch);
  }
};

__device__ __forceinline__ void write_lse(const CombineParams &params, const Row &row, float largest, float total) {
  static_cast<float *>(params.a.lse.data)[lse_offset(params.a.lse, row.s, row.query, row.head)] =
      total == 0.0f ? -INFINITY : (largest + log2f(total)) / kLog2E;
}

// kLanes threads have a row. The row of an output is aligned.
template <class Element, int kLanes>
__global__ void __launch_bounds__(kThreads) combine_few_kernel(const __grid_constant__ CombineParams params) {
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = params.p;
  const int64_t rows = partial_rows(p);
  const uint32_t number = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, d = 4 * lane, head_dim = static_cast<int>(p.head_dim);
  if (number >= rows || d >= head_dim) return;
  const Row row(p, number);
  if (row.query >= row.s.q_count) return;
  float maximum[kFewSplits], sum[kFewSplits], largest = -INFINITY, total = 0.0f;
  float4 value[kFewSplits], merged{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < kFewSplits; ++n) {
    maximum[n] = n < params.splits ? params.partials.max[n * rows + number] : -INFINITY;
    sum[n] = n < params.splits ? params.partials.sum[n * rows + number] : 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kFewSplits; ++n) {
    value[n] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (sum[n] != 0.0f)
      value[n] = *reinterpret_cast<const float4 *>(params.partials.out + (n * rows + number) * head_dim + d);
    largest = fmaxf(largest, maximum[n]);
  }
  const float shift = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
  for (int n = 0; n < kFewSplits; ++n) {
    const float factor = exp2f(maximum[n] - shift);
    total += sum[n] * factor;
    merged.x += value[n].x * factor;
    merged.y += value[n].y * factor;
    merged.z += value[n].z * factor;
    merged.w += value[n].w * factor;
  }
  const float inverse = row_factor(sink_score(p, row.head), largest, total);
  *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(params.a.out.data) +
                             row_offset(params.a.out, row.s, row.query, row.head) + d) =
      make_uint2(ptx::pack<Element>(merged.x * inverse, merged.y * inverse),
                 ptx::pack<Element>(merged.z * inverse, merged.w * inverse));
  if (lane == 0) write_lse(params, row, largest, total);
}

__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineParams params) {
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = params.p;
  const int head_dim = static_cast<int>(p.head_dim), warps = row_warps(head_dim);
  const int warp = static_cast<int>(threadIdx.x) / 32, own_row = warp / warps;
  const int64_t rows = partial_rows(p);
  const uint32_t number = blockIdx.x * static_cast<uint32_t>(block_rows(head_dim)) + static_cast<uint32_t>(own_row);
  if (own_row >= block_rows(head_dim) || number >= rows) return;
  const Row row(p, number);
  if (row.query >= row.s.q_count) return;

  // Each lane has a split, the same in every warp.
  const int split = lane_id();
  float own_max = -INFINITY, own_sum = 0.0f;
  if (split < params.splits) {
    own_max = params.partials.max[split * rows + number];
    own_sum = params.partials.sum[split * rows + number];
  }
  const float largest = warp_max(own_max), shift = largest == -INFINITY ? 0.0f : largest;
  const float own_factor = exp2f(own_max - shift);
  const float total = warp_sum(own_sum * own_factor), inverse = row_factor(sink_score(p, row.head), largest, total);
  const uint32_t present = __ballot_sync(kAllLanes, own_sum != 0.0f);

  const fdm_tensor &out = params.a.out;
  const int64_t out_offset = row_offset(out, row.s, row.query, row.head);
  const bool even = head_dim % 2 == 0;
  const int own_warp = warp - own_row * warps;
  for (int first = own_warp * kWarpColumns; first < head_dim; first += warps * kWarpColumns) {
    const int d = first + 2 * lane_id();
    const float *const first_split = params.partials.out + number * p.head_dim + d;
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
  if (own_warp == 0 && lane_id() == 0) write_lse(params, row, largest, total);
}

template <class Element, int kLanes> cudaError_t launch_few(const CombineParams &params, cudaStream_t stream) {
  return launch<Overlap::kernel_ahead>(combine_few_kernel<Element, kLanes>,
                                       ceil_div(partial_rows(params.p), kThreads / kLanes), kThreads, 0, stream,
                                       params);
}
template <class Element> cudaError_t launch_few(const CombineParams &params, cudaStream_t stream) {
  if (params.p.head_dim <= 64) return launch_few<Element, 16>(params, stream);
  return params.p.head_dim <= 128 ? launch_few<Element, 32>(params, stream) : launch_few<Element, 64>(params, stream);
}

} // namespace

cudaError_t launch_combine(const fdm_problem &p, const fdm_forward_args &args, int32_t splits, const Partials &partials,
                           cudaStream_t stream) {
  const CombineParams params{p, args, splits, partials};
  if (splits <= kFewSplits && rows_are_aligned(args.out, p.head_dim))
    return args.out.dtype == FDM_FLOAT16 ? launch_few<__half>(params, stream)
                                         : launch_few<__nv_bfloat16>(params, stream);
  return launch<Overlap::kernel_ahead>(combine_kernel, ceil_div(partial_rows(p), block_rows(p.head_dim)), kThreads, 0,
                                       stream, params);
}

} // namespace fdm::cuda
