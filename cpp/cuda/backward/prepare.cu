// SPDX-License-Identifier: BSD-3-Clause
// What the backward pass needs before it computes, in one launch whose blocks of threads have different work:
//   the kept keys of each bucket are ordered;
//   the statistics of each row, lse to base 2 and delta = dO . O - dlse, are computed with eight threads for each row
//   of each head, and the sums of dq, if there are any, cleared;
//   dk, dv and the sums of the bias gradient are cleared where no other kernel writes all of them.
#include <cuda_runtime.h>

#include <algorithm>

#include "../host/launch.cuh"
#include "../tile/copy_rows.cuh"
#include "../tile/products.cuh"
#include "key_order.cuh"
#include "key_segments.cuh"
#include "make_statistics.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 512;

// Blocks of threads for each work.
struct Division {
  int64_t order, clearing;
  StatisticsWork statistics;
  bool vectors; // rows of dk and dv are cleared eight elements at a time
};

// Units of up to kUnitKeys keys of a head, one for each lane, whose gradients are cleared if nobody keeps them.
constexpr int kUnitKeys = 32;
FDM_INLINE int64_t key_units(const BackwardParams &params) {
  const fdm_tensor &t = present(params.a.dk) ? params.a.dk : params.a.dv;
  return params.clears_keys && present(t) ? t.shape[0] * params.p.kv_heads * ceil_div(t.shape[1], kUnitKeys) : 0;
}

// Of bias_sums, which have one row for all queries.
FDM_INLINE int64_t element_count(const fdm_tensor &sums) { return sums.shape[0] * sums.shape[1] * sums.shape[3]; }

// Clears eight elements, or one, of a row of a gradient.
__device__ void clear(const fdm_tensor &t, int64_t offset, bool vector) {
  if (!present(t)) return;
  auto *element = static_cast<uint16_t *>(t.data) + offset;
  if (vector)
    *reinterpret_cast<uint4 *>(element) = uint4{};
  else
    *element = 0;
}

// A warp clears dk and dv of some keys of a head. Those of keys in lists are written later. Each lane finds out about one
// key, so that a warp waits for the mask once; then eight lanes have a key.
__device__ void clear_keys(const BackwardParams &params, int64_t unit, bool vector) {
  const fdm_problem &p = params.p;
  const fdm_tensor &dk = params.a.dk, &dv = params.a.dv, &t = present(dk) ? dk : dv;
  const int64_t units = ceil_div(t.shape[1], kUnitKeys), head_number = quotient(unit, units);
  const int64_t batch = quotient(head_number, p.kv_heads), head = head_number - batch * p.kv_heads;
  const int64_t first = (unit - head_number * units) * kUnitKeys, own = first + threadIdx.x % kUnitKeys;
  bool clears = own < t.shape[1];
  if (clears && !is_varlen(p)) {
    const RowRange rows = rows_of_key(p, whole_sequence(p, batch), head * group_size(p), own);
    clears = rows.first >= rows.past;
  }
  const uint32_t cleared = __ballot_sync(kAllLanes, clears);
  constexpr int kLanesOfKey = 8;
  const int width = vector ? 8 : 1, elements = int(p.head_dim);
  for (int n = int(threadIdx.x) % kUnitKeys / kLanesOfKey; n < kUnitKeys; n += kUnitKeys / kLanesOfKey) {
    if (!(cleared >> n & 1)) continue;
    const auto offset = [&](const fdm_tensor &gradient, int d) {
      return batch * gradient.stride[0] + (first + n) * gradient.stride[1] + head * gradient.stride[2] +
             d * gradient.stride[3];
    };
    for (int d = int(threadIdx.x) % kLanesOfKey * width; d < elements; d += kLanesOfKey * width) {
      clear(dk, offset(dk, d), vector);
      clear(dv, offset(dv, d), vector);
    }
  }
}

