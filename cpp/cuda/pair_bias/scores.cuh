// SPDX-License-Identifier: BSD-3-Clause
// The scores of a warp's part of a key block: kRowTiles tiles of 16 rows by 32 keys, in accumulators of mma.sync.
//
// Scores have natural base, not base 2: fma(q.k, scale, bias), then exp2(fma(score, log2 e, -maximum log2 e)). So a
// bias costs one multiply-add, and -inf needs no test. Rare cases are found afterwards: a NaN in a key that no row
// keeps makes results NaN, and a row whose scores have few digits left has a large maximum. The thread block then
// computes its tile again, `exact`, with all tests.
#pragma once

#include "../tile/products.cuh"
#include "../tile/score.cuh"
#include "score_tile.cuh"

namespace fdm::cuda {

constexpr int kSubKeys = 32, kSubTiles = kSubKeys / 8;
// Exact runs raise lower scores to this value, since to base 2 they are beyond the range of float32.
constexpr float kLowestBias = -2.35e38f;

// The keys that each slot keeps: a bit per key, `per_slot` words of 32 bits. The mask bytes are fetched a step ahead.
template <int kWarps> struct KeptBits {
  static constexpr int kReadsAtOnce = 2; // per warp
  uint32_t word[2][kReadsAtOnce * kWarps];

  // Bit n of the result: this thread's key in the n-th word of its warp is kept.
  template <class Table>
  __device__ static __forceinline__ uint32_t fetch(const fdm_problem &p, int slots, int per_slot, int first_key,
                                                   const Table &table) {
    uint32_t kept = 0;
#pragma unroll
    for (int n = 0; n < kReadsAtOnce; ++n) {
      const int number = threadIdx.x / 32 + n * kWarps;
      if (number >= slots * per_slot) break;
      const int slot = slots == 1 ? 0 : number / per_slot;
      const int key = first_key + (number - slot * per_slot) * 32 + threadIdx.x % 32;
      bool keeps = key < int(p.keys) && table.source[slot].exists;
      if (keeps && mask_kind(p) == FDM_MASK_KEYS)
        keeps = table.kept[slot][p.mask.shape[3] == 1 ? 0 : key * p.mask.stride[3]] != 0;
      kept |= uint32_t(keeps) << n;
    }
    return kept;
  }
  __device__ __forceinline__ void store(int buffer, int words, uint32_t kept) {
#pragma unroll
    for (int n = 0; n < kReadsAtOnce; ++n) {
      const int number = threadIdx.x / 32 + n * kWarps;
      if (number >= words) break;
      const uint32_t bits = __ballot_sync(0xffffffffu, kept >> n & 1);
      if (threadIdx.x % 32 == 0) word[buffer][number] = bits;
    }
  }
};

struct PairBiasFactors {
  float scale; // multiplies q.k; with a softcap, the product is the argument of tanh
  float cap;   // the softcap

  __device__ explicit PairBiasFactors(const fdm_problem &p)
      : scale(p.softcap > 0 ? p.scale / p.softcap : p.scale), cap(p.softcap) {}

