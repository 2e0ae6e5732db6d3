// SPDX-License-Identifier: BSD-3-Clause
// How thread blocks divide the work of making a plan.
#pragma once

#include "plan.cuh"

namespace fdm::cuda {

// A part of a list and sequence. Each kernel defines its parts.
struct ListWork {
  Sequence s;
  int64_t list, sequence_index;
  int64_t list_batch, list_head; // indices into the list tensor
  int64_t part;
};

__device__ __forceinline__ ListWork list_work(const fdm_problem &p, const Plan &plan, uint32_t list,
                                              int64_t sequence_index, int64_t part) {
  const auto heads = static_cast<uint32_t>(plan.lists_per_batch);
  return {sequence(p, sequence_index), list, sequence_index, list / heads, list % heads, part};
}

// Each list and sequence has `parts` parts, and each part a thread block. Parts count down: the last ones of every
// list, which have the most work with a causal limit, start first.
__device__ __forceinline__ ListWork part_of_list(const fdm_problem &p, const Plan &plan, int64_t parts,
                                                 uint32_t block) {
  // A grid has fewer than 2^31 blocks, and 64-bit divisions take longer than some of the work.
  const auto sequences = static_cast<uint32_t>(list_sequences(p));
  const uint32_t each = static_cast<uint32_t>(plan.lists) * sequences, list_sequence = block % each;
  return list_work(p, plan, list_sequence / sequences, list_sequence % sequences, parts - 1 - block / each);
}

// Each list has a part for each number of a tile. A sequence may have fewer tiles than numbers. Numbers count down.
__device__ __forceinline__ ListWork tile_of_list(const fdm_problem &p, const Plan &plan, uint32_t block) {
  const auto lists = static_cast<uint32_t>(plan.lists);
  const NumberedPart found =
      numbered_part(p, plan.tiles - 1 - block / lists, kTileRows, [](const Sequence &s) { return s.q_begin; });
  return list_work(p, plan, block % lists, found.sequence_index, found.part);
}

} // namespace fdm::cuda
