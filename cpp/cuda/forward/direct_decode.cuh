// SPDX-License-Identifier: BSD-3-Clause
// Forward pass for one query over few keys (decode). Only latency matters, so all independent loads are issued early.
//
// Each warp takes 32 keys at a time. K and V go directly from global memory to the registers of mma.sync: the order
// of dimensions in the product with K, and of rows in the product with V, is free. So a thread loads 16 bytes instead
// of single elements. Both products are transposed (keys by queries, dimensions by queries), so up to 8 heads share a
// tile. There is no plan, no list, and no barrier before the results of the warps are merged. A warp loads its first
// keys together with their booleans and biases, kept or not. Of later keys it loads the kept ones only.
//
// The warps of a thread block merge their results in shared memory. The blocks of a cluster send theirs to its first
// block. If several clusters share the keys, combine.cu merges their partial results.
#pragma once

#include "../tile/sink.cuh"
#include "direct_decode.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/dependent.cuh"
#include "ptx/matrix.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension> struct DirectDecodeConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kKeys = kDirectKeys, kSteps = kKeys / 16; // of a warp at a time, and steps of mma.sync
  static constexpr int kPitch = kHeadDim + 4;                    // of a row of results in shared memory
};

template <class Config> struct DirectDecodeShared {
  alignas(16) float out[kDirectWarps][kDirectRows][Config::kPitch];
  // The first block of a cluster receives the results of all blocks, and {maximum, sum} of their rows.
  alignas(16) float block_out[kDirectSplits][kDirectRows][Config::kHeadDim];
  float4 block_statistics[kDirectSplits][kDirectRows];
  float maximum[kDirectWarps][kDirectRows], sum[kDirectWarps][kDirectRows];
  float sink[kDirectRows];
  uint64_t results_arrived; // the barrier of the first block, complete when all results have arrived
};

