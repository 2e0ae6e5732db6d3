// SPDX-License-Identifier: BSD-3-Clause
// The gradient of a bias that is the same for every query: sums the float32 sums of each key over the batches, heads
// and keys that share an element of the bias.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../tile/products.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

// The rows of bias_sums that share row (batch, head) of the bias, summed for a key.
struct SharedSums {
  const float *sums;
  int64_t heads, keys; // the sizes of bias_sums
  int64_t first_batch, past_batch, first_head, past_head;

  __device__ SharedSums(const BackwardParams &params, int64_t batch, int64_t head)
      : sums(static_cast<const float *>(params.bias_sums.data)) {
    const fdm_problem &p = params.p;
    const fdm_tensor &t = params.a.dbias;
    heads = p.kv_heads * params.bias_heads;
    keys = list_keys(p);
    first_batch = batch;
    past_batch = batch + 1;
    first_head = head;
    past_head = head + 1;
    if (t.shape[0] == 1) past_batch = is_varlen(p) ? 1 : p.batch;
    if (t.shape[1] == 1) past_head = heads;
  }

  __device__ float operator()(int64_t key) const {
    float sum = 0.0f;
    for (int64_t b = first_batch; b < past_batch; ++b)
      for (int64_t h = first_head; h < past_head; ++h) sum += sums[(b * heads + h) * keys + key];
    return sum;
  }
};

__global__ void __launch_bounds__(kThreads) reduce_keys(const __grid_constant__ BackwardParams params) {
  const fdm_tensor &t = params.a.dbias;
  const int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t key = number % t.shape[3], head = number / t.shape[3] % t.shape[1];
  const int64_t batch = number / t.shape[3] / t.shape[1];
  if (batch >= t.shape[0]) return;
  store_element(t, batch * t.stride[0] + head * t.stride[1] + key * t.stride[3], SharedSums(params, batch, head)(key));
}

// Where all keys share an element of the bias, a block of threads sums each element.
__global__ void __launch_bounds__(kThreads) reduce_all_keys(const __grid_constant__ BackwardParams params) {
  __shared__ float partial[kThreads];
  const fdm_tensor &t = params.a.dbias;
  const int64_t head = blockIdx.x % t.shape[1], batch = blockIdx.x / t.shape[1];
  const SharedSums sum_of(params, batch, head);
  float sum = 0.0f;
  for (int64_t key = threadIdx.x; key < sum_of.keys; key += kThreads) sum += sum_of(key);
  partial[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) store_element(t, batch * t.stride[0] + head * t.stride[1], partial[0]);
}

} // namespace

cudaError_t launch_bias_reduce(const BackwardParams &params, cudaStream_t stream) {
  const fdm_tensor &t = params.a.dbias;
  const int64_t rows = t.shape[0] * t.shape[1], blocks = ceil_div(rows * t.shape[3], kThreads);
  if (t.shape[3] == 1) return launch(reduce_all_keys, rows, kThreads, 0, stream, params);
  return launch(reduce_keys, blocks, kThreads, 0, stream, params);
}

} // namespace fdm::cuda
