// SPDX-License-Identifier: BSD-3-Clause
// Computes the statistics of each row, and its share of the gradient of a sink, with some threads for each row of each
// head. Also clears the sums of dq, if there are any.
//
// With a sink, P = exp(score - lse') with lse' = log(exp(lse) + exp(sink)), and the P of a row sum to
// exp(lse - lse') < 1. The gradient of lse, which is without the sink, reaches a score as dlse exp(score - lse)
// = dlse P exp(lse' - lse), so delta = dO . O - dlse exp(lse' - lse). The sink has P too, and a dP of 0: its gradient is
// the sum over the rows of -exp(sink - lse') dO . O.
#pragma once

#include "../tile/products.cuh"
#include "../tile/sink.cuh"
#include "query_sums.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {

template <class Element> __device__ float to_float(Element x) {
  if constexpr (__is_same(Element, __half))
    return __half2float(x);
  else
    return __bfloat162float(x);
}

// Sums over the threads of a row. All threads of the warp call it.
template <int kLanes> __device__ __forceinline__ float row_total(float sum) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

struct SinkShare {
  float added;   // lse' - lse, to base 2
  float of_sink; // P of the sink
};

// For an lse to base 2. The sink adds at most kMostAdded: beyond that the P of keys are nearly 0, but must not be, since
// the gradient of lse is multiplied by them after it was divided by them.
__device__ __forceinline__ SinkShare sink_share(const fdm_problem &p, int64_t head, float lse) {
  constexpr float kMostAdded = 64.0f;
  const float margin = sink_score(p, head) - lse;
  if (margin > kMostAdded) return {kMostAdded, 1.0f};
  const float weight = exp2f(margin);
  return {log1pf(weight) * kLog2E, weight / (1.0f + weight)};
}

// A row of a head. They are numbered over the heads first, then over the rows of a sequence, then over sequences: most
// often as they lie in memory.
struct HeadRow {
  int32_t batch, i, head;
};

FDM_INLINE HeadRow head_row(const fdm_problem &p, int64_t number) {
  const int64_t rows = total_rows(p), row = quotient(number, p.heads), batch = quotient(row, rows);
  return {static_cast<int32_t>(batch), static_cast<int32_t>(row - batch * rows),
          static_cast<int32_t>(number - row * p.heads)};
}

// The row whose number is the sum of those of two; this divides nothing.
FDM_INLINE HeadRow row_after(const fdm_problem &p, const HeadRow &row, const HeadRow &step) {
  const auto heads = static_cast<int32_t>(p.heads), rows = static_cast<int32_t>(total_rows(p));
  HeadRow after{row.batch + step.batch, row.i + step.i, row.head + step.head};
  if (after.head >= heads) {
    after.head -= heads;
    ++after.i;
  }
  if (after.i >= rows) {
    after.i -= rows;
    ++after.batch;
  }
  return after;
}

// Each thread has a part of so many rows of a unit, whose loads are then under way together.
constexpr int statistics_rows(bool aligned) { return aligned ? 2 : 1; }

// How the rows are divided: blocks of threads go through units of rows together. A thread has the first row of a unit by
// its number; the steps lead from there to its next row of the unit, and to its first one of the block's next unit.
struct StatisticsWork {
  int32_t units, blocks;
  HeadRow row_step, unit_step;
};

// The elements of a row that a thread loads at once: eight, or one.
template <bool kAligned, class Element> struct PartOf {
  using Type = uint4;
};
template <class Element> struct PartOf<false, Element> {
  using Type = Element;
};

