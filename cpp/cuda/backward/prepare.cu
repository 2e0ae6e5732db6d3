// SPDX-License-Identifier: BSD-3-Clause
// What the backward pass needs before it computes, in one launch whose blocks of threads have different work:
//   the kept keys of each bucket are ordered;
//   the statistics of each row, lse to base 2 and delta = dO . O - dlse, are computed with eight threads for each row
//   of each head, and the sums of dq, if there are any, cleared;
//   dk, dv and the sums of the bias gradient are cleared where no other kernel writes all of them.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../ptx/dependent.cuh"
#include "../tile/products.cuh"
#include "key_order.cuh"
#include "key_segments.cuh"
#include "make_statistics.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 512;

// How a tensor of 16-bit elements is cleared: all of it as one run of memory, or by rows, eight elements at a time where
// these are aligned.
struct Clearing {
  int64_t chunks; // of `width` elements
  int width;
  bool dense;

  static Clearing of(const fdm_tensor &t) {
    if (!present(t)) return {};
    const int64_t count = t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3];
    const bool dense = t.stride[3] == 1 && t.stride[2] == t.shape[3] && t.stride[1] == t.shape[2] * t.stride[2] &&
                       (t.shape[0] == 1 || t.stride[0] == t.shape[1] * t.stride[1]);
    const int width = rows_are_aligned(t, t.shape[3]) ? 8 : 1;
    return {count / width, width, dense};
  }
};

// Blocks of threads for each work.
struct Division {
  int64_t order, statistics, clearing;
  Clearing dk, dv;
};

// Of bias_sums, which have one row for all queries.
FDM_INLINE int64_t element_count(const fdm_tensor &sums) { return sums.shape[0] * sums.shape[1] * sums.shape[3]; }

// Clears this block's share of a gradient of keys or values, 16-bit elements. What keys in lists have is written later.
__device__ void clear(const BackwardParams &params, const fdm_tensor &t, const Clearing &clearing, int64_t block,
                      int64_t blocks) {
  const fdm_problem &p = params.p;
  const bool looks = !clearing.dense || !is_varlen(p);
  for (int64_t n = block * kThreads + threadIdx.x; n < clearing.chunks; n += blocks * kThreads) {
    int64_t offset = n * clearing.width;
    if (looks) {
      const int64_t c = quotient(offset, t.shape[3]), row = quotient(c, t.shape[2]), batch = quotient(row, t.shape[1]);
      const int64_t kv_head = c - row * t.shape[2], key = row - batch * t.shape[1];
      if (!is_varlen(p)) {
        const RowRange rows = rows_of_key(p, sequence(p, batch), kv_head * group_size(p), key);
        if (rows.first < rows.past) continue;
      }
      offset =
          batch * t.stride[0] + key * t.stride[1] + kv_head * t.stride[2] + (offset - c * t.shape[3]) * t.stride[3];
    }
    auto *element = static_cast<uint16_t *>(t.data) + offset;
    if (clearing.width == 8)
      *reinterpret_cast<uint4 *>(element) = uint4{};
    else
      *element = 0;
  }
}

__device__ void clear_gradients(const BackwardParams &params, const Division &division, int64_t block) {
  const int64_t blocks = division.clearing;
  clear(params, params.a.dk, division.dk, block, blocks);
  clear(params, params.a.dv, division.dv, block, blocks);
  if (!params.wants_bias_sums) return;
  const fdm_tensor &sums = params.bias_sums;
  for (int64_t n = block * kThreads + threadIdx.x; n < element_count(sums); n += blocks * kThreads) {
    const int64_t row = quotient(n, sums.shape[3]), batch = quotient(row, sums.shape[1]);
    store_element(sums,
                  batch * sums.stride[0] + (row - batch * sums.shape[1]) * sums.stride[1] +
                      (n - row * sums.shape[3]) * sums.stride[3],
                  0.0f);
  }
}

template <class Element, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    prepare_backward(const __grid_constant__ BackwardParams params, Division division) {
  __shared__ union {
    typename KeyOrder<kThreads>::Shared keys;
    typename SegmentOrder<kThreads>::Shared segments;
  } shared;
  ptx::start_dependents();
  int64_t block = blockIdx.x;
  if (block < division.order) {
    if (params.keys.segments.rows > 0) return SegmentOrder<kThreads>(params, shared.segments, block).run();
    return KeyOrder<kThreads>{shared.keys}.run(params, block);
  }
  block -= division.order;
  if (block < division.statistics)
    return make_statistics<kThreads, Element, kAligned>(params, block, division.statistics);
  clear_gradients(params, division, block - division.statistics);
}

template <class Element>
cudaError_t launch_for(const BackwardParams &params, const Division &division, cudaStream_t stream) {
  const bool aligned = params.dout_aligned && rows_are_aligned(params.a.out, params.p.head_dim);
  const auto kernel = aligned ? prepare_backward<Element, true> : prepare_backward<Element, false>;
  const int64_t blocks = division.order + division.statistics + division.clearing;
  return launch(kernel, blocks, kThreads, 0, stream, params, division);
}

} // namespace

cudaError_t launch_prepare(const BackwardParams &params, bool key_gradients, cudaStream_t stream) {
  const fdm_problem &p = params.p;
  Division division{};
  division.statistics =
      ceil_div((is_varlen(p) ? 1 : p.batch) * total_rows(p) * p.heads, kThreads / kLanes * kStatisticsRows);
  if (key_gradients) {
    if (params.keys.segments.rows > 0)
      division.order = int64_t(params.keys.heads) * params.keys.segments.count;
    else if (params.keys.listed)
      division.order = params.plan.lists * list_sequences(p) * params.keys.buckets;
    // As much for each thread as there is of a few rows.
    constexpr int64_t kEach = 4 * kThreads;
    if (params.clears_keys) {
      division.dk = Clearing::of(params.a.dk);
      division.dv = Clearing::of(params.a.dv);
    }
    const int64_t gradients = division.dk.chunks + division.dv.chunks;
    division.clearing = ceil_div(gradients + (params.wants_bias_sums ? element_count(params.bias_sums) : 0), kEach);
  }
  return p.q.dtype == FDM_FLOAT16 ? launch_for<__half>(params, division, stream)
                                  : launch_for<__nv_bfloat16>(params, division, stream);
}

} // namespace fdm::cuda
