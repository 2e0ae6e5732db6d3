// SPDX-License-Identifier: BSD-3-Clause
// Shared by the backward kernels of listed keys: the row statistics that turn scores into P and dS, and the bias
// gradients.
#pragma once

#include "../backward/sum_bands.cuh"
#include "../tile/sink.cuh"
#include "list_tile.cuh"

namespace fdm::cuda {

struct ListRow {
  float lse;       // base-2 LSE without the sink; infinity: the row keeps no key
  float share;     // the keys' share of the softmax; the sink has the rest
  float ds_offset; // dlse - share * delta

  __device__ static ListRow none() { return {INFINITY, 0.0f, 0.0f}; }

  // The statistics of a head of the task's query; delta is dO . O. One thread per row has `adds` and adds to dsink.
  __device__ static ListRow find(const ListBackwardParams &params, const ListTask &task, int64_t head, float delta,
                                 bool adds) {
    const fdm_backward_args &a = params.backward;
    const auto number = [&](const fdm_tensor &t) {
      return static_cast<const float *>(t.data)[head_major_offset(t, task.s, task.query, head)];
    };
    const float lse = number(a.lse) * kLog2E;
    if (lse == -INFINITY) return none();
    const float sink = sink_score(params.p, head), dlse = present(a.dlse) ? number(a.dlse) : 0.0f;
    const float share = 1.0f / (1.0f + ptx::exp2_approximate(sink - lse));
    if (adds && params.sums.sink)
      ptx::add_global(params.sums.sink + head, -delta / (1.0f + ptx::exp2_approximate(lse - sink)));
    return {lse, share, dlse - share * delta};
  }

  // A score exceeds lse only by rounding errors, which grow with the magnitude of biases.
  __device__ float unnormalized_p(float score) const {
    return ptx::exp2_approximate(ptx::min_or_nan(score - lse, 0.0f));
  }
  // Turns an exponential and dO . V into P and dS.
  __device__ void finish(float &p, float &ds) const {
    ds = p * fmaf(share, ds, ds_offset);
    p *= share;
  }
  __device__ bool keeps() const { return lse < INFINITY; }
};

// Adds to the bias gradients of a listed key: `sum` is its dS, summed over rows of the tile, and `entry` its index in
// the list. The float32 sums are contiguous and have the shapes of the biases.
__device__ inline void add_bias_gradients(const ListBackwardParams &params, const ListTask &task, int64_t entry,
                                          int32_t key, float sum) {
  const auto list_of = [&](const fdm_tensor &t, int64_t batch) {
    return batch * t.shape[1] + head_index(params.p, t, task.head);
  };
  if (params.sums.bias) {
    const fdm_tensor &t = params.p.bias;
    const int64_t place = t.shape[3] == 1 ? 0 : task.s.k_begin + key;
    ptx::add_global(params.sums.bias + list_of(t, batch_index(t, task.s)) * t.shape[3] + place, sum);
  }
  if (params.sums.index) {
    const fdm_tensor &t = params.p.index_bias;
    const int64_t row = list_of(t, task.s.batch) * t.shape[2] + task.s.q_begin + task.query;
    ptx::add_global(params.sums.index + row * t.shape[3] + entry, sum);
  }
}

} // namespace fdm::cuda
