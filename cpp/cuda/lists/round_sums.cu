// SPDX-License-Identifier: BSD-3-Clause
// Rounds the float32 sums of the backward pass of lists: dk and dv in bands (tile/round_sums.cuh), the gradients of
// biases and sinks element by element.
#include "../tile/round_sums.cuh"

#include <cuda_runtime.h>

#include "lists.h"

namespace fdm::cuda {
namespace {

// A band of 16 rows of the sums, which are ordered by key, then by KV head. blockIdx.y selects dk (0) or dv (1).
struct ListBands {
  using Params = ListBackwardParams;
  static constexpr int kTilesAtOnce = 4, kBlocks = 4;

  const ListBackwardParams &params;
  KeyBand band;
  bool exists;

  __device__ ListBands(const ListBackwardParams &params_, int64_t number) : params(params_) {
    const fdm_tensor &t = KeyBand::gradient(params.backward);
    const int64_t count = params.p.k.shape[0] * params.p.k.shape[1] * params.p.kv_heads;
    exists = present(t) && number * kBandRows < count;
    if (!exists) return;
    ptx::wait_for_kernel_ahead();
    const float *first = KeyBand::is_dv() ? params.sums.dv : params.sums.dk;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = number * kBandRows + accumulator_row(half);
      if (row >= count) continue;
      const int64_t key = quotient(row, params.p.kv_heads), batch = quotient(key, t.shape[1]);
      band.rows.offset[half] = batch * t.stride[0] + (key - batch * t.shape[1]) * t.stride[1] +
                               (row - key * params.p.kv_heads) * t.stride[2];
      band.sums[half] = first + row * params.sum_dim;
    }
  }

  __device__ int tiles() const { return exists ? params.sum_dim / 8 : 0; }
  __device__ void load(int first, float (&x)[kTilesAtOnce][4]) const { band.load(first, x); }
  __device__ void store(int first, const float (&x)[kTilesAtOnce][4]) const {
    band.store(params.backward, params.p.scale, first, x);
  }
  __device__ void end(bool) const {}
};

// blockIdx.y selects contiguous sums and the tensor of the same shape that they are rounded to.
struct ListRounding {
  static constexpr int kMaxTensors = 3;
  fdm_tensor to[kMaxTensors];
  const float *sums[kMaxTensors];
};

__global__ void __launch_bounds__(kFillThreads) round_list_sums(const __grid_constant__ ListRounding work) {
  const fdm_tensor &t = work.to[blockIdx.y];
  const int64_t n = int64_t(blockIdx.x) * kFillThreads + threadIdx.x;
  int64_t place = n, offset = 0;
#pragma unroll
  for (int d = 3; d >= 0; --d) {
    const int64_t before = quotient(place, t.shape[d]);
    offset += (place - before * t.shape[d]) * t.stride[d];
    place = before;
  }
  if (place == 0) store_element(t, offset, work.sums[blockIdx.y][n]);
}

} // namespace

cudaError_t launch_list_rounding(const ListBackwardLaunch &work, cudaStream_t stream) {
  const ListBackwardParams &params = work.params;
  const fdm_backward_args &a = params.backward;
  if (params.sums.dk || params.sums.dv) {
    const Grid grid(work.route.key_rounding_blocks, 2);
    if (cudaError_t error = launch(round_sums<ListBands>, grid, kRoundingThreads, 0, stream, params)) return error;
  }
  ListRounding rounding{};
  int count = 0;
  const auto add = [&](const fdm_tensor &gradient, const float *sums) {
    if (!sums) return;
    rounding.to[count] = gradient;
    rounding.sums[count++] = sums;
  };
  add(a.dbias, params.sums.bias);
  add(a.dindex_bias, params.sums.index);
  add(a.dsink, params.sums.sink);
  return launch(round_list_sums, Grid(work.route.bias_rounding_blocks, count), kFillThreads, 0, stream, rounding);
}

} // namespace fdm::cuda
