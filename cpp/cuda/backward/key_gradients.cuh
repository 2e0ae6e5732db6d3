// SPDX-License-Identifier: BSD-3-Clause
// The elementwise work of dk, dv and the gradient of a bias per key on a key block: P' and dS' from S' and dP', and
// the epilogue. mma.sync and wgmma have the same accumulator layout. Here a row of accumulators is a key, and a warp
// has kKeyTiles tiles of 16 keys.
#pragma once

#include <type_traits>

#include "../tile/products.cuh"
#include "../tile/row_bias_tile.cuh"
#include "key_blocks.cuh"
#include "sum_bands.cuh"

namespace fdm::cuda {

// The type of `row_bias` if there is no bias per query.
struct NoRowBias {};

// The statistics of a tile of query rows in shared memory.
template <int kKeys, int kRows, bool kHasRowPlans> struct RowStage {
  alignas(16) float lse[kRows], delta[kRows];          // of RowStatistics
  alignas(16) RowWord words[kHasRowPlans ? kKeys : 1]; // set for row plans
  KeyStep step;
};

// Which sums of a key block are added or written.
struct WantedSums {
  bool dk = true, dv = true;
};

// The gradients that a kernel computes: dk with the bias gradient, dv, or both.
enum class GradientSet { both, dk, dv };

// When dS' is added to the sums of the bias gradient: always, or by a branch of each step, which saves the additions
// of calls without a bias. The kernel of dK and dV alone (sm90/dkdv.cuh) adds always: the branch was not measured there.
enum class BiasSums { always, if_wanted };

// Whether a kernel applies a softcap.
enum class Softcap { none, applied };

// Keys is a KeyBlock. A tile may have more rows than kRows, the rows of a warp's scores. Further warps with the same
// keys then have the scores of the next kRows rows.
template <class Element, int kKeys, int kKeyTiles, int kRows, int kHeadDim, GradientSet kGradients, TileKind kKind,
          class Keys, int kTileRowCount = kRows, int kValueDim = kHeadDim>
struct KeyGradients {
  static constexpr bool kComputesDk = kGradients != GradientSet::dv, kComputesDv = kGradients != GradientSet::dk;
  static constexpr bool kGeneral = kKind == TileKind::general;
  using Stage = RowStage<kKeys, kTileRowCount, Keys::kRowPlans>;
  static constexpr int kRowTiles = kRows / 8, kWordCount = (kRows + 31) / 32;

  const BackwardParams &params;
  Keys keys;
  float dk[kKeyTiles][kComputesDk ? kHeadDim / 8 : 1][4], dv[kKeyTiles][kComputesDv ? kValueDim / 8 : 1][4];
  float dbias[kKeyTiles][2];

  __device__ KeyGradients(const BackwardParams &parameters, typename Keys::Shared &shared)
      : params(parameters), keys(parameters, shared) {}

  __device__ void start() {
    if constexpr (kComputesDk) clear(dk);
    if constexpr (kComputesDv) clear(dv);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) dbias[m][0] = dbias[m][1] = 0.0f;
  }

  // The key of this thread's accumulators, as a row of the block. Two warpgroups may have different rows or columns
  // of the same keys.
  __device__ static int key_row(int m, int half) {
    return threadIdx.x / 32 * (16 * kKeyTiles) % kKeys + 16 * m + accumulator_row(half);
  }
  // The first row of the tile for which this warp has scores.
  __device__ static int first_row() {
    return kTileRowCount == kRows ? 0 : threadIdx.x / 32 / (kKeys / (16 * kKeyTiles)) * kRows;
  }
  __device__ bool wants_score_gradients() const {
    return kComputesDk && (present(params.a.dk) || params.wants_bias_sums);
  }

  // Finds which rows of the tile keep a key: bit 8 (n % 4) + i of word n / 4 is for this thread's row i of row tile
  // n. A key that this head drops by a bias of -inf may be loaded for another head of the group.
  __device__ void keep_bits(const Stage &stage, int first, int buffer, int key, uint32_t (&bits)[kWordCount]) const {
    RowRange range = keys.shared.rows[buffer][key];
    if (keys.shared.bias[buffer][key] == -INFINITY) range.past = range.first;
#pragma unroll
    for (int w = 0; w < kWordCount; ++w) {
      uint32_t word = row_bits(range.first - first - 32 * w, range.past - first - 32 * w);
      if (Keys::kRowPlans && keys.task().has_words)
        word &= stage.words[key].part[first % kTileRows / 32 + w] >> (first % 32);
      bits[w] = word >> accumulator_column();
    }
  }

