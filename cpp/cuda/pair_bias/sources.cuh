// SPDX-License-Identifier: BSD-3-Clause
// The sources of a bias, and the slots of a thread block.
#pragma once

#include "../../indexing.h"
#include "../tile/copy_rows.cuh"
#include "pair_bias.h"

namespace fdm::cuda {

// A query head of a sequence.
struct Source {
  int64_t batch;
  int64_t head;
  bool exists;
};

// Source `index` of a plane of the bias. The plane is batch element plane / bias heads, head plane % bias heads.
__device__ __forceinline__ Source source_of(const PairBiasCall &call, int plane, int64_t index) {
  const int bias_heads = int(call.p.bias.shape[1]);
  const int first_batch = plane / bias_heads, first_head = plane % bias_heads * call.heads;
  const auto number = static_cast<uint32_t>(index), heads = static_cast<uint32_t>(call.heads);
  return {first_batch + number / heads, first_head + number % heads, index < int64_t(call.batches) * call.heads};
}

__device__ __forceinline__ Sequence pair_bias_sequence(const fdm_problem &p, int64_t batch) {
  return {batch, 0, p.queries, 0, p.keys, p.keys - p.queries};
}

// In shared memory: the source of each slot of a thread block, and its first row in the kTensors tensors that are
// copied.
template <int kSlotRoom, int kTensors> struct SlotTable {
  Source source[kSlotRoom];
  const uint16_t *first[kTensors][kSlotRoom];
  const uint8_t *kept[kSlotRoom]; // first byte of the key mask

  __device__ __forceinline__ void set(int which, int slot, const fdm_tensor &t, int64_t head) {
    first[which][slot] = static_cast<const uint16_t *>(t.data) + source[slot].batch * t.stride[0] + head * t.stride[2];
  }
  __device__ __forceinline__ void set_kept(int slot, const fdm_problem &p) {
    if (mask_kind(p) != FDM_MASK_KEYS) return;
    const Matrix m = score_matrix(p, p.mask, pair_bias_sequence(p, source[slot].batch), source[slot].head, 1);
    kept[slot] = static_cast<const uint8_t *>(m.base);
  }
};

} // namespace fdm::cuda
