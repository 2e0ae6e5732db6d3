// SPDX-License-Identifier: BSD-3-Clause
// Computes delta = dO . O of each row of each head, with several threads for each row. O is the sum of out and
// out_rest. Also clears the sums of dq, if there are any. A `Work` defines
//   Params                      the kernel's parameters
//   problem, args, past_batch   of these parameters: the problem, the arguments, the end of the batch elements
//   query_sums                  the numbers to clear
//   write(params, result)       stores the result of a row in the form that the Work's kernels need
#pragma once

#include "../host/launch.cuh"
#include "../tile/copy_rows.cuh"
#include "../tile/products.cuh"
#include "backward.h"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class Element> __device__ float to_float(Element x) {
  if constexpr (__is_same(Element, __half))
    return __half2float(x);
  else
    return __bfloat162float(x);
}

// Sums over the threads of a row. All threads of the warp call this.
template <int kLanes> __device__ __forceinline__ float row_total(float sum) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

// A row of a head. Numbers run over heads first, then over the rows of a batch element, then over batch elements:
// usually the order in memory.
struct HeadRow {
  int32_t batch, i, head;
};

FDM_INLINE HeadRow head_row(const fdm_problem &p, int64_t number) {
  const int64_t rows = total_rows(p), row = quotient(number, p.heads), batch = quotient(row, rows);
  return {static_cast<int32_t>(batch), static_cast<int32_t>(row - batch * rows),
          static_cast<int32_t>(number - row * p.heads)};
}

// The row whose number is the sum of the numbers of two rows. This needs no division.
FDM_INLINE HeadRow advance_row(const fdm_problem &p, const HeadRow &row, const HeadRow &step) {
  const auto heads = static_cast<int32_t>(p.heads), rows = static_cast<int32_t>(total_rows(p));
  HeadRow next{row.batch + step.batch, row.i + step.i, row.head + step.head};
  if (next.head >= heads) {
    next.head -= heads;
    ++next.i;
  }
  if (next.i >= rows) {
    next.i -= rows;
    ++next.batch;
  }
  return next;
}

// The value of lse or dlse of a row.
__device__ __forceinline__ float load_value(const fdm_tensor &t, const HeadRow &row) {
  return static_cast<const float *>(t.data)[row.batch * t.stride[0] + row.head * t.stride[1] + row.i * t.stride[2]];
}

struct RowResult {
  HeadRow row;
  float lse, delta;
};

// The division of the rows. Thread blocks iterate over units of rows. `first` is the first row of all units. row_step
// leads from a thread's row to its next row of the unit, and unit_step to its first row of the block's next unit.
struct StatisticsWork {
  int32_t units, blocks;
  HeadRow first, row_step, unit_step;
};

// This thread's parts of some rows of dO and O. kLanes threads share a row, and a thread has every kLanes-th part of
// it.
template <class Work, int kLanes> struct StatisticsRows {
  using Params = typename Work::Params;
  static constexpr int kRows = kStatisticsRows, kStep = 8; // elements of a part
  using Part = uint4;
  using Rests = uint2; // out_rest of a part's elements

  HeadRow row[kRows];
  Part dout[kRows], out[kRows];
  float lse[kRows];

  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  template <class Stored, class Loaded>
  __device__ static Loaded load_row(const fdm_tensor &t, const HeadRow &row, int d) {
    const auto *start =
        static_cast<const Stored *>(t.data) + row.batch * t.stride[0] + row.i * t.stride[1] + row.head * t.stride[2];
    return *reinterpret_cast<const Loaded *>(start + d);
  }
  __device__ static Part load_part(const fdm_tensor &t, const HeadRow &row, int d) {
    return load_row<uint16_t, Part>(t, row, d);
  }

  // Loads this thread's first part of each of its rows of a unit. `first` is its first row of the unit.
  __device__ void load(const Params &params, const StatisticsWork &work, const HeadRow &first) {
    const fdm_problem &p = Work::problem(params);
    const fdm_backward_args &a = Work::args(params);
    row[0] = first;
#pragma unroll
    for (int n = 1; n < kRows; ++n) row[n] = advance_row(p, row[n - 1], work.row_step);
    const int d = lane() * kStep;
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const bool has_row = row[n].batch < Work::past_batch(params), read = has_row && d < a.out.shape[3];
      dout[n] = read ? load_part(a.dout, row[n], d) : Part{};
      out[n] = read ? load_part(a.out, row[n], d) : Part{};
      lse[n] = has_row ? load_value(a.lse, row[n]) : INFINITY;
    }
  }

  // Computes delta of the loaded rows. Lane n of a row's threads returns the result of row n. All threads of the warp
  // call this.
  __device__ RowResult result(const Params &params) const {
    const fdm_backward_args &a = Work::args(params);
    const int64_t columns = a.out.shape[3];
    RowResult lane_result{row[0], lse[0], 0.0f};
    const bool has_rests =
        present(a.out_rest); // not loaded earlier: that would take registers in calls without out_rest, too
    const auto dot = [&](const Part &dout, const Part &out, const HeadRow &row, int d, float sum) {
      const Rests rests = has_rests ? load_row<uint8_t, Rests>(a.out_rest, row, d) : Rests{};
      return Work::problem(params).q.dtype == FDM_FLOAT16 ? dot_of<__half>(dout, out, rests, sum)
                                                          : dot_of<__nv_bfloat16>(dout, out, rests, sum);
    };
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      float sum = 0.0f;
      if (row[n].batch < Work::past_batch(params) && lane() * kStep < columns)
        sum = dot(dout[n], out[n], row[n], lane() * kStep, sum);
      for (int d = (lane() + kLanes) * kStep; d < columns; d += kLanes * kStep)
        if (row[n].batch < Work::past_batch(params))
          sum = dot(load_part(a.dout, row[n], d), load_part(a.out, row[n], d), row[n], d, sum);
      sum = row_total<kLanes>(sum);
      if (lane() == n) lane_result = {row[n], lse[n], sum};
    }
    return lane_result;
  }