  // The derivative of a capped score with respect to the uncapped one.
  __device__ __forceinline__ float slope(float product) const {
    const float t = tanh_of(product * scale);
    return 1.0f - t * t;
  }
};

// Whether a row of score accumulators is a query or a key.
enum class ScoreRows { queries, keys };

// Calls function(score, bias) for all scores of a warp. `row` and `key` locate the first in the tile of the bias.
template <ScoreRows kRows, BiasType kBias, int kLeftTiles, int kRightTiles, class Tile, class Function>
__device__ __forceinline__ void for_each_bias(float (&scores)[kLeftTiles][kRightTiles][4], const Tile &tile, int row,
                                              int key, const Function &function) {
#pragma unroll
  for (int m = 0; m < kLeftTiles; ++m)
#pragma unroll
    for (int n = 0; n < kRightTiles; n += 2) {
      float bias[2][4];
      if constexpr (kRows == ScoreRows::keys)
        tile.template read_transposed<kBias>(row + 8 * n, key + 16 * m, bias);
      else
        tile.template read<kBias>(row + 16 * m, key + 8 * n, bias);
#pragma unroll
      for (int i = 0; i < 8; ++i) function(scores[m][n + i / 4][i % 4], bias[i / 4][i % 4]);
    }
}

template <ScoreRows kRows, BiasType kBias, int kLeftTiles, int kRightTiles, class Tile>
__device__ __forceinline__ void add_bias_of(float (&scores)[kLeftTiles][kRightTiles][4], const PairBiasFactors &factors,
                                            const Tile &tile, int row, int key, bool exact) {
  if (factors.cap > 0)
    for_accumulators(scores, [&](int m, int n, int i) { scores[m][n][i] = tanh_of(scores[m][n][i] * factors.scale); });
  const float factor = factors.cap > 0 ? factors.cap : factors.scale;
  for_each_bias<kRows, kBias>(scores, tile, row, key,
                              [&](float &score, float bias) { score = fmaf(score, factor, bias); });
  if (exact)
    for_each_bias<kRows, kBias>(scores, tile, row, key, [&](float &score, float bias) {
      score = bias == -INFINITY ? bias : ptx::max_or_nan(score, kLowestBias);
    });
}

// Turns products of rows and keys into scores. With `exact`, the score of a pair that its bias drops is -inf whatever
// its product is, and other scores stay finite to base 2.
template <ScoreRows kRows, int kLeftTiles, int kRightTiles, class Tile>
__device__ __forceinline__ void add_bias(float (&scores)[kLeftTiles][kRightTiles][4], const PairBiasFactors &factors,
                                         const Tile &tile, int row, int key, bool exact) {
  if (tile.float32_bias)
    add_bias_of<kRows, BiasType::float32>(scores, factors, tile, row, key, exact);
  else
    add_bias_of<kRows, BiasType::element>(scores, factors, tile, row, key, exact);
}

// Multiplies gradients of capped scores by the slope at their products. Zeros stay zeros.
template <int kLeftTiles, int kRightTiles>
__device__ __forceinline__ void multiply_slopes(float (&gradients)[kLeftTiles][kRightTiles][4],
                                                const float (&products)[kLeftTiles][kRightTiles][4],
                                                const PairBiasFactors &factors) {
  for_accumulators(gradients, [&](int m, int n, int i) {
    float &gradient = gradients[m][n][i];
    if (gradient != 0.0f) gradient *= factors.slope(products[m][n][i]);
  });
}

// Sets to -inf the scores of keys that are not in `word`, and of keys beyond the causal limit: row r of the warp sees
// the keys up to `limit` + r, counted from the first. Accumulator rows are queries.
template <int kRowTiles>
__device__ __forceinline__ void drop_keys(float (&scores)[kRowTiles][kSubTiles][4], uint32_t word, int limit) {
  if (word != ~0u) {
    const uint32_t bits = word >> accumulator_column();
    for_pairs<kSubTiles>([&](int n, int i) {
      const bool keeps = bits >> (8 * n + i) & 1;
      for_pairs<kRowTiles>([&](int m, int half) {
        if (!keeps) scores[m][n][2 * half + i] = -INFINITY;
      });
    });
  }
  if (limit >= kSubKeys - 1) return;
  for_pairs<kRowTiles>([&](int m, int half) {
    const int last = limit + 16 * m + accumulator_row(half) - accumulator_column();
    for_pairs<kSubTiles>([&](int n, int i) {
      if (8 * n + i > last) scores[m][n][2 * half + i] = -INFINITY;
    });
  });
}

// A bit for each of this thread's columns that has a value other than `dead` in an existing row of the warp
// (exists(row tile, half)).
template <int kLeftTiles, int kRightTiles, class Exists>
__device__ __forceinline__ uint32_t live_columns(const float (&values)[kLeftTiles][kRightTiles][4], float dead,
                                                 const Exists &exists) {
  uint32_t live = 0;
#pragma unroll
  for (int n = 0; n < kRightTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int m = 0; m < kLeftTiles; ++m)
        if (exists(m, i / 2) && values[m][n][i] != dead) live |= 1u << (2 * n + i % 2);
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) live |= __shfl_xor_sync(0xffffffffu, live, distance);
  return live;
}

// gemm_rs that treats right-operand rows without a bit in `live` (from live_columns()) as zeros: 0 * NaN is NaN.
template <class Element, int kHeadDim, int kLeftTiles, int kDepthTiles>
__device__ __forceinline__ void gemm_rs_live(float (&sums)[kLeftTiles][kHeadDim / 8][4],
                                             const float (&left)[kLeftTiles][kDepthTiles][4], uint32_t right,
                                             uint32_t live) {
  using Tile = SmemTile<kHeadDim>;
  const auto halves = [&](int n) {
    return (live >> (2 * n) & 1 ? 0x0000ffffu : 0u) | (live >> (2 * n + 1) & 1 ? 0xffff0000u : 0u);
  };
#pragma unroll
  for (int k = 0; k < kDepthTiles; k += 2) {
    const uint32_t low_rows = halves(k), high_rows = halves(k + 1);
    uint32_t a[kLeftTiles][4];
#pragma unroll
    for (int m = 0; m < kLeftTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] = ptx::pack<Element>(left[m][k + i / 2][i % 2 * 2], left[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 2) {
      uint32_t b[4];
      ptx::ldmatrix_trans(b, Tile::fragment_address(right, 8 * k, 8 * d));
#pragma unroll
      for (int m = 0; m < kLeftTiles; ++m) {
        ptx::mma<Element>(sums[m][d], a[m], b[0] & low_rows, b[1] & high_rows);
        ptx::mma<Element>(sums[m][d + 1], a[m], b[2] & low_rows, b[3] & high_rows);
      }
    }
  }
}

template <int kLeftTiles, int kRightTiles, class Exists>
__device__ __forceinline__ bool has_nan(const float (&sums)[kLeftTiles][kRightTiles][4], const Exists &exists) {
  bool found = false;
  for_accumulators(sums, [&](int m, int n, int i) { found |= isnan(sums[m][n][i]) && exists(m, i / 2); });
  return found;
}

} // namespace fdm::cuda
