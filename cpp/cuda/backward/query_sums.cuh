// SPDX-License-Identifier: BSD-3-Clause
// The layout of the float32 sums of dq.
//
// Each head has bands of 16 rows, and a band has tiles of 8 columns. sum_bands.cuh describes the layout of a tile.
#pragma once

#include "../../indexing.h"
#include "../tile/products.cuh"
#include "backward.h"

namespace fdm::cuda {

// The first row of a sequence among the rows of a head.
FDM_INLINE int64_t first_query_sum(const fdm_problem &p, int32_t tile_rows, int64_t q_begin, int64_t sequence_index) {
  return is_varlen(p) ? (q_begin / tile_rows + sequence_index) * tile_rows : 0;
}

FDM_INLINE int64_t query_sum_count(const fdm_problem &p, const QuerySums &sums) {
  return (is_varlen(p) ? 1 : p.batch) * p.heads * sums.head_rows * sums.dim;
}

// The sums of a head from row `row` of the sequence on. `row` is a multiple of kBandRows.
__device__ __forceinline__ float *query_sums(const BackwardParams &params, const Sequence &s, int64_t sequence_index,
                                             int64_t head, int64_t row) {
  const QuerySums &sums = params.query_sums;
  const int64_t first = first_query_sum(params.p, sums.tile_rows, s.q_begin, sequence_index) + row;
  return sums.data + ((s.batch * params.p.heads + head) * sums.head_rows + first) * sums.dim;
}

} // namespace fdm::cuda