template <class Config> struct DirectDecodeWarp {
  using Element = typename Config::Element;
  static constexpr int kHeadDim = Config::kHeadDim, kKeys = Config::kKeys, kSteps = Config::kSteps;
  static constexpr int kKeyLoads = kHeadDim / 32, kValueLoads = (kHeadDim + 63) / 64; // of 16 bytes of a row
  static constexpr uint32_t kAllKeys = 0xffffffffu;

  const DirectDecodeParams &params;
  int lane, row, quad; // row of this thread in a tile of 8 rows, and pair of its elements
  int rows;            // that exist
  int32_t keys;        // of the sequence
  int32_t first_warp_key, key_step;
  bool has_query;
  const uint16_t *q_row, *k_rows, *v_rows;
  const uint8_t *mask;
  ScoreView bias;

  uint4 q[kKeyLoads], k[kSteps][2][kKeyLoads], v[kSteps][4][kValueLoads];
  // out[i][d]: dimension 64 i + 8 row + 2 d of queries 2 quad and 2 quad + 1, then the next dimension of both.
  float out[kValueLoads][4][4];
  float maximum[2], sum[2];

  __device__ DirectDecodeWarp(const DirectDecodeParams &parameters, const DirectDecodePlace &place)
      : params(parameters), lane(threadIdx.x % 32), row(lane / 4), quad(lane % 4) {
    const int warps = int(blockDim.x) / 32;
    first_warp_key = ((place.part * params.splits + int(blockIdx.y)) * warps + int(threadIdx.x) / 32) * kKeys;
    key_step = params.parts * params.splits * warps * kKeys;
    find_tensors(place);
  }
  __device__ void find_tensors(const DirectDecodePlace &place) {
    keys = place.keys;
    rows = place.rows;
    has_query = row < rows && place.exists;
    q_row = params.q + params.q_strides.offset(place, place.first_query, place.head + row) + quad * 8;
    k_rows = params.k + params.k_strides.offset(place, place.first_key + row, place.kv_head) + quad * 8;
    v_rows = params.v + params.v_strides.offset(place, place.first_key + 2 * quad, place.kv_head) + row * 8;
    mask = params.mask + params.mask_strides.offset(place);
    const int64_t first = params.bias_strides.offset(place);
    bias = {static_cast<const char *>(params.bias) + (params.bias_dtype == FDM_FLOAT32 ? 4 : 2) * first, 0,
            params.bias_strides.key, params.bias_dtype, false};
  }

  // Facts about a key of this thread, as stored in memory.
  struct KeyBits {
    uint32_t kept, bias;
  };
  __device__ KeyBits load_key_bits(int32_t first) const {
    KeyBits bits{0, 0};
    const int32_t key = first + lane;
    if (key >= keys) return bits;
    bits.kept = params.mask ? mask[int64_t(key) * params.mask_strides.key] : 1;
    if (params.bias) bits.bias = bias.load_bits(key);
    return bits;
  }
  // The base-2 bias of the key; -inf if it is dropped.
  __device__ float key_shift(const KeyBits &bits) const {
    if (bits.kept == 0) return -INFINITY;
    return params.bias ? to_base_2(bias.convert(bits.bias)) : 0.0f;
  }

  __device__ bool has_chunk(int chunk) const { return chunk * 8 < params.head_dim; }
  __device__ static uint4 load(const uint16_t *from, bool exists) {
    return exists ? *reinterpret_cast<const uint4 *>(from) : uint4{};
  }

  __device__ void load_queries() {
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) q[i] = load(q_row + 32 * i, has_query && has_chunk(4 * i + quad));
  }
  // Loads key first + j if bit j of `wanted` is set. A thread has the keys 8 n + row of K, and 2 quad + 8 n and the
  // next of V.
  __device__ void load_keys(int32_t first, uint32_t wanted) {
    wanted >>= row;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int j = 16 * step + 8 * tile;
        const uint16_t *from = k_rows + int64_t(first + j) * params.k_strides.row;
#pragma unroll
        for (int i = 0; i < kKeyLoads; ++i)
          k[step][tile][i] = load(from + 32 * i, wanted >> j & has_chunk(4 * i + quad));
      }
  }
  __device__ static constexpr int key_of_value(int i) { return i % 2 + i / 2 * 8; }
  __device__ void load_values(int32_t first, uint32_t wanted) {
    wanted >>= 2 * quad;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int j = 16 * step + key_of_value(n);
        const uint16_t *from = v_rows + int64_t(first + j) * params.v_strides.row;
#pragma unroll
        for (int i = 0; i < kValueLoads; ++i) v[step][n][i] = load(from + 64 * i, wanted >> j & has_chunk(8 * i + row));
      }
  }
  // Zeroes V: 0 * NaN is NaN.
  __device__ void clear_dropped_values(uint32_t kept) {
    kept >>= 2 * quad;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (!(kept >> (16 * step + key_of_value(n)) & 1))
#pragma unroll
          for (int i = 0; i < kValueLoads; ++i) v[step][n][i] = uint4{};
  }

  // Base-2 scores of query 2 quad + i % 2: of keys 16 step + row, and from i = 2 on, of 16 step + row + 8.
  using Scores = float[kSteps][4];
  __device__ void multiply_keys(Scores &scores) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float (&sums)[4] = scores[step];
      sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeyLoads; ++i) {
        const uint4 &x = k[step][0][i], &y = k[step][1][i];
        ptx::mma<Element>(sums, {x.x, y.x, x.y, y.y}, q[i].x, q[i].y);
        ptx::mma<Element>(sums, {x.z, y.z, x.w, y.w}, q[i].z, q[i].w);
      }
    }
  }
  template <bool kHasSoftcap> __device__ void finish_scores(Scores &scores, float shift) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = __shfl_sync(kAllKeys, shift, 16 * step + 8 * half + row);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float slope, &score = scores[step][2 * half + i];
          score = x == -INFINITY ? x : params.factors.template score<kHasSoftcap>(score, x, &slope);
        }
      }
  }

  // Turns the scores into probabilities relative to the running maximum, which is updated.
  __device__ void softmax(Scores &scores, bool first) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = maximum[i];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) largest = fmaxf(largest, fmaxf(scores[step][i], scores[step][2 + i]));
      largest = column_max(largest);
      const float shift = largest == -INFINITY ? 0.0f : largest, factor = ptx::exp2_approximate(maximum[i] - shift);
      maximum[i] = largest;
      float added = 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &score = scores[step][2 * half + i];
          score = ptx::exp2_approximate(score - shift);
          added += score;
        }
      sum[i] = sum[i] * factor + added;
      if (first) continue;
