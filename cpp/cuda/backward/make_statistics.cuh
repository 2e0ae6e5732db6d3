// SPDX-License-Identifier: BSD-3-Clause
// Computes the statistics of each row, lse to base 2 and delta = dO . O - dlse, with eight threads for each row of
// each head. Also clears the sums of dq, if there are any.
#pragma once

#include "../tile/products.cuh"
#include "query_sums.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {

constexpr int kLanes = 8; // the lanes of a row read one line of the cache at a time
// Beyond this, lse has lost log(sum) to rounding, and P cannot be recomputed. That happens only where every kept key
// of a row has a bias like finfo.min. Such a row counts as one that keeps nothing.
constexpr float kUnusableLse = 1e30f;

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

// Most numbers fit 32 bits, and divisions of those take a fifth of the time.
__device__ __forceinline__ int64_t quotient(int64_t n, int64_t d) {
  if (((n | d) >> 32) == 0) return static_cast<uint32_t>(n) / static_cast<uint32_t>(d);
  return n / d;
}

template <int kThreads, class Element, bool kAligned>
__device__ void make_statistics(const BackwardParams &params, int64_t block, int64_t blocks) {
  const fdm_problem &p = params.p;
  const fdm_tensor &out = params.a.out, &dout = params.a.dout, &lse = params.a.lse, &dlse = params.a.dlse;
  const int64_t rows = total_rows(p), number = block * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t row = quotient(number, p.heads), head = number - row * p.heads;
  const int64_t batch = quotient(row, rows), i = row - batch * rows;
  const bool exists = batch < (is_varlen(p) ? 1 : p.batch);
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
    if (!empty && present(dlse)) delta -= value_of(dlse);
    params.statistics[(batch * p.heads + head) * rows + i] = {empty ? INFINITY : natural * kLog2E, delta};
  }
  if (!params.query_sums.data) return;
  const int64_t count = query_sum_count(p, params.query_sums) / 4;
  auto *sums = reinterpret_cast<float4 *>(params.query_sums.data);
  for (int64_t n = block * kThreads + threadIdx.x; n < count; n += blocks * kThreads) sums[n] = float4{};
}

} // namespace fdm::cuda
