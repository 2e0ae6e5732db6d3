// SPDX-License-Identifier: BSD-3-Clause
// Computes delta = dO . O - dlse of each row, and finds rows that the fused kernel cannot compute (pair_bias.h).
#include "../backward/make_statistics.cuh"
#include "statistics.cuh"

namespace fdm::cuda {
namespace {

struct Deltas {
  using Params = PairBiasBackward;
  struct Division {
    StatisticsWork statistics;
    bool again;
  };
  struct Numbers {
    float *data;
    int64_t count;
  };

  __host__ __device__ static const fdm_problem &problem(const PairBiasBackward &work) { return work.call.p; }
  __host__ __device__ static const fdm_backward_args &args(const PairBiasBackward &work) { return work.a; }
  __host__ __device__ static int64_t past_batch(const PairBiasBackward &work) {
    return work.first_delta + work.delta_batches;
  }
  __device__ static Numbers query_sums(const PairBiasBackward &) { return {}; }

  __device__ static void write(const PairBiasBackward &work, const RowResult &result) {
    const HeadRow &row = result.row;
    const bool usable = fabsf(result.lse) <= kUnusableLse;
    float delta = usable ? result.delta : 0.0f;
    if (usable && present(work.a.dlse)) delta -= load_value(work.a.dlse, row);
    const bool is_large = usable ? fabsf(result.lse) * kLog2E > kLargeLse : !(result.lse < 0.0f);
    if (work.non_finite && (is_large || !(fabsf(delta) < INFINITY))) *work.non_finite = 1;
    float *const to = &delta_of(work, row.batch, row.head, row.i);
    // In a row of dq, a whole 32-byte sector is written. Only the first number is used.
    if (work.delta_row > 1 && work.call.p.head_dim >= 16) {
      const float4 x{delta, delta, delta, delta};
      reinterpret_cast<float4 *>(to)[0] = reinterpret_cast<float4 *>(to)[1] = x;
    } else {
      *to = delta;
    }
  }

  __device__ static int64_t other_work(const PairBiasBackward &work, const Division &division) {
    if (division.again && is_superseded(work)) return -1;
    return blockIdx.x;
  }
};

} // namespace

cudaError_t launch_deltas(const PairBiasBackward &work, const StatisticsDivision &rows, MakeDeltas when,
                          cudaStream_t stream) {
  return launch_statistics<Deltas>(work, {{}, when == MakeDeltas::again}, rows, work.first_delta, 0, stream);
}

} // namespace fdm::cuda