  // P' of a score to base 2 that includes the bias.
  template <PairTests kPairTests> __device__ static float probability(float x, float lse, bool kept) {
    x -= lse;
    if constexpr (kPairTests == PairTests::kept_and_cut) x = ptx::min_or_nan(x, 0.0f);
    x = ptx::exp2_approximate(x);
    return kPairTests == PairTests::none || kept ? x : 0.0f;
  }
  // dS' before the factor of the softcap's derivative. V of a dropped key may be non-finite: dS' is 0 if P' is 0.
  template <PairTests kPairTests> __device__ static float score_gradient(float p, float dp, float delta) {
    const float ds = p * (dp - delta);
    return kPairTests != PairTests::none && p == 0.0f ? 0.0f : ds;
  }

  // Replaces the scores by P', and dP' in the gradients by dS'. With PairTests::none, all pairs are kept.
  // row_bias.elements(key, row, key_shift) returns the elements of a bias per query for a key and two rows of the
  // tile.
  template <bool kHasSoftcap, PairTests kPairTests, class RowBias>
  __device__ void compute_p_and_ds(const Stage &stage, float (&scores)[kKeyTiles][kRowTiles][4],
                                   float (&gradients)[kKeyTiles][kRowTiles][4], const RowBias &row_bias) {
    const ScoreFactors factors(params.p);
    const KeyStep &step = stage.step;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) { // key by key, so that few facts about keys are in registers at a time
        const int key = key_row(m, half);
        const float bias = keys.shared.bias[step.buffer][key];
        uint32_t bits[kWordCount];
        if constexpr (kPairTests != PairTests::none)
          keep_bits(stage, step.tile * kTileRowCount + first_row(), step.buffer, key, bits);
        uint32_t key_shift = 0;
        if constexpr (kGeneral) key_shift = row_bias.key_shift(key);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          const int column = first_row() + 8 * n + accumulator_column();
          const float2 lse = *reinterpret_cast<const float2 *>(&stage.lse[column]);
          float2 delta{};
          if constexpr (kComputesDk) delta = *reinterpret_cast<const float2 *>(&stage.delta[column]);
          float2 added{};
          if constexpr (kGeneral) added = row_bias.elements(key, column, key_shift);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &score = scores[m][n][2 * half + i], &gradient = gradients[m][n][2 * half + i];
            bool kept = true;
            if constexpr (kPairTests != PairTests::none) kept = bits[n / 4] >> (8 * (n % 4) + i) & 1;
            const float row_bias_element = i ? added.y : added.x;
            if constexpr (kGeneral) kept = kept && row_bias_element != -INFINITY;
            if constexpr (kPairTests != PairTests::none && kHasSoftcap)
              score = kept ? score : 0.0f; // otherwise the slope of the softcap could be NaN
            float slope, x = factors.score<kHasSoftcap>(score, bias, &slope);
            if constexpr (kGeneral) x = with_row_bias(x, row_bias_element);
            score = probability<kPairTests>(x, i ? lse.y : lse.x, kept);
            if constexpr (kComputesDk) {
              const float ds = score_gradient<kPairTests>(score, gradient, i ? delta.y : delta.x);
              dbias[m][half] += ds;
              gradient = ds * slope;
            }
          }
        }
      }
  }

  // The same in two parts. This one computes P' as soon as the scores are complete. compute_ds computes dS' (without a
  // softcap) when dP' is complete. `first` is the first row of the tile, `buffer` the step's buffer.
  // row_bias.element(half, n, i) is the element of this thread's pair.
  template <PairTests kPairTests, class RowBias = NoRowBias, Softcap kSoftcap = Softcap::none>
  __device__ void compute_p(const Stage &stage, int first, int buffer, float (&scores)[kKeyTiles][kRowTiles][4],
                            const ScoreFactors &factors, const RowBias &row_bias = {}) {
    constexpr bool kHasRowBias = !std::is_same_v<RowBias, NoRowBias>;
    static_assert(!kHasRowBias || (kPairTests == PairTests::kept_and_cut && kKeyTiles == 1));
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = key_row(m, half);
        const float bias = keys.shared.bias[buffer][key];
        uint32_t bits[kWordCount];
        if constexpr (kPairTests != PairTests::none) keep_bits(stage, first, buffer, key, bits);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          const float2 lse = *reinterpret_cast<const float2 *>(&stage.lse[8 * n + accumulator_column()]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &score = scores[m][n][2 * half + i];
            float slope;
            float x = factors.score<kSoftcap == Softcap::applied>(score, bias, &slope);
            bool kept = kPairTests == PairTests::none || bits[n / 4] >> (8 * (n % 4) + i) & 1;
            if constexpr (kHasRowBias) {
              const float element = row_bias.element(half, n, i);
              kept = kept && element != -INFINITY;
              x = with_row_bias(x, element);
            }
            score = probability<kPairTests>(x, i ? lse.y : lse.x, kept);
          }
        }
      }
  }
  // Adds dS' of kTiles row tiles to the sums of the bias gradient, or P' to those of the key mass.
  template <int kTiles> __device__ void add_to_bias_sums(const float (&elements)[kKeyTiles][kTiles][4]) {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        dbias[m][0] += elements[m][n][0] + elements[m][n][1];
        dbias[m][1] += elements[m][n][2] + elements[m][n][3];
      }
  }
  // The second part, for kTiles row tiles from tile `first` on.
  template <PairTests kPairTests, BiasSums kBiasSums = BiasSums::if_wanted, int kTiles>
  __device__ void compute_ds(const Stage &stage, const float (&probabilities)[kKeyTiles][kTiles][4],
                             float (&gradients)[kKeyTiles][kTiles][4], int first = 0) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 delta = *reinterpret_cast<const float2 *>(&stage.delta[8 * (first + n) + accumulator_column()]);
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &gradient = gradients[m][n][2 * half + i];
            gradient = score_gradient<kPairTests>(probabilities[m][n][2 * half + i], gradient, i ? delta.y : delta.x);
            if constexpr (kBiasSums == BiasSums::always) dbias[m][half] += gradient;
          }
    }
    if (kBiasSums == BiasSums::if_wanted && params.wants_bias_sums) add_to_bias_sums(gradients);
  }

  // Whether all of this warp's keys are kept by all kRows rows from `first` on.
  __device__ bool keep_all(int first) const {
    return keys.keep_all(threadIdx.x / 32 * kKeyTiles % (kKeys / 16), kKeyTiles, first, kRows);
  }
  // Whether pairs of a tile and this warp's keys need PairTests. A tile with rows beyond kLargeLse needs them, since it
  // `cuts_probabilities`. The vote shows the compiler that all lanes of a warp agree.
  __device__ bool needs_test(const KeyStep &step, bool cuts_probabilities) const {
    if constexpr (kGeneral) return true;
    // All conditions are loaded first: with short-circuit evaluation, the warp would wait for each load in turn.
    const bool tests = step.tests, drops = keys.drops_keys(step.head, step.buffer),
               keep = keep_all(step.tile * kTileRowCount + first_row());
    return __any_sync(0xffffffffu, cuts_probabilities | tests | drops | !keep);
  }
  template <bool kHasSoftcap, class RowBias>
  __device__ void compute_p_and_ds(const Stage &stage, bool cuts_probabilities,
                                   float (&scores)[kKeyTiles][kRowTiles][4],
                                   float (&gradients)[kKeyTiles][kRowTiles][4], const RowBias &row_bias) {
    if (needs_test(stage.step, cuts_probabilities))
      return compute_p_and_ds<kHasSoftcap, PairTests::kept_and_cut>(stage, scores, gradients, row_bias);
    if constexpr (!kGeneral) compute_p_and_ds<kHasSoftcap, PairTests::none>(stage, scores, gradients, row_bias);
  }
  template <bool kHasSoftcap>
  __device__ void compute_p_and_ds(const Stage &stage, bool cuts_probabilities,
                                   float (&scores)[kKeyTiles][kRowTiles][4],
                                   float (&gradients)[kKeyTiles][kRowTiles][4]) {
    static_assert(!kGeneral);
    compute_p_and_ds<kHasSoftcap>(stage, cuts_probabilities, scores, gradients, nullptr);
  }

  // Writes the bias gradient, summed over the rows of a head or of all heads that share the bias.
  __device__ void write_bias(int64_t head_of_group) {
    if constexpr (kComputesDk) {
      if (!params.wants_bias_sums) return;
      for_pairs<kKeyTiles>([&](int m, int half) {
        const float sum = ptx::row_sum(dbias[m][half]);
        dbias[m][half] = 0.0f;
        const int key = key_row(m, half);
        if (threadIdx.x % 4 == 0 && keys.shared.key[key] >= 0)
          keys.write_bias_sum(head_of_group, key, keys.shared.readable[key] ? sum : 0.0f);
      });
    }
  }

  // Adds the gradients of keys that several segments keep to their sums, in the layout that round_sums.cu reads. The
  // accumulator tiles from kFirst on are the columns from `first` on.
  template <int kFirst = 0, int kTiles = kHeadDim / 8>
  __device__ void add_segment_sums(int first = 0, WantedSums wanted = {}) const {
    if (params.keys.segments.max_sums == 0) return;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = key_row(m, half);
        if (keys.shared.key[key] < 0 || keys.shared.sum[key] < 0) continue;
        float *row = keys.segment_sums(key) + first + threadIdx.x % 4 * 4;
        const auto add = [&](float *sums, const float (&accumulators)[kHeadDim / 8][4]) {
#pragma unroll
          for (int d = 0; d < kTiles; d += 2) {
            const float (&low)[4] = accumulators[kFirst + d], (&high)[4] = accumulators[kFirst + d + 1];
            add_neighbours(sums + 8 * d, {low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]});
          }
        };
        if (wanted.dk) add(row, dk[m]);
        if (wanted.dv) add(row + params.keys.sum_dim, dv[m]);
      }
  }

  // The epilogue writes dk and dv, or the float32 sums of a part if the block has several parts. It writes kTiles
  // accumulator tiles from kFirst on, as the columns from `first` on. It skips keys that several segments of rows
  // keep, which have sums of their own. A key that no row keeps gets zeros, since NaN in dO times P' = 0 may have
  // made its accumulators NaN.
  template <int kFirst = 0, int kTiles = kHeadDim / 8>
  __device__ void write(int first = 0, WantedSums wanted = {}) const {
    constexpr int kValueTiles = kTiles == kHeadDim / 8 ? kValueDim / 8 : kTiles;
    static_assert(kFirst + kTiles <= kHeadDim / 8 && kFirst + kValueTiles <= kValueDim / 8);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = key_row(m, half);
        const bool exists = keys.shared.key[key] >= 0 && !(Keys::kSegments && keys.shared.sum[key] >= 0);
        const bool blank = !keys.shared.readable[key];
        const auto write_tiles = [&](const fdm_tensor &t, const auto &sums, float factor, int which) {
          if (!present(t)) return;
          constexpr int kOwnTiles = sizeof(sums) / sizeof(sums[0]);
          if (float *partial = keys.partial_sums(which, key)) {
#pragma unroll
            for (int d = 0; d < kOwnTiles; ++d)
              if (exists && first + 8 * d < params.keys.sum_dim)
                *reinterpret_cast<float2 *>(partial + first + 8 * d + accumulator_column()) =
                    blank ? float2{} : make_float2(sums[d][2 * half], sums[d][2 * half + 1]);
          } else {
            write_row(static_cast<Element *>(t.data) + keys.row_offset(t, key) + first * t.stride[3], t.stride[3],
                      int(t.shape[3]) - first, sums, half, factor, exists, blank);
          }
        };
        if constexpr (kComputesDk)
          if (wanted.dk)
            write_tiles(params.a.dk, reinterpret_cast<const float (&)[kTiles][4]>(dk[m][kFirst]), params.p.scale, 0);
        if constexpr (kComputesDv)
          if (wanted.dv)
            write_tiles(params.a.dv, reinterpret_cast<const float (&)[kValueTiles][4]>(dv[m][kFirst]), 1.0f, 1);
      }
  }
};

} // namespace fdm::cuda
