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

// The dot products of kRows pairs of rows, of which kLanes threads each have a part; a null pointer is a row of zeros. kAligned reads eight elements at a time. The
// head dimension is then a multiple of 8.
template <bool kAligned, int kLanes, int kRows, class Element>
__device__ void dot(const Element *const (&a)[kRows], int64_t a_stride, const Element *const (&b)[kRows],
                    int64_t b_stride, int head_dim, float (&sums)[kRows]) {
  constexpr int kStep = kAligned ? 8 : 1;
#pragma unroll
  for (float &sum : sums) sum = 0.0f;
  for (int d = threadIdx.x % kLanes * kStep; d < head_dim; d += kLanes * kStep) {
    if constexpr (kAligned) {
      uint4 x[kRows], y[kRows];
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        x[n] = a[n] ? *reinterpret_cast<const uint4 *>(a[n] + d) : uint4{};
        y[n] = a[n] ? *reinterpret_cast<const uint4 *>(b[n] + d) : uint4{};
      }
#pragma unroll
      for (int n = 0; n < kRows; ++n) {
        const auto *u = reinterpret_cast<const Element *>(&x[n]), *v = reinterpret_cast<const Element *>(&y[n]);
#pragma unroll
        for (int i = 0; i < kStep; ++i) sums[n] = fmaf(to_float(u[i]), to_float(v[i]), sums[n]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kRows; ++n)
        if (a[n]) sums[n] = fmaf(to_float(a[n][d * a_stride]), to_float(b[n][d * b_stride]), sums[n]);
    }
  }
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

// Each thread has a part of so many rows, whose loads are then under way together.
constexpr int statistics_rows(bool aligned) { return aligned ? 2 : 1; }

template <int kThreads, int kLanes, class Element, bool kAligned>
__device__ void make_statistics(const BackwardParams &params, int64_t block, int64_t blocks) {
  constexpr int kRows = statistics_rows(kAligned);
  const fdm_problem &p = params.p;
  if (params.query_sums.data) {
    const int64_t count = query_sum_count(p, params.query_sums) / 4;
    auto *sums = reinterpret_cast<float4 *>(params.query_sums.data);
    for (int64_t n = block * kThreads + threadIdx.x; n < count; n += blocks * kThreads) sums[n] = float4{};
  }
  const fdm_tensor &out = params.a.out, &dout = params.a.dout, &lse = params.a.lse, &dlse = params.a.dlse;
  const int64_t rows = total_rows(p), batches = is_varlen(p) ? 1 : p.batch;
  const Element *a[kRows], *b[kRows];
  int32_t batch[kRows], head[kRows], i[kRows];
  float natural[kRows], delta[kRows];
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    const int64_t number = (block * kRows + n) * (kThreads / kLanes) + threadIdx.x / kLanes;
    const int64_t row = quotient(number, p.heads);
    const int64_t batch_of_row = quotient(row, rows);
    head[n] = static_cast<int32_t>(number - row * p.heads);
    batch[n] = static_cast<int32_t>(batch_of_row);
    i[n] = static_cast<int32_t>(row - batch_of_row * rows);
    const bool exists = batch[n] < batches;
    const auto row_of = [&](const fdm_tensor &t) -> const Element * {
      if (!exists) return nullptr;
      return static_cast<const Element *>(t.data) + batch[n] * t.stride[0] + i[n] * t.stride[1] + head[n] * t.stride[2];
    };
    a[n] = row_of(dout);
    b[n] = row_of(out);
  }
  const auto value_of = [&](const fdm_tensor &t, int n) {
    return static_cast<const float *>(t.data)[batch[n] * t.stride[0] + head[n] * t.stride[1] + i[n] * t.stride[2]];
  };
#pragma unroll
  for (int n = 0; n < kRows; ++n) natural[n] = a[n] ? value_of(lse, n) : INFINITY;
  dot<kAligned, kLanes>(a, dout.stride[3], b, out.stride[3], int(p.head_dim), delta);
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    delta[n] = row_total<kLanes>(delta[n]);
    if (!a[n] || threadIdx.x % kLanes > 0) continue;
    // What lies in rows that keep nothing may be anything.
    const bool empty = fabsf(natural[n]) > kUnusableLse;
    if (empty) delta[n] = 0.0f;
    RowStatistics row{empty ? INFINITY : natural[n] * kLog2E, delta[n]};
    float dlse_factor = 1.0f;
    if (present(p.sink)) {
      const SinkShare share = empty ? SinkShare{} : sink_share(p, head[n], row.lse);
      params.sink_shares[(head[n] * batches + batch[n]) * rows + i[n]] = -share.of_sink * delta[n];
      row.lse += share.added;
      dlse_factor = exp2f(share.added);
    }
    if (!empty && present(dlse)) row.delta -= value_of(dlse, n) * dlse_factor;
    params.statistics[(batch[n] * p.heads + head[n]) * rows + i[n]] = row;
  }
}

} // namespace fdm::cuda