#pragma unroll
      for (int n = 0; n < kValueLoads; ++n)
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          out[n][d][i] *= factor;
          out[n][d][2 + i] *= factor;
        }
    }
  }
  // Reduce over the threads that hold a column of an accumulator.
  __device__ static float column_max(float x) {
#pragma unroll
    for (int across = 4; across < 32; across *= 2) x = fmaxf(x, __shfl_xor_sync(kAllKeys, x, across));
    return x;
  }
  __device__ static float column_sum(float x) {
#pragma unroll
    for (int across = 4; across < 32; across *= 2) x += __shfl_xor_sync(kAllKeys, x, across);
    return x;
  }

  __device__ void multiply_values(const Scores &scores) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float (&x)[4] = scores[step];
      const uint32_t p = ptx::transpose(ptx::pack<Element>(x[0], x[1])),
                     p_8 = ptx::transpose(ptx::pack<Element>(x[2], x[3]));
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i)
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const auto word = [&](int n) {
            const uint4 &y = v[step][n][i];
            return d == 0 ? y.x : d == 1 ? y.y : d == 2 ? y.z : y.w;
          };
          constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;
          ptx::mma<Element>(out[i][d],
                            {__byte_perm(word(0), word(1), kLow), __byte_perm(word(0), word(1), kHigh),
                             __byte_perm(word(2), word(3), kLow), __byte_perm(word(2), word(3), kHigh)},
                            p, p_8);
        }
    }
  }

  __device__ void run() {
    KeyBits bits = load_key_bits(first_warp_key), next_bits = load_key_bits(first_warp_key + key_step);
    load_queries();
    const int32_t available = keys - first_warp_key;
    uint32_t wanted = available >= kKeys ? kAllKeys : available > 0 ? (1u << available) - 1 : 0u;
    load_keys(first_warp_key, wanted);
    load_values(first_warp_key, wanted);
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i)
#pragma unroll
      for (int d = 0; d < 4; ++d) out[i][d][0] = out[i][d][1] = out[i][d][2] = out[i][d][3] = 0.0f;
    float shift = key_shift(bits);
    uint32_t kept = __ballot_sync(kAllKeys, shift != -INFINITY);
    if (wanted != kept) clear_dropped_values(kept);
#pragma unroll 1
    for (int32_t first = first_warp_key; first < keys; first += key_step) {
      Scores scores;
      multiply_keys(scores);
      if (params.has_softcap)
        finish_scores<true>(scores, shift);
      else
        finish_scores<false>(scores, shift);
      const int32_t next = first + key_step;
      if (next < keys) {
        shift = key_shift(next_bits);
        kept = __ballot_sync(kAllKeys, shift != -INFINITY);
        load_keys(next, kept);
        next_bits = load_key_bits(next + key_step);
      }
      softmax(scores, first == first_warp_key);
      multiply_values(scores);
      if (next < keys) load_values(next, kept);
    }
    sum[0] = column_sum(sum[0]);
    sum[1] = column_sum(sum[1]);
  }

  __device__ void store_results(DirectDecodeShared<Config> &shared) const {
    const int warp = int(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * quad + i;
      if (r >= rows) continue;
#pragma unroll
      for (int n = 0; n < kValueLoads; ++n)
#pragma unroll
        for (int d = 0; d < 4; d += 2)
          *reinterpret_cast<float4 *>(&shared.out[warp][r][64 * n + 8 * row + 2 * d]) =
              make_float4(out[n][d][i], out[n][d][2 + i], out[n][d + 1][i], out[n][d + 1][2 + i]);
      if (row == 0) {
        shared.maximum[warp][r] = maximum[i];
        shared.sum[warp][r] = sum[i];
      }
    }
  }
};

// Four elements of an unnormalized result, with the base-2 maximum and the sum of their row.
struct DecodedPart {
  float4 value;
  float maximum, sum;
};

// Merges part(i) for i < count in order; count is at most kMaxCount.
template <int kMaxCount, class Part> __device__ __forceinline__ DecodedPart merge_parts(int count, const Part &part) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kMaxCount; ++i)
    if (i < count) top = fmaxf(top, part(i).maximum);
  const float shift = top == -INFINITY ? 0.0f : top;
  DecodedPart merged{{0.0f, 0.0f, 0.0f, 0.0f}, top, 0.0f};
#pragma unroll
  for (int i = 0; i < kMaxCount; ++i)
    if (i < count) {
      const DecodedPart x = part(i);
      const float factor = ptx::exp2_approximate(x.maximum - shift);
      merged.sum += x.sum * factor;
      merged.value.x += x.value.x * factor;
      merged.value.y += x.value.y * factor;
      merged.value.z += x.value.z * factor;
      merged.value.w += x.value.w * factor;
    }
  return merged;
}

