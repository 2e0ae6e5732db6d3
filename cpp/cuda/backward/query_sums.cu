// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of dq, times the scale, to dq: a warp for each band of 16 rows of a head.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "ptx/dependent.cuh"
#include "query_sums.cuh"
#include "sum_bands.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

// The sequence whose tiles a row of the sums belongs to, if to any: the last one that begins there or before.
__device__ int64_t sequence_of(const fdm_problem &p, int32_t tile_rows, int64_t row) {
  int64_t first = 0, past = p.batch;
  while (past - first > 1) {
    const int64_t middle = (first + past) / 2;
    if (first_query_sum(p, tile_rows, sequence(p, middle).q_begin, middle) <= row)
      first = middle;
    else
      past = middle;
  }
  return first;
}

template <class Element>
__global__ void __launch_bounds__(kThreads) round_query_sums(const __grid_constant__ BackwardParams params) {
  ptx::start_dependents();
  const fdm_problem &p = params.p;
  const fdm_tensor &t = params.a.dq;
  const QuerySums &sums = params.query_sums;
  const int64_t number = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32, bands = sums.head_rows / kBandRows;
  const int64_t row_of_heads = quotient(number, bands), batch = quotient(row_of_heads, p.heads);
  const int64_t head = row_of_heads - batch * p.heads;
  if (batch >= (is_varlen(p) ? 1 : p.batch)) return;
  const int64_t first = (number - row_of_heads * bands) * kBandRows;
  const int64_t sequence_index = is_varlen(p) ? sequence_of(p, sums.tile_rows, first) : batch;
  const Sequence s = sequence(p, sequence_index);
  const int64_t first_row = first - first_query_sum(p, sums.tile_rows, s.q_begin, sequence_index);
  const float *band = sums.data + number * kBandRows * sums.dim;
  ptx::wait_for_kernel_ahead();
  round_band<Element>(band, sums.dim, p.scale, t, int(p.head_dim), [&](int row) -> int64_t {
    const int64_t i = first_row + row;
    return i >= 0 && i < s.q_count ? row_offset(t, s, i, head) : -1;
  });
}

} // namespace

cudaError_t launch_query_sums(const BackwardParams &params, cudaStream_t stream) {
  const fdm_problem &p = params.p;
  const int64_t bands = query_sum_count(p, params.query_sums) / (kBandRows * params.query_sums.dim);
  const auto kernel = p.q.dtype == FDM_FLOAT16 ? round_query_sums<__half> : round_query_sums<__nv_bfloat16>;
  return launch<Overlap::kernel_ahead>(kernel, ceil_div(bands, kThreads / 32), kThreads, 0, stream, params);
}

} // namespace fdm::cuda