// Some rows of dO and O, of each of which kLanes threads have a part: eight elements of each row where rows are aligned,
// else one, and what follows kLanes such parts later.
template <int kThreads, int kLanes, class Element, bool kAligned> struct StatisticsRows {
  static constexpr int kRows = statistics_rows(kAligned), kStep = kAligned ? 8 : 1;
  using Part = typename PartOf<kAligned, Element>::Type;

  HeadRow row[kRows];
  Part dout[kRows], out[kRows];
  float lse[kRows];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  __device__ static bool exists(const fdm_problem &p, const HeadRow &row) {
    return row.batch < (is_varlen(p) ? 1 : p.batch);
  }

  __device__ static Part load_part(const fdm_tensor &t, const HeadRow &row, int d) {
    const auto *start =
        static_cast<const Element *>(t.data) + row.batch * t.stride[0] + row.i * t.stride[1] + row.head * t.stride[2];
    if constexpr (kAligned)
      return *reinterpret_cast<const Part *>(start + d);
    else
      return start[d * t.stride[3]];
  }
  __device__ static float load_value(const fdm_tensor &t, const HeadRow &row) {
    return static_cast<const float *>(t.data)[row.batch * t.stride[0] + row.head * t.stride[1] + row.i * t.stride[2]];
  }

  // Loads the unit whose first row of this thread is given.
  __device__ void load(const BackwardParams &params, const StatisticsWork &work, const HeadRow &first) {
    row[0] = first;
#pragma unroll
    for (int n = 1; n < kRows; ++n) row[n] = row_after(params.p, row[n - 1], work.row_step);
    const int d = lane() * kStep;
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const bool own = exists(params.p, row[n]), read = own && d < params.p.head_dim;
      dout[n] = read ? load_part(params.a.dout, row[n], d) : Part{};
      out[n] = read ? load_part(params.a.out, row[n], d) : Part{};
      lse[n] = own ? load_value(params.a.lse, row[n]) : INFINITY;
    }
  }

  // What the first lanes of each row know of one row each when a unit is loaded. All threads of the warp call it.
  struct Result {
    HeadRow row;
    float lse, delta;
  };
  __device__ Result result(const BackwardParams &params) const {
    Result own{row[0], lse[0], 0.0f};
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      float sum = dot(dout[n], out[n], 0.0f);
      for (int d = (lane() + kLanes) * kStep; d < params.p.head_dim; d += kLanes * kStep)
        if (exists(params.p, row[n]))
          sum = dot(load_part(params.a.dout, row[n], d), load_part(params.a.out, row[n], d), sum);
      sum = row_total<kLanes>(sum);
      if (lane() == n) own = {row[n], lse[n], sum};
    }
    return own;
  }

  __device__ static void write(const BackwardParams &params, const Result &result) {
    const fdm_problem &p = params.p;
    const HeadRow &row = result.row;
    if (lane() >= kRows || !exists(p, row)) return;
    const int64_t rows = total_rows(p), batches = is_varlen(p) ? 1 : p.batch;
    // What lies in rows that keep nothing may be anything.
    const bool empty = fabsf(result.lse) > kUnusableLse;
    const float delta = empty ? 0.0f : result.delta;
    RowStatistics statistics{empty ? INFINITY : result.lse * kLog2E, delta};
    float dlse_factor = 1.0f;
    if (present(p.sink)) {
      const SinkShare share = empty ? SinkShare{} : sink_share(p, row.head, statistics.lse);
      params.sink_shares[(row.head * batches + row.batch) * rows + row.i] = -share.of_sink * delta;
      statistics.lse += share.added;
      dlse_factor = exp2f(share.added);
    }
    if (!empty && present(params.a.dlse)) statistics.delta -= load_value(params.a.dlse, row) * dlse_factor;
    params.statistics[(row.batch * p.heads + row.head) * rows + row.i] = statistics;
  }

private:
  __device__ static float dot(const Part &a, const Part &b, float sum) {
    const auto *x = reinterpret_cast<const Element *>(&a), *y = reinterpret_cast<const Element *>(&b);
#pragma unroll
    for (int i = 0; i < kStep; ++i) sum = fmaf(to_float(x[i]), to_float(y[i]), sum);
    return sum;
  }
};

// While a block of threads writes the statistics of a unit, the loads of its next one are under way.
template <int kThreads, int kLanes, class Element, bool kAligned>
__device__ void make_statistics(const BackwardParams &params, const StatisticsWork &work, int32_t block) {
  using Rows = StatisticsRows<kThreads, kLanes, Element, kAligned>;
  const QuerySums &sums = params.query_sums;
  const int64_t cleared = sums.data ? query_sum_count(params.p, sums) / 4 : 0;
  const int64_t of_unit = quotient(cleared + work.units - 1, work.units);
  constexpr int kUnitRows = kThreads / kLanes * Rows::kRows;
  HeadRow first = head_row(params.p, int64_t(block) * kUnitRows + threadIdx.x / kLanes);
  Rows rows;
  rows.load(params, work, first);
  for (int32_t unit = block; unit < work.units; unit += work.blocks) {
    auto *sum = reinterpret_cast<float4 *>(sums.data) + unit * of_unit;
    const auto count = static_cast<int32_t>(min64(of_unit, cleared - unit * of_unit));
    for (int32_t n = static_cast<int32_t>(threadIdx.x); n < count; n += kThreads) sum[n] = float4{};
    const auto result = rows.result(params);
    first = row_after(params.p, first, work.unit_step);
    if (unit + work.blocks < work.units) rows.load(params, work, first);
    Rows::write(params, result);
  }
}

} // namespace fdm::cuda
