// SPDX-License-Identifier: BSD-3-Clause
// The division of work of the kernels that run before and after the mainloops.
#pragma once

#include <math.h>

#include <cstdint>

#include "facts.h"

namespace fdm::cuda {

// fill.cu, for one tensor.
struct FillWork {
  bool vectors; // eight 16-bit elements at a time
  int64_t blocks;
};
constexpr int kFillThreads = 256;
// The thread blocks that fill a tensor with zeros, with one element or vector per thread. `aligned`: rows may be
// written 16 bytes at a time.
FillWork fill_work(const fdm_tensor &t, bool aligned);
inline FillWork fill_work(const fdm_tensor &t) { return fill_work(t, rows_are_aligned(t, t.shape[3])); }

// run_plan.cu: one warp per tile.
constexpr int kRunThreads = 128;

// relative_bias.cu.
constexpr int kRelativeThreads = 256;

// combine.cu: a thread has four neighbours of a row.
struct CombineWork {
  int32_t lanes;      // threads per row
  int32_t max_splits; // capacity of the instantiation
  int64_t blocks;
  bool aligned; // rows of `out` can be written 16 bytes at a time
};
constexpr int kCombineThreads = 128;
CombineWork combine_work(const fdm_problem &p, const RouteTable &table, const Alignment &alignment, int64_t splits);

// make_statistics.cuh: thread blocks go through units, which are rows of all heads.
struct StatisticsDivision {
  int32_t lanes;               // threads per row
  int64_t batches, batch_rows; // batch elements, and the rows of each
  int64_t wanted_blocks, max_units;

  int64_t rows_at_once() const; // rows that a thread block loads at a time
  int64_t units(int64_t batches) const;
  int64_t blocks(int64_t batches) const;
};
constexpr int kStatisticsThreads = 512;
// Rows of a unit for each thread, whose loads are in flight together.
constexpr int kStatisticsRows = 2;
StatisticsDivision statistics_division(const fdm_problem &p, const RouteTable &table);

// prepare.cu: thread blocks for each task besides the statistics.
struct PreparationWork {
  int64_t order, clearing;
  bool vectors; // rows of dK and dV are cleared eight elements at a time
};
// member_sums.cu: a thread has eight neighbours of a row.
constexpr int kMemberThreads = 256;
// Keys of a head, one for each lane, whose gradients are cleared if no row keeps them.
constexpr int kUnitKeys = 32;

// sum_parts.cuh: the columns of the grid go through items; `divisions` thread blocks share the numbers of each item.
struct PartSumGrid {
  int64_t columns, divisions;
};

// round_sums.cuh: one warp rounds a band of rows.
constexpr int kRoundingThreads = 256, kBandRows = 16;
inline int64_t rounding_blocks(int64_t bands) { return ceil_div(bands, kRoundingThreads / 32); }

// reduce.cu: one thread or one thread block sums an element.
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

// Whether the kernels count visible kept keys. Otherwise the count is the number of keys, or is not needed.
FDM_INLINE bool counts_seen_keys(const fdm_selection &s) {
  return present(s.mask) && (s.keep_last > 0 || s.keep_first > 0);
}

// keep_parts.cu: a row of booleans is cut into parts, one thread block each.
struct KeepParts {
  int64_t rows;  // of each head and sequence
  int64_t keys;  // of a part
  int64_t count; // of a row
  // Capacity of the key list of a warp of a part; 0: no lists, because too many keys reach the threshold of a sample.
  int64_t list_capacity;
};
constexpr int kKeepThreads = 512, kKeepDigits = 2048, kSampledKeys = 4096, kRowStateBytes = 128;
constexpr int kWarpKeys = 512; // a warp has a multiple of this
// Launches that count keys by digit: 11 bits each, and the remaining bits in the last.
FDM_INLINE constexpr int keep_passes(int bias_bits) { return bias_bits == 32 ? 3 : 2; }
FDM_INLINE constexpr int keep_last_digits(int bias_bits) { return bias_bits == 32 ? 1 << 10 : 1 << 5; }
// A rank in a sample of a row of `keys` keys: selected keys almost surely rank above it. The number of sampled
// selected keys has a standard deviation of at most the square root of its expectation.
FDM_INLINE float sampled_rank(const fdm_selection &s, int64_t keys) {
  const float selected = float(min64(s.window, keys) + s.keep_last + s.keep_first);
  const float expected = selected * kSampledKeys / float(keys);
  return expected + 4.0f * sqrtf(expected) + 4.0f;
}
// `blocks` is the approximate number of wanted thread blocks over all rows.
KeepParts keep_parts(const fdm_selection &s, int64_t all_rows, int64_t blocks);

// intervals.cu: chunks of keys.
struct SelectionChunks {
  int64_t keys;  // keys of a chunk
  int64_t count; // of a head: of one sequence, or of all packed sequences, numbered as in numbered_part()
};
// Maximum keys of a chunk: shared memory holds the keys that enter and leave the window.
constexpr int kChunkRoom = 2048;
SelectionChunks selection_chunks(const fdm_selection &s, const RouteTable &table);

} // namespace fdm::cuda
