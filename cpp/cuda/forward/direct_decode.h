// SPDX-License-Identifier: BSD-3-Clause
// The parameters of the kernel for one query and few keys. The host precomputes 32-bit numbers, since a thread block
// does little more than find its tensors.
#pragma once

#include <cuda_runtime_api.h>

#include "../tile/score.cuh"
#include "combine.h"
#include "decode.h"

namespace fdm::cuda {

// The most thread blocks of a cluster. Not every GPU supports more than 8, and a kernel must request more (CUDA
// programming guide, thread block clusters).
constexpr int kDirectSplits = int(kRouteTable.direct_splits);

struct DirectDecodePlace;

// Strides of a (B, rows, heads, D) tensor, in elements.
struct DirectStrides {
  int32_t batch, row, head;
  __device__ int64_t offset(const DirectDecodePlace &place, int32_t row_index, int32_t head_index) const;
};
// Strides of a mask or bias, in elements. At least one of `block` and `kv_head` is 0.
struct DirectKeyStrides {
  int32_t batch, block, kv_head, key;
  __device__ int64_t offset(const DirectDecodePlace &place) const;
};

struct DirectDecodeParams {
  const uint16_t *q, *k, *v;
  uint16_t *out;
  uint8_t *out_rest; // with the strides of out; null: not requested
  float *lse;
  const uint8_t *mask; // null: absent
  const void *bias;    // null: absent
  ScoreView sink;
  DirectStrides q_strides, k_strides, v_strides, out_strides, lse_strides;
  DirectKeyStrides mask_strides, bias_strides;
  int32_t bias_dtype;
  int64_t sequences;
  int32_t heads, group;              // query heads, and those of a KV head
  int32_t heads_per_block;           // the last thread block of a group may have fewer
  int32_t blocks, blocks_of_kv_head; // of a sequence, and of one of its KV heads, without splits
  int32_t keys, head_dim, splits, warps;
  int32_t parts;     // clusters that share the work of a block; combine.cu merges their results
  Partials partials; // parts > 1
  ScoreFactors factors;
  bool has_softcap;
  bool packed; // varlen, by cu_seqlens
  fdm_tensor cu_seqlens_q, cu_seqlens_k;
  PackedCapacity room;
};

// The part of the problem that a thread block computes.
struct DirectDecodePlace {
  int32_t batch, block, head, kv_head, rows; // block: index in its sequence; head: the first of `rows` heads
  int32_t first_query, first_key, keys;
  int32_t part;
  bool exists; // there is a query

  __device__ __forceinline__ DirectDecodePlace(const DirectDecodeParams &params, uint32_t number) {
    const uint32_t index = params.parts == 1 ? number : number / uint32_t(params.parts);
    part = int32_t(number - index * uint32_t(params.parts));
    batch = int32_t(index / uint32_t(params.blocks));
    block = int32_t(index) - batch * params.blocks;
    kv_head = int32_t(uint32_t(block) / uint32_t(params.blocks_of_kv_head));
    const int32_t first = (block - kv_head * params.blocks_of_kv_head) * params.heads_per_block;
    head = kv_head * params.group + first;
    rows = min(params.heads_per_block, params.group - first);
    first_query = first_key = 0;
    keys = params.keys;
    exists = true;
  }

  // Finds the sequence of a packed batch. The constructor reads no memory, so it does not wait for the kernel ahead.
  __device__ __forceinline__ void find_sequence(const DirectDecodeParams &params) {
    const Sequence s = packed_sequence(params.cu_seqlens_q, params.cu_seqlens_k, batch, params.room);
    batch = 0;
    first_query = int32_t(s.q_begin);
    first_key = int32_t(s.k_begin);
    exists = s.q_count > 0;
    keys = exists ? int32_t(s.k_count) : 0;
  }
};

__device__ __forceinline__ int64_t DirectStrides::offset(const DirectDecodePlace &place, int32_t row_index,
                                                         int32_t head_index) const {
  return int64_t(place.batch) * batch + int64_t(row_index) * row + int64_t(head_index) * head;
}
__device__ __forceinline__ int64_t DirectKeyStrides::offset(const DirectDecodePlace &place) const {
  return int64_t(place.batch) * batch + int64_t(place.block) * block + int64_t(place.kv_head) * kv_head +
         int64_t(place.first_key) * key;
}

// The parameters of a launch.
struct DirectDecodeLaunch {
  const ForwardRoute &route;
  const DeviceFacts &device;
  const DirectDecodeParams &params;
};

// Launches one instantiation, with the splits of a block as a cluster.
template <class Element, int kHeadDim>
cudaError_t launch_direct_decode(const DirectDecodeLaunch &work, cudaStream_t stream);

} // namespace fdm::cuda
