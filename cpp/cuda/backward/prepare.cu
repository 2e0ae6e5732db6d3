// SPDX-License-Identifier: BSD-3-Clause
// The preparation of the backward pass. One launch whose thread blocks have different work:
//   they order the kept keys of each bucket or segment;
//   they compute the statistics of each row (make_statistics.cuh), and clear the sums of dq, if there are any;
//   they clear dk, dv and the sums of the bias gradient where no other kernel writes all of them.
//
// With a sink, P = exp(score - lse') with lse' = log(exp(lse) + exp(sink)). The P of a row sum to exp(lse - lse'),
// which is less than 1. lse excludes the sink, so its gradient adds dlse exp(score - lse) = dlse P exp(lse' - lse) to
// the gradient of a score. Hence delta = dO . O - dlse exp(lse' - lse). The sink itself has a P and dP = 0: its
// gradient is the sum over the rows of -exp(sink - lse') dO . O.
#include <cuda_runtime.h>

#include "../tile/sink.cuh"
#include "key_order.cuh"
#include "key_segments.cuh"
#include "make_statistics.cuh"
#include "query_sums.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = kStatisticsThreads;

struct PreparationDivision : PreparationWork {
  StatisticsWork statistics;
};

// The number of units, of up to kUnitKeys keys of a head each, whose gradients are cleared.
FDM_INLINE int64_t key_units(const BackwardParams &params) {
  const fdm_tensor &t = present(params.a.dk) ? params.a.dk : params.a.dv;
  return params.clears_keys && present(t) ? t.shape[0] * params.p.kv_heads * ceil_div(t.shape[1], kUnitKeys) : 0;
}

// The number of elements of bias_sums, which has one row for all queries.
FDM_INLINE int64_t element_count(const fdm_tensor &sums) { return sums.shape[0] * sums.shape[1] * sums.shape[3]; }

// Clears elements of a gradient's row from `column` on: eight if `vector`, else one. A row without this column is
// skipped.
__device__ void clear(const fdm_tensor &t, int64_t offset, int column, bool vector) {
  if (!present(t) || column >= t.shape[3]) return;
  auto *element = static_cast<uint16_t *>(t.data) + offset;
  if (vector)
    *reinterpret_cast<uint4 *>(element) = uint4{};
  else
    *element = 0;
}

// A warp clears dk and dv of those keys of a unit that no row keeps, and of all keys of packed sequences. Later
// kernels write the keys of lists. Each lane tests one key, so the warp waits for the mask only once. Then eight
// lanes clear a key.
__device__ void clear_keys(const BackwardParams &params, int64_t unit, bool vector) {
  const fdm_problem &p = params.p;
  const fdm_tensor &dk = params.a.dk, &dv = params.a.dv, &t = present(dk) ? dk : dv;
  const int64_t units = ceil_div(t.shape[1], kUnitKeys), head_number = quotient(unit, units);
  const int64_t batch = quotient(head_number, p.kv_heads), head = head_number - batch * p.kv_heads;
  const int64_t first = (unit - head_number * units) * kUnitKeys, key_index = first + threadIdx.x % kUnitKeys;
  bool clears = key_index < t.shape[1];
  if (clears && !is_varlen(p)) {
    const RowRange rows = rows_of_key(p, whole_sequence(p, batch), head * group_size(p), key_index);
    clears = rows.first >= rows.past;
  }
  const uint32_t cleared = __ballot_sync(kAllLanes, clears);
  constexpr int kLanesOfKey = 8;
  const int width = vector ? 8 : 1, elements = int(p.head_dim);
  for (int n = int(threadIdx.x) % kUnitKeys / kLanesOfKey; n < kUnitKeys; n += kUnitKeys / kLanesOfKey) {
    if (!(cleared >> n & 1)) continue;
    const auto offset = [&](const fdm_tensor &gradient, int d) {
      return batch * gradient.stride[0] + (first + n) * gradient.stride[1] + head * gradient.stride[2] +
             d * gradient.stride[3];
    };
    for (int d = int(threadIdx.x) % kLanesOfKey * width; d < elements; d += kLanesOfKey * width) {
      clear(dk, offset(dk, d), d, vector);
      clear(dv, offset(dv, d), d, vector);
    }
  }
}

__device__ void clear_gradients(const BackwardParams &params, const PreparationDivision &division, int64_t block) {
  const int64_t blocks = division.clearing;
  const int64_t units = key_units(params);
  for (int64_t n = block * (kThreads / 32) + threadIdx.x / 32; n < units; n += blocks * (kThreads / 32))
    clear_keys(params, n, division.vectors);
  if (!params.wants_bias_sums) return;
  const fdm_tensor &sums = params.bias_sums;
  for (int64_t n = block * kThreads + threadIdx.x; n < element_count(sums); n += blocks * kThreads) {
    const int64_t row = quotient(n, sums.shape[3]), batch = quotient(row, sums.shape[1]);
    store_element(sums,
                  batch * sums.stride[0] + (row - batch * sums.shape[1]) * sums.stride[1] +
                      (n - row * sums.shape[3]) * sums.stride[3],
                  0.0f);
  }
}

