// SPDX-License-Identifier: BSD-3-Clause
// Sums the parts of divided key blocks, and writes dk, dv and the sums of the bias gradient.
#include <cuda_runtime.h>

#include "../tile/sum_parts.cuh"
#include "key_blocks.cuh"

namespace fdm::cuda {
namespace {

// A stored part has dk and dv, [keys of a block][sum_dim] each, then the bias sums, [head of the bias][keys of a
// block]. A value is four neighbours of these.
struct DividedBlocks {
  using Params = BackwardParams;
  using Value = float4;

  const BackwardParams &params;
  const KeyWork &keys;
  int64_t count;
  PartSums parts;
  KeyBlockPlace place;

  __device__ explicit DividedBlocks(const BackwardParams &params_)
      : params(params_), keys(params.keys), count(keys.parts == 0 ? *keys.item_count : keys.max_items) {}

  __device__ bool find(int64_t number) {
    const KeyItem item = key_item(keys, int32_t(number));
    if (item.parts <= 1 || item.part != 0 || !has_key_item(params, number)) return false;
    place = key_block_place(params, item.block);
    const float *first = keys.part_sums + int64_t(item.stored_part) * keys.part_floats;
    parts = {first, first + keys.part_floats, keys.part_floats, item.parts};
    return true;
  }

  __device__ int quads() const { return keys.sum_dim / 4; }
  __device__ int row_quads() const { return 2 * keys.block_keys * quads(); } // of dk and dv
  __device__ int values() const {
    return row_quads() + (params.wants_bias_sums ? params.bias_heads * keys.block_keys / 4 : 0);
  }
  __device__ const fdm_tensor &gradient(int i) const {
    return i < keys.block_keys * quads() ? params.a.dk : params.a.dv;
  }
  __device__ int32_t key_of_row(int r) const {
    if (keys.takes_planned_keys) return listed_key(params, place, r).key;
    const int64_t key = int64_t(place.block) * keys.block_keys + r;
    return key < place.s.k_count ? static_cast<int32_t>(key) : -1;
  }

  __device__ int index(int i) const {
    if (i >= row_quads()) return i;
    const bool wanted = present(gradient(i)) && i % quads() * 4 < gradient(i).shape[3];
    return wanted && key_of_row(i / quads() % keys.block_keys) >= 0 ? i : -1;
  }
  __device__ void store(int i, const float4 &sum) const {
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    if (i >= row_quads()) {
      const int first = (i - row_quads()) * 4, head = first / keys.block_keys;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int32_t key = key_of_row(first % keys.block_keys + n);
        if (key >= 0) store_bias_sum(params, place.s, place.kv_head, head, key, sums[n]);
      }
      return;
    }
    const fdm_tensor &t = gradient(i);
    const int d = i % quads() * 4, columns = int(t.shape[3]);
    const int64_t offset = place.s.batch * t.stride[0] +
                           (place.s.k_begin + key_of_row(i / quads() % keys.block_keys)) * t.stride[1] +
                           place.kv_head * t.stride[2] + d * t.stride[3];
    const float factor = i < keys.block_keys * quads() ? params.p.scale : 1.0f;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (d + n < columns) store_element(t, offset + n * t.stride[3], factor * sums[n]);
  }
};

} // namespace

cudaError_t launch_key_sum(const BackwardLaunch &work, cudaStream_t stream) {
  const PartSumGrid &grid = work.route.key_sum;
  return launch<Overlap::kernel_ahead>(sum_parts<DividedBlocks>, {grid.columns, grid.divisions}, kPartsThreads, 0,
                                       stream, work.params);
}

} // namespace fdm::cuda
