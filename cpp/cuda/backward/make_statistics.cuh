// SPDX-License-Identifier: BSD-3-Clause
// Computes the statistics of each row, and its share of the gradient of a sink, with eight threads for each row of each
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

constexpr int kLanes = 8; // the lanes of a row read one line of the cache at a time
template <class Element> __device__ float to_float(Element x) {
  if constexpr (__is_same(Element, __half))
    return __half2float(x);
  else
    return __bfloat162float(x);
}

// kAligned reads eight elements at a time. The head dimension is then a multiple of 8.
template <class Element, bool kAligned>
__device__ float dot(const Element *a, int64_t a_stride, const Element *b, int64_t b_stride, int head_dim) {
  constexpr int kStep = kAligned ? 8 : 1;
  float sum = 0.0f;
#pragma unroll 2
  for (int d = threadIdx.x % kLanes * kStep; d < head_dim; d += kLanes * kStep) {
    if constexpr (kAligned) {
      const uint4 x = *reinterpret_cast<const uint4 *>(a + d), y = *reinterpret_cast<const uint4 *>(b + d);
      const auto *u = reinterpret_cast<const Element *>(&x), *v = reinterpret_cast<const Element *>(&y);
#pragma unroll
      for (int i = 0; i < kStep; ++i) sum = fmaf(to_float(u[i]), to_float(v[i]), sum);
    } else {
      sum = fmaf(to_float(a[d * a_stride]), to_float(b[d * b_stride]), sum);
    }
  }
  return sum;
}

// Sums over the threads of a row. All threads of the warp call it.
__device__ __forceinline__ float row_total(float sum) {
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

template <int kThreads, class Element, bool kAligned>
__device__ void make_statistics(const BackwardParams &params, int64_t block, int64_t blocks) {
  const fdm_problem &p = params.p;
  const fdm_tensor &out = params.a.out, &dout = params.a.dout, &lse = params.a.lse, &dlse = params.a.dlse;
  const int64_t rows = total_rows(p), number = block * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t row = quotient(number, p.heads), head = number - row * p.heads;
  const int64_t batch = quotient(row, rows), i = row - batch * rows;
  const int64_t batches = is_varlen(p) ? 1 : p.batch;
  const bool exists = batch < batches;
  const auto row_of = [&](const fdm_tensor &t) {
    return static_cast<const Element *>(t.data) + batch * t.stride[0] + i * t.stride[1] + head * t.stride[2];
  };
  const auto value_of = [&](const fdm_tensor &t) {
    return static_cast<const float *>(t.data)[batch * t.stride[0] + head * t.stride[1] + i * t.stride[2]];
  };
  const float natural = exists ? value_of(lse) : INFINITY;
  const bool empty = fabsf(natural) > kUnusableLse;
  float delta = 0.0f;
  if (!empty) delta = dot<Element, kAligned>(row_of(dout), dout.stride[3], row_of(out), out.stride[3], int(p.head_dim));
  delta = row_total(delta);
  if (exists && threadIdx.x % kLanes == 0) {
    RowStatistics row{empty ? INFINITY : natural * kLog2E, delta};
    float dlse_factor = 1.0f;
    if (present(p.sink)) {
      const SinkShare share = empty ? SinkShare{} : sink_share(p, head, row.lse);
      params.sink_shares[(head * batches + batch) * rows + i] = -share.of_sink * delta;
      row.lse += share.added;
      dlse_factor = exp2f(share.added);
    }
    if (!empty && present(dlse)) row.delta -= value_of(dlse) * dlse_factor;
    params.statistics[(batch * p.heads + head) * rows + i] = row;
  }
  if (!params.query_sums.data) return;
  const int64_t count = query_sum_count(p, params.query_sums) / 4;
  auto *sums = reinterpret_cast<float4 *>(params.query_sums.data);
  for (int64_t n = block * kThreads + threadIdx.x; n < count; n += blocks * kThreads) sums[n] = float4{};
}

} // namespace fdm::cuda
