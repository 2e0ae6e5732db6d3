// SPDX-License-Identifier: BSD-3-Clause
// Sums the parts of the blocks of keys that were divided, in the order of the parts, and writes dk, dv and the sums of
// the bias gradient.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../tile/products.cuh"
#include "key_blocks.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks of threads go through the items, and several have the keys of an item. Of many items few are divided; of few, most
// are, and more blocks of threads have work then: with 8 divisions in place of 32, a backward pass of 2 heads and 32,768
// tokens took 0.27 ms in place of 0.23 (seen on an H100, a mask of 1024 keys).
constexpr int kMostBlocks = 256, kManyItems = 1024;
constexpr int kDivisions = 16, kDivisionsOfFew = 32;

__device__ int32_t key_of_row(const BackwardParams &params, const KeyBlockPlace &place, int r) {
  if (params.keys.listed) return listed_key(params, place, r).key;
  const int64_t key = int64_t(place.block) * params.keys.block_keys + r;
  return key < place.s.k_count ? static_cast<int32_t>(key) : -1;
}

__device__ void add(float &sum, float x) { sum += x; }
__device__ void add(float4 &sum, const float4 &x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

// Sums the floats, or groups of neighbours, at an offset in the slots of an item's parts.
template <class Value> __device__ Value sum_of_parts(const KeyWork &keys, const KeyItem &item, int64_t offset) {
  const float *slot = keys.slots + int64_t(item.slot) * keys.slot_floats + offset;
  Value total{};
#pragma unroll 4
  for (int part = 0; part < item.parts; ++part)
    add(total, *reinterpret_cast<const Value *>(slot + part * keys.slot_floats));
  return total;
}

__device__ void sum_item(const BackwardParams &params, const KeyItem &item) {
  const KeyWork &keys = params.keys;
  const fdm_problem &p = params.p;
  const KeyBlockPlace place = key_block_place(params, item.block);
  const int head_dim = int(p.head_dim), rows = keys.block_keys / int(gridDim.y), first = int(blockIdx.y) * rows;
  // A thread sums four neighbours at a time; slot_dim is a multiple of 32.
  const int quads = keys.slot_dim / 4;
  for (int i = threadIdx.x; i < 2 * rows * quads; i += kThreads) {
    const int which = i / (rows * quads), r = first + i / quads % rows, d = i % quads * 4;
    const fdm_tensor &t = which ? params.a.dv : params.a.dk;
    const int32_t key = key_of_row(params, place, r);
    if (!present(t) || key < 0 || d >= head_dim) continue;
    const float4 total = sum_of_parts<float4>(keys, item, (int64_t(which) * keys.block_keys + r) * keys.slot_dim + d);
    const int64_t offset = place.s.batch * t.stride[0] + (place.s.k_begin + key) * t.stride[1] +
                           place.kv_head * t.stride[2] + d * t.stride[3];
    const float factor = which ? 1.0f : p.scale, sums[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (d + n < head_dim) store_element(t, offset + n * t.stride[3], factor * sums[n]);
  }
  if (!params.wants_bias_sums) return;
  for (int i = threadIdx.x; i < params.bias_heads * rows; i += kThreads) {
    const int r = first + i % rows, head_of_group = i / rows;
    const int32_t key = key_of_row(params, place, r);
    if (key < 0) continue;
    const int64_t offset = (int64_t(2) * keys.slot_dim + head_of_group) * keys.block_keys + r;
    store_bias_sum(params, place.s, place.kv_head, head_of_group, key, sum_of_parts<float>(keys, item, offset));
  }
}

__global__ void __launch_bounds__(kThreads) sum_parts(const __grid_constant__ BackwardParams params) {
  const KeyWork &keys = params.keys;
  ptx::wait_for_kernel_ahead();
  const int32_t past = keys.parts == 0 ? *keys.item_count : keys.max_items;
  for (int32_t number = int32_t(blockIdx.x); number < past; number += int32_t(gridDim.x)) {
    const KeyItem item = key_item(keys, number);
    if (item.parts > 1 && item.part == 0 && has_key_item(params, number)) sum_item(params, item);
  }
}

} // namespace

cudaError_t launch_key_sum(const BackwardParams &params, cudaStream_t stream) {
  const int32_t blocks = params.keys.max_items < kMostBlocks ? params.keys.max_items : kMostBlocks;
  const int divisions = params.keys.max_items < kManyItems ? kDivisionsOfFew : kDivisions;
  return launch<Overlap::kernel_ahead>(sum_parts, {blocks, divisions}, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
