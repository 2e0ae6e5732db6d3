// SPDX-License-Identifier: BSD-3-Clause
// How the work of making a plan is divided over blocks of threads: each list and sequence has a number of parts.
#pragma once

#include "plan.cuh"

namespace fdm::cuda {

struct ListWork {
  Sequence s;
  int64_t list, sequence_index;
  int64_t list_batch, list_head; // indices into the list tensor
  int64_t part;
};

// Parts count down: the last of every list, which have the most to do with a causal limit, start first.
__device__ __forceinline__ ListWork list_work(const fdm_problem &p, const Plan &plan, int64_t parts) {
  // A grid has fewer than 2^31 blocks, and divisions of 64 bits would take longer than some of the work.
  const auto sequences = static_cast<uint32_t>(list_sequences(p)), heads = static_cast<uint32_t>(plan.batch_lists);
  const uint32_t each = static_cast<uint32_t>(plan.lists) * sequences, list_sequence = blockIdx.x % each;
  const uint32_t list = list_sequence / sequences;
  ListWork work;
  work.part = parts - 1 - blockIdx.x / each;
  work.list = list;
  work.sequence_index = list_sequence % sequences;
  work.list_batch = list / heads;
  work.list_head = list % heads;
  work.s = sequence(p, work.sequence_index);
  return work;
}

} // namespace fdm::cuda
