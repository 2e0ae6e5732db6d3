// SPDX-License-Identifier: BSD-3-Clause
// Sums float32 numbers in a fixed order. For the gradient of a bias per key, it sums over the batches, heads and keys
// that share an element of the bias. For the gradient of a head's sink, it sums the terms of the rows.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../tile/products.cuh"
#include "backward.h"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

// Element (a, b, c) of `to`, at its strides 0, 1 and 3, is the sum of runs x terms numbers. The first of these
// numbers is sums[a, b, c] at the strides `from`.
struct Reduction {
  fdm_tensor to;
  const float *sums;
  int64_t from[3];
  int64_t runs, run_stride, terms, term_stride;
};

// kLanes threads share the terms of an element: one thread, or a whole thread block.
template <int kLanes>
__global__ void __launch_bounds__(kLanes > 1 ? kLanes : kReduceThreads) reduce(const __grid_constant__ Reduction work) {
  ptx::wait_for_kernel_ahead();
  const fdm_tensor &t = work.to;
  const int64_t number = kLanes > 1 ? blockIdx.x : int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t list = quotient(number, t.shape[3]), c = number - list * t.shape[3];
  const int64_t a = quotient(list, t.shape[1]), b = list - a * t.shape[1];
  if (a >= t.shape[0]) return;
  const float *first = work.sums + a * work.from[0] + b * work.from[1] + c * work.from[2];
  float sum = 0.0f;
  for (int64_t run = 0; run < work.runs; ++run, first += work.run_stride)
#pragma unroll 4
    for (int64_t i = kLanes > 1 ? threadIdx.x : 0; i < work.terms; i += kLanes) sum += first[i * work.term_stride];
  if constexpr (kLanes > 1) {
    __shared__ float partial[kLanes];
    partial[threadIdx.x] = sum;
    for (int half = kLanes / 2; half > 0; half /= 2) {
      __syncthreads();
      if (int(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    }
    sum = partial[0];
    if (threadIdx.x > 0) return;
  }
  const int64_t offset = a * t.stride[0] + b * t.stride[1] + c * t.stride[3];
  if (t.dtype == FDM_FLOAT64)
    static_cast<double *>(t.data)[offset] = sum;
  else
    store_element(t, offset, sum);
}

cudaError_t launch_reduce(const Reduction &work, const ReductionWork &division, cudaStream_t stream) {
  const auto kernel = division.by_block ? reduce<kReduceBlockThreads> : reduce<1>;
  return launch<Overlap::kernel_ahead>(kernel, division.blocks,
                                       division.by_block ? kReduceBlockThreads : kReduceThreads, 0, stream, work);
}

} // namespace

cudaError_t launch_bias_reduce(const BackwardLaunch &launch, cudaStream_t stream) {
  const BackwardParams &params = launch.params;
  const fdm_tensor &t = params.a.dbias, &sums = params.bias_sums;
  const auto summed = [&](int d) { return t.shape[d] == 1 ? sums.shape[d] : 1; };
  const auto stride = [&](int d) { return t.shape[d] == 1 ? 0 : sums.stride[d]; };
  Reduction work{t, static_cast<const float *>(sums.data), {stride(0), stride(1), stride(3)}, 1, 0, 0, 0};
  // The heads of all sequences are evenly spaced in `sums`.
  const int64_t lists = summed(0) * summed(1), list_stride = sums.stride[t.shape[1] == 1 ? 1 : 0];
  if (t.shape[3] != 1) {
    work.terms = lists;
    work.term_stride = list_stride;
  } else if (t.shape[1] == 1) {
    work.terms = lists * sums.shape[3];
    work.term_stride = 1;
  } else {
    work.terms = sums.shape[3];
    work.term_stride = 1;
    work.runs = lists;
    work.run_stride = list_stride;
  }
  return launch_reduce(work, launch.route.bias_reduction, stream);
}

cudaError_t launch_sink_reduce(const BackwardLaunch &work, cudaStream_t stream) {
  const BackwardParams &params = work.params;
  const fdm_problem &p = params.p;
  const int64_t rows = (is_varlen(p) ? 1 : p.batch) * total_rows(p);
  return launch_reduce({params.a.dsink, params.sink_shares, {rows, 0, 0}, 1, 0, rows, 1}, work.route.sink_reduction,
                       stream);
}

} // namespace fdm::cuda
