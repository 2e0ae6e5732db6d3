// SPDX-License-Identifier: BSD-3-Clause
// Running float64 sums along a row of numbers, separate for each packed sequence.
//
// A row is divided into chunks, one per thread block. If there are several, a first kernel writes the total of each:
// the sum of its numbers that belong to the sequence of its last number. The sum before a chunk is then the sum of
// the totals from the chunk on in which the sequence of its first number begins.
//
// Places are token indices. The sums of the backward pass run from the last token to the first, so its places count
// tokens from the end. A sequence has its tokens in places begin to past in either direction.
#pragma once

#include "../route/gate_route.h"
#include "../tile/block_scan.cuh"
#include "../tile/products.cuh"

namespace fdm::cuda {

struct GateParams {
  fdm_forgetting f;
  int64_t chunks;
  double *totals; // [row][chunk]
};

__device__ __forceinline__ double load_number(const fdm_tensor &t, int64_t offset) {
  return t.dtype == FDM_FLOAT64 ? static_cast<const double *>(t.data)[offset] : double{load_element(t, offset)};
}
__device__ __forceinline__ void store_number(const fdm_tensor &t, int64_t offset, double value) {
  if (t.dtype == FDM_FLOAT64)
    static_cast<double *>(t.data)[offset] = value;
  else
    store_element(t, offset, static_cast<float>(value));
}

// The gates of one head of one batch element.
template <bool kBackward> struct GateRow {
  const fdm_forgetting &f;
  int64_t batch, head;
  int32_t count;

  __device__ GateRow(const fdm_forgetting &f_, uint32_t number) : f(f_) {
    const auto heads = static_cast<uint32_t>(f.log_forget.shape[1]);
    batch = number / heads;
    head = number % heads;
    count = static_cast<int32_t>(f.log_forget.shape[3]);
  }

  __device__ int32_t token(int32_t place) const { return kBackward ? count - 1 - place : place; }
  // The places of the sequence of a place.
  __device__ TokenRange places(int32_t place) const {
    const TokenRange tokens = sequence_of(f, token(place));
    return kBackward ? TokenRange{count - tokens.past, count - tokens.begin} : tokens;
  }
  __device__ int64_t offset(const fdm_tensor &t, int32_t place) const {
    return batch * t.stride[0] + head * t.stride[1] + token(place) * t.stride[3];
  }
  __device__ bool is_token(int32_t place) const {
    const fdm_tensor &t = f.padding;
    return !present(t) || static_cast<const uint8_t *>(t.data)[batch * t.stride[0] + token(place) * t.stride[3]];
  }
  __device__ double gate(int32_t place) const { return load_number(f.log_forget, offset(f.log_forget, place)); }
  // The number that is summed.
  __device__ double operator()(int32_t place) const {
    if (!is_token(place)) return 0;
    return kBackward ? load_number(f.dbias, offset(f.dbias, place)) : clamped_gate(f, gate(place));
  }
};

// The part of a row that a thread block works on. Item i of thread t is place begin + i * kGateThreads + t.
struct GateChunk {
  uint32_t row;
  int32_t number;
  int32_t begin, past;

  __device__ GateChunk(const GateParams &params) {
    const auto chunks = static_cast<uint32_t>(params.chunks); // a grid has fewer than 2^31 blocks
    row = blockIdx.x / chunks;
    number = static_cast<int32_t>(blockIdx.x % chunks);
    begin = number * kGateChunk;
    past = static_cast<int32_t>(min64(params.f.log_forget.shape[3], int64_t{begin} + kGateChunk));
  }
  __device__ int32_t place(int item) const { return begin + item * kGateThreads + static_cast<int32_t>(threadIdx.x); }
  __device__ const double *totals(const GateParams &params) const { return params.totals + row * params.chunks; }
};

// Adds to each lane's value those of lower lanes, as far as these belong to the sequence of the lane's last place. A
// lane stands for `step` places.
__device__ __forceinline__ double sum_lanes(double value, int64_t last_place, int32_t begin, int step) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_id() >= distance && last_place - distance * step >= begin) value += below;
  }
  return value;
}

// Sums along a chunk. All threads of the block call these.
struct ChunkSums {
  static constexpr int kWarps = kGateThreads / 32, kStripes = kWarps * kThreadGates;
  static_assert(kStripes == 32, "a warp sums the stripes");
  // For each stripe of 32 places, in order: the sum up to its last place, and the begin of that place's sequence.
  double stripe[kStripes];
  int32_t begin[kStripes];
  double warp[kWarps];

  // Turns numbers into running sums within the chunk. The sequence of item i begins at begins[i].
  __device__ void sum(int32_t first, double (&value)[kThreadGates], const int32_t (&begins)[kThreadGates]) {
    __syncthreads(); // readers of an earlier call are done
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      const int64_t place = int64_t{first} + i * kGateThreads + threadIdx.x;
      value[i] = sum_lanes(value[i], place, begins[i], 1);
      if (lane_id() != 31) continue;
      stripe[i * kWarps + warp_id()] = value[i];
      begin[i * kWarps + warp_id()] = begins[i];
    }
    __syncthreads();
    if (warp_id() == 0) {
      const int n = lane_id();
      stripe[n] = sum_lanes(stripe[n], int64_t{first} + 32 * n + 31, begin[n], 32);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      const int n = i * kWarps + warp_id();
      if (n > 0 && begins[i] < int64_t{first} + 32 * n) value[i] += stripe[n - 1];
    }
  }

  // Sums a number of each thread. All threads get the sum.
  __device__ double total(double value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
    __syncthreads();
    if (lane_id() == 0) warp[warp_id()] = value;
    __syncthreads();
    double sum = 0;
#pragma unroll
    for (int n = 0; n < kWarps; ++n) sum += warp[n];
    return sum;
  }
};

// The sum of the places before the chunk in the sequence of its first place. Only kernels after that of the totals
// call this.
__device__ __forceinline__ double sum_before(ChunkSums &shared, const GateParams &params, const GateChunk &chunk,
                                             int32_t sequence_begin) {
  if (chunk.number == 0 || sequence_begin >= chunk.begin) return 0;
  const double *totals = chunk.totals(params);
  double sum = 0;
  for (int32_t n = sequence_begin / kGateChunk + static_cast<int32_t>(threadIdx.x); n < chunk.number; n += kGateThreads)
    sum += totals[n];
  return shared.total(sum);
}

} // namespace fdm::cuda