struct SinkShare {
  float lse_increase; // lse' - lse, to base 2
  float sink_p;       // the sink's P
};

// `margin` is sink - lse, to base 2. `lse_increase` is at most kMaxIncrease. Beyond this limit, the P of keys are
// nearly 0. They must not become 0: dlse is multiplied by exp2(lse_increase) and then by P, which has the factor
// exp2(-lse_increase).
__device__ __forceinline__ SinkShare sink_share(float margin) {
  constexpr float kMaxIncrease = 64.0f;
  if (margin > kMaxIncrease) return {kMaxIncrease, 1.0f};
  const float weight = exp2f(margin);
  return {log1pf(weight) * kLog2E, weight / (1.0f + weight)};
}

struct Preparation {
  using Params = BackwardParams;
  using Division = PreparationDivision;

  __host__ __device__ static const fdm_problem &problem(const BackwardParams &params) { return params.p; }
  __host__ __device__ static const fdm_backward_args &args(const BackwardParams &params) { return params.a; }
  __host__ __device__ static int64_t past_batch(const BackwardParams &params) {
    return is_varlen(params.p) ? 1 : params.p.batch;
  }

  struct Numbers {
    float *data;
    int64_t count;
  };
  __device__ static Numbers query_sums(const BackwardParams &params) {
    const QuerySums &sums = params.query_sums;
    return {sums.data, sums.data ? query_sum_count(params.p, sums) : 0};
  }

  // sink - lse, to base 2. With a float64 bias, `lse` is relative to a reference, so this takes absolute_lse.
  __device__ static float sink_margin(const BackwardParams &params, const HeadRow &row, float lse) {
    const fdm_problem &p = params.p;
    const fdm_tensor &absolute = params.absolute_lse;
    if (!present(absolute)) return sink_score(p, row.head) - lse;
    const int64_t offset = row.batch * absolute.stride[0] + row.head * absolute.stride[1] + row.i * absolute.stride[2];
    const double sink = load_element(p.sink, row.head * p.sink.stride[0]);
    return float(sink - static_cast<const double *>(absolute.data)[offset]) * kLog2E;
  }

  __device__ static void write(const BackwardParams &params, const RowResult &result) {
    const fdm_problem &p = params.p;
    const HeadRow &row = result.row;
    const int64_t rows = total_rows(p);
    // dO of rows that keep no key may hold any value.
    const bool empty = fabsf(result.lse) > kUnusableLse;
    const float delta = empty ? 0.0f : result.delta;
    RowStatistics statistics{empty ? INFINITY : result.lse * kLog2E, delta};
    float dlse_factor = 1.0f;
    if (present(p.sink)) {
      const SinkShare share = empty ? SinkShare{} : sink_share(sink_margin(params, row, statistics.lse));
      params.sink_shares[(row.head * past_batch(params) + row.batch) * rows + row.i] = -share.sink_p * delta;
      statistics.lse += share.lse_increase;
      dlse_factor = exp2f(share.lse_increase);
    }
    if (params.only_mass) statistics.delta = -1.0f; // P (0 - delta) is P
    if (!empty && present(params.a.dlse)) statistics.delta -= load_value(params.a.dlse, row) * dlse_factor;
    params.statistics[(row.batch * p.heads + row.head) * rows + row.i] = statistics;
  }

  // Thread blocks that order keys mostly wait, and those of the statistics load and store. So their numbers
  // alternate.
  __device__ static int64_t other_work(const BackwardParams &params, const PreparationDivision &division) {
    __shared__ union {
      typename KeyOrder<kThreads>::Shared keys;
      typename SegmentOrder<kThreads>::Shared segments;
    } shared;
    const int64_t turns = min64(division.order, division.statistics.blocks), number = blockIdx.x;
    const bool in_turns = number < 2 * turns;
    const int64_t block = in_turns ? number / 2 : number - turns;
    if (in_turns ? number % 2 == 0 : block < division.order) {
      if (params.keys.segments.rows > 0)
        SegmentOrder<kThreads>(params, shared.segments, block).run();
      else
        KeyOrder<kThreads>{shared.keys}.run(params, block);
      return -1;
    }
    if (block < division.statistics.blocks) return block;
    clear_gradients(params, division, number - division.order - division.statistics.blocks);
    return -1;
  }
};

} // namespace

cudaError_t launch_prepare(const BackwardLaunch &work, cudaStream_t stream) {
  const PreparationWork &preparation = work.route.preparation;
  return launch_statistics<Preparation>(work.params, {preparation, {}}, work.route.statistics_division, 0,
                                        preparation.order + preparation.clearing, stream);
}

} // namespace fdm::cuda
