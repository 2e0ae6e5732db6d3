// SPDX-License-Identifier: BSD-3-Clause
// Sums the parts of the blocks of keys that were divided, in the order of the parts, and writes dk, dv and the sums of
// the bias gradient.
#include <cuda_runtime.h>

#include "key_blocks.cuh"
#include "products.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDivisions = 8; // blocks of threads for the keys of an item

__device__ int32_t key_of_row(const BackwardParams &params, const KeyBlockPlace &place, int r) {
  if (params.keys.listed) {
    const int64_t at = ordered_position(params.keys, place.block) + r;
    return at < place.kept ? params.keys.ordered[place.list_base + at].key : -1;
  }
  const int64_t key = int64_t(place.block) * params.keys.block_keys + r;
  return key < place.s.k_count ? static_cast<int32_t>(key) : -1;
}

__global__ void __launch_bounds__(kThreads) sum_parts(const __grid_constant__ BackwardParams params) {
  const KeyWork &keys = params.keys;
  if (int(blockIdx.x) >= *keys.item_count) return;
  const KeyItem item = keys.items[blockIdx.x];
  if (item.parts == 1 || item.part != 0) return;
  const fdm_problem &p = params.p;
  const KeyBlockPlace place = key_block_place(params, item.block);
  const float *slots = keys.slots + int64_t(item.slot) * keys.slot_floats;
  const int head_dim = int(p.head_dim), rows = keys.block_keys / kDivisions, first = int(blockIdx.y) * rows;
  const auto sum = [&](int64_t at) {
    float total = 0.0f;
    for (int part = 0; part < item.parts; ++part) total += slots[part * keys.slot_floats + at];
    return total;
  };
  for (int which = 0; which < 2; ++which) {
    const fdm_tensor &t = which ? params.a.dv : params.a.dk;
    if (!present(t)) continue;
    const float factor = which ? 1.0f : p.scale;
    for (int i = threadIdx.x; i < rows * head_dim; i += kThreads) {
      const int r = first + i / head_dim, d = i % head_dim;
      const int32_t key = key_of_row(params, place, r);
      if (key < 0) continue;
      const int64_t to = place.s.batch * t.stride[0] + (place.s.k_begin + key) * t.stride[1] +
                         place.kv_head * t.stride[2] + d * t.stride[3];
      store_element(t, to, factor * sum((int64_t(which) * keys.block_keys + r) * keys.slot_dim + d));
    }
  }
  if (!params.wants_bias_sums) return;
  for (int i = threadIdx.x; i < params.bias_heads * rows; i += kThreads) {
    const int r = first + i % rows, head_of_group = i / rows;
    const int32_t key = key_of_row(params, place, r);
    if (key < 0) continue;
    const int64_t head = (place.s.batch * p.kv_heads + place.kv_head) * params.bias_heads + head_of_group;
    params.bias_sums[head * list_keys(p) + place.s.k_begin + key] =
        sum(int64_t(2) * keys.block_keys * keys.slot_dim + int64_t(head_of_group) * keys.block_keys + r);
  }
}

} // namespace

cudaError_t launch_key_sum(const BackwardParams &params, cudaStream_t stream) {
  sum_parts<<<dim3(unsigned(params.keys.max_items), kDivisions), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

} // namespace fdm::cuda
