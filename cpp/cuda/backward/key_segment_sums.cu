// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of keys that several segments of rows keep to dk, dv and the sums of the bias gradient: a warp
// for each key of a head.
#include <cuda_runtime.h>

#include <algorithm>

#include "../host/launch.cuh"
#include "../tile/products.cuh"
#include "key_blocks.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

// Writes two neighbours of a row.
template <class Element>
__device__ void write_pair(Element *row, int64_t stride, int column, int head_dim, float low, float high) {
  const uint32_t both = ptx::pack<Element>(low, high);
  if (stride == 1 && column + 1 < head_dim && reinterpret_cast<uintptr_t>(row) % 4 == 0) {
    *reinterpret_cast<uint32_t *>(row + column) = both;
    return;
  }
  auto *elements = reinterpret_cast<uint16_t *>(row);
  if (column < head_dim) elements[column * stride] = uint16_t(both);
  if (column + 1 < head_dim) elements[(column + 1) * stride] = uint16_t(both >> 16);
}

// A warp rounds the sums of a key.
template <class Element>
__device__ void round_key(const BackwardParams &params, const Sequence &s, int64_t list, int64_t kv_head, int32_t sum) {
  const fdm_problem &p = params.p;
  const KeyWork &keys = params.keys;
  const int64_t head = s.batch * p.kv_heads + kv_head;
  const int32_t key = keys.segments.sum_keys[list * keys.segments.most_sums + sum];
  const float *sums = key_segment_sums(keys, head, sum);
  const int lane = threadIdx.x % 32, head_dim = int(p.head_dim);
  for (int n = lane; n < 2 * keys.slot_dim / 4; n += 32) {
    const bool value = n >= keys.slot_dim / 4;
    const fdm_tensor &t = value ? params.a.dv : params.a.dk;
    if (!present(t)) continue;
    const float4 x = reinterpret_cast<const float4 *>(sums)[n];
    const float factor = value ? 1.0f : p.scale;
    const int quad = n % (keys.slot_dim / 4), column = quad / 4 * 16 + quad % 4 * 2;
    auto *row = static_cast<Element *>(t.data) + s.batch * t.stride[0] + (s.k_begin + key) * t.stride[1] +
                kv_head * t.stride[2];
    write_pair(row, t.stride[3], column, head_dim, factor * x.x, factor * x.y);
    write_pair(row, t.stride[3], column + 8, head_dim, factor * x.z, factor * x.w);
  }
  if (lane == 0 && params.wants_bias_sums)
    store_bias_sum(params, s, kv_head, 0, key, *bias_segment_sum(keys, head, sum));
}

template <class Element>
__global__ void __launch_bounds__(kThreads) round_key_sums(const __grid_constant__ BackwardParams params) {
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = params.p;
  const KeyWork &keys = params.keys;
  const auto heads = static_cast<uint32_t>(p.batch * p.kv_heads);
  const uint32_t blocks_of_head = gridDim.x / heads;
  const int64_t head = blockIdx.x / blocks_of_head, batch = head / p.kv_heads, kv_head = head % p.kv_heads;
  const Sequence s = sequence(p, batch);
  const int64_t list = list_number(p, params.plan, s, kv_head * group_size(p));
  const ListSegments segments(params, s, batch, list);
  if (segments.count == 0 || segments.overflow(keys)) return;
  const int32_t count = keys.segments.sum_count[list_sequence(p, list, batch)];
  const auto first = int32_t(blockIdx.x % blocks_of_head * (kThreads / 32) + threadIdx.x / 32);
  for (int32_t sum = first; sum < count; sum += blocks_of_head * (kThreads / 32))
    round_key<Element>(params, s, list, kv_head, segments.first_sum + sum);
}
} // namespace

cudaError_t launch_key_segment_sums(const BackwardParams &params, cudaStream_t stream) {
  const KeySegments &segments = params.keys.segments;
  const auto kernel = params.p.q.dtype == FDM_FLOAT16 ? round_key_sums<__half> : round_key_sums<__nv_bfloat16>;
  // How many keys there are is known on the device only.
  constexpr int64_t kBlocks = 2048;
  const int64_t heads = params.p.batch * params.p.kv_heads;
  const int64_t most = ceil_div(segments.most_sums, kThreads / 32), wanted = ceil_div(kBlocks, heads);
  return launch<Overlap::kernel_ahead>(kernel, std::min(most, wanted) * heads, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