template <class Config>
__device__ __forceinline__ void write_decoded(const DirectDecodeParams &params,
                                              const DirectDecodeShared<Config> &shared, const DirectDecodePlace &place,
                                              int r, int d, const DecodedPart &x) {
  using Element = typename Config::Element;
  if (params.parts > 1) {
    const int64_t row = (int64_t(place.part) * params.sequences + place.batch) * params.heads + place.head + r;
    *reinterpret_cast<float4 *>(params.partials.out + row * params.head_dim + d) = x.value;
    if (d > 0) return;
    params.partials.max[row] = x.maximum;
    params.partials.sum[row] = x.sum;
    return;
  }
  if (!place.exists) return;
  const float factor = row_normalizer(shared.sink[r], x.maximum, x.sum);
  const bool blank = x.sum == 0.0f;
  const int64_t offset = params.out_strides.offset(place, place.first_query, place.head + r) + d;
  const auto packed = [&](const auto &pack) {
    const uint32_t low = pack(x.value.x * factor, x.value.y * factor),
                   high = pack(x.value.z * factor, x.value.w * factor);
    return blank ? uint2{} : make_uint2(low, high);
  };
  *reinterpret_cast<uint2 *>(params.out + offset) =
      packed([](float low, float high) { return ptx::pack<Element>(low, high); });
  if (params.out_rest) {
    const uint2 rests = packed([](float low, float high) { return pack_rests<Element>(low, high); });
    *reinterpret_cast<uint32_t *>(params.out_rest + offset) = join_rests(rests.x, rests.y);
  }
  if (d == 0)
    params.lse[params.lse_strides.offset(place, place.first_query, place.head + r)] =
        blank ? -INFINITY : (x.maximum + ptx::log2_approximate(x.sum)) / kLog2E;
}

template <class Config>
__global__ void __launch_bounds__(32 * kDirectWarps, 1)
    direct_decode_kernel(const __grid_constant__ DirectDecodeParams params) {
  auto &shared = dynamic_memory<DirectDecodeShared<Config>>();
  constexpr int kThreadsPerRow = Config::kHeadDim / 4;
  const int splits = params.splits, split = int(blockIdx.y), warps = int(blockDim.x) / 32;
  DirectDecodePlace place(params, blockIdx.x);
  if constexpr (kHasClusters) {
    if (splits > 1) {
      if (split == 0 && threadIdx.x == 0) {
        ptx::init_barrier(shared.results_arrived, 1);
        ptx::expect_from_cluster(shared.results_arrived,
                                 uint32_t((splits - 1) * place.rows * (params.head_dim / 4 + 1)) *
                                     uint32_t(sizeof(float4)));
      }
      ptx::arrive_cluster_barrier();
    }
  }
  {
    DirectDecodeWarp<Config> warp(params, place);
    ptx::wait_for_kernel_ahead();
    ptx::start_dependents(); // not earlier, so that at most one kernel waits beside the running one
    if (params.packed) {
      place.find_sequence(params);
      warp.find_tensors(place);
    }
    warp.run();
    warp.store_results(shared);
  }
  if (split == 0 && int(threadIdx.x) < place.rows)
    shared.sink[threadIdx.x] =
        params.sink.data ? params.sink.load(0, place.head + int(threadIdx.x)) * kLog2E : -INFINITY;
  __syncthreads();
  if constexpr (kHasClusters)
    if (splits > 1) ptx::wait_cluster_barrier();
  const auto for_elements = [&](const auto &function) {
    for (int i = int(threadIdx.x); i < place.rows * kThreadsPerRow; i += int(blockDim.x))
      if (const int r = i / kThreadsPerRow, d = i % kThreadsPerRow * 4; d < params.head_dim) function(r, d);
  };
  for_elements([&](int r, int d) {
    const DecodedPart merged = merge_parts<kDirectWarps>(warps, [&](int w) {
      return DecodedPart{*reinterpret_cast<const float4 *>(&shared.out[w][r][d]), shared.maximum[w][r],
                         shared.sum[w][r]};
    });
    if (splits == 1) return write_decoded(params, shared, place, r, d, merged);
    if constexpr (kHasClusters) {
      const float4 top{merged.maximum, merged.sum, 0.0f, 0.0f};
      if (split == 0) {
        *reinterpret_cast<float4 *>(&shared.block_out[0][r][d]) = merged.value;
        if (d == 0) shared.block_statistics[0][r] = top;
      } else {
        ptx::RemoteBuffer(&shared.block_out[split][r][d], shared.results_arrived, 0).store(0, merged.value);
        if (d == 0) ptx::RemoteBuffer(&shared.block_statistics[split][r].x, shared.results_arrived, 0).store(0, top);
      }
    }
  });
  if constexpr (kHasClusters) {
    if (splits == 1 || split != 0) return;
    __syncthreads();
    ptx::wait_for_cluster(shared.results_arrived, 0);
    for_elements([&](int r, int d) {
      write_decoded(params, shared, place, r, d, merge_parts<kDirectSplits>(splits, [&](int n) {
                      const float4 top = shared.block_statistics[n][r];
                      return DecodedPart{*reinterpret_cast<const float4 *>(&shared.block_out[n][r][d]), top.x, top.y};
                    }));
    });
  }
}

} // namespace fdm::cuda
