// SPDX-License-Identifier: BSD-3-Clause
// How the kernels that run before and after the mainloops divide their work.
#pragma once

#include <math.h>

#include <cstdint>

#include "facts.h"

namespace fdm::cuda {

// fill.cu, for one tensor.
struct FillWork {
  bool vectors; // eight elements of 16 bits at a time
  int64_t blocks;
};
constexpr int kFillThreads = 256;
// Thread blocks that write each element of a tensor once: zeros, whose rows may be written 16 bytes at a time.
FillWork fill_work(const fdm_tensor &t, bool aligned);
inline FillWork fill_work(const fdm_tensor &t) { return fill_work(t, rows_are_aligned(t, t.shape[3])); }

// run_plan.cu. A warp has a tile.
constexpr int kRunThreads = 128;

// relative_bias.cu.
constexpr int kRelativeThreads = 256;

// combine.cu. A thread has four neighbours of a row.
struct CombineWork {
  int32_t lanes;  // threads of a row
  int32_t splits; // of the instantiation, which has room for so many
  int64_t blocks;
  bool aligned; // rows of `out` can be written 16 bytes at a time
};
constexpr int kCombineThreads = 128;
CombineWork combine_work(const fdm_problem &p, const RouteTable &table, const Alignment &lies, int64_t splits);

// make_statistics.cuh: units of rows of all heads, through which thread blocks go.
struct StatisticsDivision {
  int32_t lanes;               // threads of a row
  bool aligned;                // rows of O and dO are read 16 bytes at a time
  int64_t batches, batch_rows; // elements of the batch, and the rows of each
  int64_t wanted_blocks, most_units;

  int64_t rows_together() const; // whose first parts a thread block loads at a time
  int64_t units(int64_t batches) const;
  int64_t blocks(int64_t batches) const;
};
constexpr int kStatisticsThreads = 512;
// Each thread has a part of so many rows of a unit, whose loads are then under way together.
constexpr int statistics_rows(bool aligned) { return aligned ? 2 : 1; }
StatisticsDivision statistics_division(const fdm_problem &p, const RouteTable &table, const Alignment &lies);

// prepare.cu: thread blocks for each work beside the statistics.
struct PreparationWork {
  int64_t order, clearing;
  bool vectors; // rows of dk and dv are cleared eight elements at a time
};
// member_sums.cu: a thread has eight neighbours of a row.
constexpr int kMemberThreads = 256;
// Keys of a head, one for each lane, whose gradients are cleared if no row keeps them.
constexpr int kUnitKeys = 32;

// sum_parts.cuh: columns of the grid, which go through items, and thread blocks that share the numbers of each.
struct PartSumGrid {
  int64_t columns, divisions;
};

// round_sums.cuh: a warp rounds a band of rows.
constexpr int kRoundingThreads = 256, kBandRows = 16;
inline int64_t rounding_blocks(int64_t bands) { return ceil_div(bands, kRoundingThreads / 32); }

// reduce.cu: an element is summed by one thread, or by a thread block.
struct ReductionWork {
  bool by_block;
  int64_t blocks;
};
constexpr int kReduceThreads = 256, kReduceBlockThreads = 1024;
ReductionWork reduction_work(int64_t elements, bool by_block);

FDM_INLINE int64_t selection_sequences(const fdm_selection &s, const fdm_tensor &result) {
  return present(s.cu_seqlens_q) ? s.batch : result.shape[0];
}
// Rows of booleans of each head and sequence.
inline int64_t kept_rows(const fdm_selection &s) {
  return is_varlen(s) && s.keep.shape[2] > 1 ? s.queries : s.keep.shape[2];
}

// Whether seen keys have to be counted: otherwise their numbers are those of the keys, or do not matter.
FDM_INLINE bool counts_seen_keys(const fdm_selection &s) {
  return present(s.mask) && (s.keep_last > 0 || s.keep_first > 0);
}

// keep_parts.cu: a row of booleans is cut into parts, each of a thread block.
struct KeepParts {
  int64_t rows;  // of each head and sequence
  int64_t keys;  // of a part
  int64_t count; // of a row
  // Keys that a warp of a part has room to list; 0: so many reach the threshold of a sample that rows have none.
  int64_t listed;
};
constexpr int kKeepThreads = 512, kKeepDigits = 2048, kSampledKeys = 4096, kRowStateBytes = 128;
constexpr int kWarpKeys = 512; // of a warp, or a multiple
// Launches that count keys by digit: 11 bits each, and what is left in the last one.
FDM_INLINE constexpr int keep_passes(int bias_bits) { return bias_bits == 32 ? 3 : 2; }
FDM_INLINE constexpr int keep_last_digits(int bias_bits) { return bias_bits == 32 ? 1 << 10 : 1 << 5; }
// The rank in a sample of a row of `keys` keys that selected ones all but surely do not reach: the number of those that
// are sampled has a standard deviation of at most its root.
FDM_INLINE float sampled_rank(const fdm_selection &s, int64_t keys) {
  const float selected = float(min64(s.window, keys) + s.keep_last + s.keep_first);
  const float expected = selected * kSampledKeys / float(keys);
  return expected + 4.0f * sqrtf(expected) + 4.0f;
}
// `blocks` are about those wanted for all rows.
KeepParts keep_parts(const fdm_selection &s, int64_t all_rows, int64_t blocks);

// intervals.cu: chunks of keys.
struct SelectionChunks {
  int64_t keys;  // keys of a chunk
  int64_t count; // of a head: of a sequence, or of all that are packed, as numbered_part() numbers them
};
// Keys of a chunk, whose arrivals and leavers lie in shared memory.
constexpr int kChunkRoom = 2048;
SelectionChunks selection_chunks(const fdm_selection &s, const RouteTable &table);

} // namespace fdm::cuda
