// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of dq (query_sums.cuh) to dq, and the sums of keys that several segments of rows keep
// (KeySegments::sums) to dk, dv and the sums of the bias gradient.
#include "../tile/round_sums.cuh"

#include <cuda_runtime.h>

#include "key_blocks.cuh"
#include "query_sums.cuh"
#include "sum_bands.cuh"

namespace fdm::cuda {
namespace {

// The sequence to whose tiles a row of the sums belongs, if any: the last one that begins at this row or before.
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

struct QueryBands {
  using Params = BackwardParams;
  static constexpr int kTilesAtOnce = 4, kBlocks = 5;

  const BackwardParams &params;
  const float *sums;
  BandRows rows;
  bool exists;

  __device__ QueryBands(const BackwardParams &params_, int64_t number) : params(params_) {
    const fdm_problem &p = params.p;
    const QuerySums &all = params.query_sums;
    const int64_t bands = all.head_rows / kBandRows, row_of_heads = quotient(number, bands);
    const int64_t batch = quotient(row_of_heads, p.heads), head = row_of_heads - batch * p.heads;
    exists = batch < (is_varlen(p) ? 1 : p.batch);
    if (!exists) return;
    const int64_t first = (number - row_of_heads * bands) * kBandRows;
    const int64_t sequence_index = is_varlen(p) ? sequence_of(p, all.tile_rows, first) : batch;
    const Sequence s = sequence(p, sequence_index);
    const int64_t first_row = first - first_query_sum(p, all.tile_rows, s.q_begin, sequence_index);
    rows.find([&](int row) -> int64_t {
      const int64_t i = first_row + row;
      return i >= 0 && i < s.q_count ? row_offset(params.a.dq, s, i, head) : -1;
    });
    sums = all.data + number * kBandRows * all.dim;
  }

  __device__ int tiles() const { return exists ? params.query_sums.dim / 8 : 0; }
  __device__ void load(int first, float (&x)[kTilesAtOnce][4]) const {
#pragma unroll
    for (int n = 0; n < kTilesAtOnce; ++n) load_tile(sums + (first + n) * 128, x[n]);
  }
  __device__ void store(int first, const float (&x)[kTilesAtOnce][4]) const {
    rows.store(params.a.dq, params.p.scale, first, x);
  }
  __device__ void end(bool) const {}
};

// The sums of 16 keys of a head. One row of the grid has the sums of dk, the other those of dv. Only the device knows
// how many sums there are.
struct KeyBands {
  using Params = BackwardParams;
  static constexpr int kTilesAtOnce = 4, kBlocks = 4;

  const BackwardParams &params;
  KeyBand band;
  bool exists = false;

  __device__ KeyBands(const BackwardParams &params_, int64_t number) : params(params_) {
    ptx::wait_for_kernel_ahead();
    const fdm_problem &p = params.p;
    const KeyWork &keys = params.keys;
    const KeySumBand place(params, number);
    if (place.first < 0) return;
    const Sequence &s = place.s;
    const int64_t kv_head = place.kv_head, list = list_number(p, params.plan, s, kv_head * group_size(p));
    const ListSegments segments(params, s, place.sequence_index, list);
    const int32_t count = keys.segments.sum_count[list_sequence(p, list, place.sequence_index)];
    if (segments.count == 0 || place.first >= count || segments.has_overflow(keys)) return;
    const auto first = static_cast<int32_t>(place.first);
    const int64_t head = s.batch * p.kv_heads + kv_head;
    const fdm_tensor &t = KeyBand::gradient(params.a);
    exists = present(t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first + accumulator_row(half), sum = segments.first_sum + row;
      if (row >= count) continue;
      const int32_t key = keys.segments.sum_keys[list * keys.segments.max_sums + sum];
      band.rows.offset[half] = s.batch * t.stride[0] + (s.k_begin + key) * t.stride[1] + kv_head * t.stride[2];
      band.sums[half] = key_segment_sums(keys, head, sum) + (KeyBand::is_dv() ? keys.sum_dim : 0);
      if (!KeyBand::is_dv() && params.wants_bias_sums && threadIdx.x % 4 == 0)
        store_bias_sum(params, s, kv_head, 0, key, *bias_segment_sum(keys, head, sum));
    }
  }

  __device__ int tiles() const { return exists ? params.keys.sum_dim / 8 : 0; }
  __device__ void load(int first, float (&x)[kTilesAtOnce][4]) const { band.load(first, x); }
  __device__ void store(int first, const float (&x)[kTilesAtOnce][4]) const {
    band.store(params.a, params.p.scale, first, x);
  }
  __device__ void end(bool) const {}
};

} // namespace

cudaError_t launch_query_sums(const BackwardLaunch &work, cudaStream_t stream) {
  return launch<Overlap::kernel_ahead>(round_sums<QueryBands>, work.route.query_sum_blocks, kRoundingThreads, 0, stream,
                                       work.params);
}

cudaError_t launch_key_segment_sums(const BackwardLaunch &work, cudaStream_t stream) {
  return launch<Overlap::kernel_ahead>(round_sums<KeyBands>, {work.route.segment_sum_blocks, 2}, kRoundingThreads, 0,
                                       stream, work.params);
}

} // namespace fdm::cuda