private:
  template <class Element> __device__ static float dot_of(const Part &a, const Part &b, const Rests &rests, float sum) {
    const auto *x = reinterpret_cast<const Element *>(&a), *y = reinterpret_cast<const Element *>(&b);
    const auto *rest = reinterpret_cast<const int8_t *>(&rests);
#pragma unroll
    for (int i = 0; i < kStep; ++i) sum = fmaf(to_float(x[i]), with_rest<Element>(to_float(y[i]), rest[i]), sum);
    return sum;
  }
};

// While a thread block writes the statistics of a unit, the loads of its next unit are in flight.
template <class Work, int kLanes>
__device__ void make_statistics(const typename Work::Params &params, const StatisticsWork &work, int32_t block) {
  using Rows = StatisticsRows<Work, kLanes>;
  constexpr int kThreads = kStatisticsThreads, kUnitRows = kThreads / kLanes * Rows::kRows;
  const fdm_problem &p = Work::problem(params);
  const auto sums = Work::query_sums(params);
  const int64_t sums_per_unit = quotient(sums.count / 4 + work.units - 1, work.units);
  HeadRow first = advance_row(p, work.first, head_row(p, int64_t(block) * kUnitRows + threadIdx.x / kLanes));
  Rows rows;
  rows.load(params, work, first);
  for (int32_t unit = block; unit < work.units; unit += work.blocks) {
    auto *sum = reinterpret_cast<float4 *>(sums.data) + unit * sums_per_unit;
    const auto count = static_cast<int32_t>(min64(sums_per_unit, sums.count / 4 - unit * sums_per_unit));
    for (int32_t n = static_cast<int32_t>(threadIdx.x); n < count; n += kThreads) sum[n] = float4{};
    const RowResult result = rows.result(params);
    first = advance_row(p, first, work.unit_step);
    if (unit + work.blocks < work.units) rows.load(params, work, first);
    if (Rows::lane() < Rows::kRows && result.row.batch < Work::past_batch(params)) Work::write(params, result);
  }
}

// Work::other_work gives some thread blocks other work and returns -1 for them. The others compute the statistics.
template <class Work, int kLanes>
__global__ void __launch_bounds__(kStatisticsThreads, 2)
    prepare_backward(const __grid_constant__ typename Work::Params params, const typename Work::Division division) {
  ptx::start_dependents();
  const int64_t block = Work::other_work(params, division);
  if (block >= 0) make_statistics<Work, kLanes>(params, division.statistics, int32_t(block));
}

template <class Work, int kLanes>
cudaError_t launch_statistics(const typename Work::Params &params, const typename Work::Division &division,
                              int64_t others, cudaStream_t stream) {
  return launch(prepare_backward<Work, kLanes>, division.statistics.blocks + others, kStatisticsThreads, 0, stream,
                params, division);
}
// Launches the kernel for the batch elements from `first_batch` on, with `others` thread blocks for other work.
template <class Work>
cudaError_t launch_statistics(const typename Work::Params &params, typename Work::Division division,
                              const StatisticsDivision &rows, int64_t first_batch, int64_t others,
                              cudaStream_t stream) {
  const int64_t batches = Work::past_batch(params) - first_batch, units = rows.units(batches);
  if (units > 0) {
    const fdm_problem &p = Work::problem(params);
    const int64_t blocks = rows.blocks(batches), together = rows.rows_at_once();
    division.statistics = {int32_t(units),
                           int32_t(blocks),
                           {int32_t(first_batch), 0, 0},
                           head_row(p, together),
                           head_row(p, blocks * together * kStatisticsRows)};
  }
  if (rows.lanes == 4) return launch_statistics<Work, 4>(params, division, others, stream);
  return rows.lanes == 8 ? launch_statistics<Work, 8>(params, division, others, stream)
                         : launch_statistics<Work, 16>(params, division, others, stream);
}

} // namespace fdm::cuda