__device__ void clear_gradients(const BackwardParams &params, const Division &division, int64_t block) {
  const int64_t blocks = division.clearing;
  const int64_t units = key_units(params);
  for (int64_t n = block * (kThreads / 32) + threadIdx.x / 32; n < units; n += blocks * (kThreads / 32))
    clear_keys(params, n, division.vectors);
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

template <class Element, bool kAligned, int kLanes>
__global__ void __launch_bounds__(kThreads, 2)
    prepare_backward(const __grid_constant__ BackwardParams params, Division division) {
  __shared__ union {
    typename KeyOrder<kThreads>::Shared keys;
    typename SegmentOrder<kThreads>::Shared segments;
  } shared;
  ptx::start_dependents();
  // Blocks that order keys wait most of the time and those of the statistics load and store: so they take turns.
  const int64_t turns = min64(division.order, division.statistics.blocks), number = blockIdx.x;
  const bool in_turns = number < 2 * turns;
  const int64_t block = in_turns ? number / 2 : number - turns;
  if (in_turns ? number % 2 == 0 : block < division.order) {
    if (params.keys.segments.rows > 0) return SegmentOrder<kThreads>(params, shared.segments, block).run();
    return KeyOrder<kThreads>{shared.keys}.run(params, block);
  }
  if (block < division.statistics.blocks)
    return make_statistics<kThreads, kLanes, Element, kAligned>(params, division.statistics, int32_t(block));
  clear_gradients(params, division, number - division.order - division.statistics.blocks);
}

// The lanes of a row read all of a row of up to 64 or 128 elements at once.
constexpr int kFewLanes = 8, kManyLanes = 16;

// Blocks of threads have up to so many units of rows, as long as there are a few blocks for each SM.
constexpr int64_t kMostUnits = 8, kWantedBlocks = 768;

StatisticsWork divide_rows(const fdm_problem &p, int lanes, int rows_of_thread) {
  const int64_t all = (is_varlen(p) ? 1 : p.batch) * total_rows(p) * p.heads, together = kThreads / lanes;
  if (all == 0) return {};
  const int64_t units = ceil_div(all, together * rows_of_thread);
  const int64_t blocks = std::max(std::min(units, kWantedBlocks), units / kMostUnits);
  return {int32_t(units), int32_t(blocks), head_row(p, together), head_row(p, blocks * together * rows_of_thread)};
}

template <class Element> cudaError_t launch_for(const BackwardParams &params, Division division, cudaStream_t stream) {
  const fdm_problem &p = params.p;
  const bool aligned = params.dout_aligned && rows_are_aligned(params.a.out, p.head_dim);
  const bool many = aligned && p.head_dim > 64;
  auto kernel = aligned ? prepare_backward<Element, true, kFewLanes> : prepare_backward<Element, false, kFewLanes>;
  if (many) kernel = prepare_backward<Element, true, kManyLanes>;
  division.statistics = divide_rows(p, many ? kManyLanes : kFewLanes, statistics_rows(aligned));
  return launch(kernel, division.order + division.statistics.blocks + division.clearing, kThreads, 0, stream, params,
                division);
}

} // namespace

cudaError_t launch_prepare(const BackwardParams &params, bool key_gradients, cudaStream_t stream) {
  const fdm_problem &p = params.p;
  Division division{};
  if (key_gradients) {
    if (params.keys.segments.rows > 0)
      division.order = int64_t(params.keys.heads) * params.keys.segments.count;
    else if (params.keys.listed)
      division.order = params.plan.lists * list_sequences(p) * params.keys.buckets;
    const auto is_aligned = [&](const fdm_tensor &t) { return !present(t) || rows_are_aligned(t, p.head_dim); };
    division.vectors = is_aligned(params.a.dk) && is_aligned(params.a.dv);
    constexpr int64_t kSums = 4; // of a thread
    const int64_t keys = ceil_div(key_units(params), kThreads / 32);
    const int64_t sums = params.wants_bias_sums ? ceil_div(element_count(params.bias_sums), kSums * kThreads) : 0;
    division.clearing = std::max(keys, sums);
  }
  return p.q.dtype == FDM_FLOAT16 ? launch_for<__half>(params, division, stream)
                                  : launch_for<__nv_bfloat16>(params, division, stream);
}

} // namespace fdm::cuda
