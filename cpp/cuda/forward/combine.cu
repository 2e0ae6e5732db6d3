// SPDX-License-Identifier: BSD-3-Clause
// Split-KV: merges the results of thread blocks that share a row's columns (splits), in the order of the splits.
// Splits without a kept key are skipped, and their results are not read.
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

constexpr int kThreads = kCombineThreads;

struct CombineParams {
  fdm_problem p;
  fdm_forward_args a;
  int32_t splits;
  bool aligned; // rows_are_aligned() of out
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

// Loads four columns of a partial result; `left` of them exist.
__device__ __forceinline__ float4 load_columns(const float *row, int left, bool whole) {
  if (whole) return *reinterpret_cast<const float4 *>(row);
  float4 x{row[0], 0.0f, 0.0f, 0.0f};
  if (left > 1) x.y = row[1];
  if (left > 2) x.z = row[2];
  if (left > 3) x.w = row[3];
  return x;
}

// kLanes threads share a row, four columns each. Each lane of a warp holds the facts of kOwn splits of its row.
template <int kLanes, int kMaxSplits>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineParams params) {
  constexpr int kWidth = kLanes < 32 ? kLanes : 32, kReadsAtOnce = kMaxSplits < 16 ? kMaxSplits : 16;
  constexpr int kOwn = (kMaxSplits + kWidth - 1) / kWidth;
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = params.p;
  const int64_t rows = partial_rows(p);
  const uint32_t number = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const Row row(p, number < rows ? number : 0);
  const bool exists = number < rows && row.query < row.s.q_count;

  const int first_lane = lane_id() / kWidth * kWidth; // of the row
  float own_factor[kOwn], own_sum[kOwn], largest = -INFINITY, total = 0.0f;
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int split = n * kWidth + lane_id() - first_lane;
    const bool read = exists && split < params.splits;
    own_factor[n] = read ? params.partials.max[split * rows + number] : -INFINITY;
    own_sum[n] = read ? params.partials.sum[split * rows + number] : 0.0f;
    largest = fmaxf(largest, own_factor[n]);
  }
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  const float shift = largest == -INFINITY ? 0.0f : largest;
  uint32_t left = 0; // splits with a kept key
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    own_factor[n] = exp2f(own_factor[n] - shift);
    total += own_sum[n] * own_factor[n];
    const uint32_t found = __ballot_sync(kAllLanes, own_sum[n] != 0.0f) >> first_lane;
    left |= (kWidth < 32 ? found & ((1u << kWidth % 32) - 1) : found) << n * kWidth;
  }
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) total += __shfl_xor_sync(kAllLanes, total, distance);

  const int head_dim = static_cast<int>(p.head_dim), d = 4 * (static_cast<int>(threadIdx.x) % kLanes);
  const bool whole = head_dim % 4 == 0;
  const float *const first_split = params.partials.out + int64_t(number) * head_dim + d;
  float merged[4] = {};
  do {
    float4 value[kReadsAtOnce];
    uint32_t unread = left;
#pragma unroll
    for (int n = 0; n < kReadsAtOnce; ++n, unread &= unread - 1) {
      const int next = __ffs(static_cast<int>(unread)) - 1;
      value[n] = {};
      if (next >= 0 && d < head_dim) value[n] = load_columns(first_split + next * rows * head_dim, head_dim - d, whole);
    }
#pragma unroll
    for (int n = 0; n < kReadsAtOnce; ++n, left &= left - 1) {
      const int next = __ffs(static_cast<int>(left)) - 1 & 31, lane = first_lane + next % kWidth;
      float factor = __shfl_sync(kAllLanes, own_factor[0], lane);
      if (kOwn > 1) {
        const float high = __shfl_sync(kAllLanes, own_factor[kOwn - 1], lane);
        if (next >= kWidth) factor = high;
      }
      merged[0] += value[n].x * factor;
      merged[1] += value[n].y * factor;
      merged[2] += value[n].z * factor;
      merged[3] += value[n].w * factor;
    }
  } while (kMaxSplits > kReadsAtOnce && __any_sync(kAllLanes, left != 0));
  if (!exists || d >= head_dim) return;
  const ScoreView bias = bias_view(p, row.s, row.batch, row.head, row.query / kTileRows);
  const float inverse = row_normalizer(sink_score(p, row.head, bias), largest, total);
  const fdm_tensor &out = params.a.out;
  const int64_t offset = row_offset(out, row.s, row.query, row.head) + d * out.stride[3];
  if (params.aligned) {
    const auto packed = [&](const auto &pack) {
      return make_uint2(pack(merged[0] * inverse, merged[1] * inverse), pack(merged[2] * inverse, merged[3] * inverse));
    };
    const bool is_half = out.dtype == FDM_FLOAT16;
    *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(out.data) + offset) = packed(AnyPacking{is_half});
    if (present(params.a.out_rest)) {
      const uint2 rests = packed([&](float low, float high) {
        return is_half ? pack_rests<__half>(low, high) : pack_rests<__nv_bfloat16>(low, high);
      });
      *reinterpret_cast<uint32_t *>(static_cast<uint8_t *>(params.a.out_rest.data) + offset) =
          join_rests(rests.x, rests.y);
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (d + k < head_dim) store_out(params.a, offset + k * out.stride[3], merged[k] * inverse);
  }
  if (d == 0)
    static_cast<float *>(params.a.lse.data)[head_major_offset(params.a.lse, row.s, row.query, row.head)] =
        total == 0.0f ? -INFINITY : (largest + log2f(total)) / kLog2E;
}

template <int kLanes>
cudaError_t launch_lanes(const CombineParams &params, const CombineWork &work, cudaStream_t stream) {
  constexpr int kFew = int(kRouteTable.few_splits), kAll = int(kRouteTable.max_splits);
  const auto kernel = work.max_splits == kFew ? combine_kernel<kLanes, kFew> : combine_kernel<kLanes, kAll>;
  return launch<Overlap::kernel_ahead>(kernel, work.blocks, kThreads, 0, stream, params);
}

} // namespace

cudaError_t launch_combine(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                           const Partials &partials, cudaStream_t stream) {
  const CombineWork &work = route.combine;
  const CombineParams params{p, args, route.splits, work.aligned, partials};
  if (work.lanes == 16) return launch_lanes<16>(params, work, stream);
  return work.lanes == 32 ? launch_lanes<32>(params, work, stream) : launch_lanes<64>(params, work, stream);
}

} // namespace fdm::cuda
