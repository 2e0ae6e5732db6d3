// SPDX-License-Identifier: BSD-3-Clause
// Computes the statistics of each row, lse to base 2 and delta = dO . O - dlse, or delta alone, with eight threads for
// each row of each head.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../ptx/dependent.cuh"
#include "../tile/products.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 8; // the lanes of a row read one line of the cache at a time
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
__device__ float row_total(float sum) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kThreads) row_statistics_kernel(const __grid_constant__ BackwardParams params) {
  ptx::start_dependents();
  const fdm_problem &p = params.p;
  const fdm_tensor &out = params.a.out, &dout = params.a.dout, &lse = params.a.lse, &dlse = params.a.dlse;
  const int64_t rows = total_rows(p), number = int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t head = number % p.heads, i = number / p.heads % rows, batch = number / p.heads / rows;
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
    const int64_t place = (batch * p.heads + head) * rows + i;
    if (params.deltas)
      params.deltas[place] = delta;
    else
      params.statistics[place] = {empty ? INFINITY : natural * kLog2E, delta};
  }
  if (blockIdx.x == 0) ptx::wait_for_kernel_ahead();
}

template <class Element>
cudaError_t launch_for(const BackwardParams &params, bool beside_keys, int64_t blocks, cudaStream_t stream) {
  const bool aligned = params.dout_aligned && rows_are_aligned(params.a.out, params.p.head_dim);
  const auto kernel = aligned ? row_statistics_kernel<Element, true> : row_statistics_kernel<Element, false>;
  if (beside_keys) return launch<Overlap::kernel_ahead>(kernel, blocks, kThreads, 0, stream, params);
  return launch(kernel, blocks, kThreads, 0, stream, params);
}

} // namespace

cudaError_t launch_row_statistics(const BackwardParams &params, bool beside_keys, cudaStream_t stream) {
  const fdm_problem &p = params.p;
  const int64_t blocks = ceil_div((is_varlen(p) ? 1 : p.batch) * total_rows(p) * p.heads, kThreads / kLanes);
  return p.q.dtype == FDM_FLOAT16 ? launch_for<__half>(params, beside_keys, blocks, stream)
                                  : launch_for<__nv_bfloat16>(params, beside_keys, blocks, stream);
}

} // namespace fdm::cuda
