// SPDX-License-Identifier: BSD-3-Clause
// The bias tile of a thread block of the fused kernel, and its gradient, in the layout of the consumers'
// accumulators.
#pragma once

#include "../../tile/score.cuh"
#include "fused_tasks.cuh"
#include "ptx/store.cuh"

namespace fdm::cuda {

template <class Config> struct FusedBiasTile {
  using Element = typename Config::Element;
  static constexpr int kTiles = Config::kSourceTile / 8;
  static constexpr int kBiasBytes = Config::kFloat32Bias ? 4 : 2, kChunkTiles = kTiles / Config::kBiasChunks;

  const PairBiasBackward &work;
  PairBiasFusedShared<Config> &shared;
  PairBiasFusedTask task;
  float dbias[kTiles][4];

  __device__ FusedBiasTile(const PairBiasBackward &own_work, PairBiasFusedShared<Config> &memory)
      : work(own_work), shared(memory) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ int64_t row(int half) const {
    return int64_t(task.row_tile) * Config::kSourceTile + 16 * Config::band() + accumulator_row(half);
  }
  __device__ int64_t key(int n) const {
    return int64_t(task.key_tile) * Config::kSourceTile + 8 * n + accumulator_column();
  }

  __device__ void start(const PairBiasFusedTask &own_task) {
    task = own_task;
    for_accumulators(dbias, [&](int n, int i) { dbias[n][i] = 0.0f; });
    if (task.first < task.past) load_bias();
  }

  // Replaces the products Q K' by P, for 8 * kTileCount keys from 8 * kFirstTile on.
  template <int kFirstTile, int kTileCount>
  __device__ void make_probabilities(float (&scores)[kTileCount][4], int stage) const {
    if constexpr (Config::kFolds)
      make_folded_probabilities<kFirstTile>(scores);
    else if (shared.known.stages[stage].dropped.any())
      make_probabilities_of<kFirstTile, true>(scores, stage);
    else
      make_probabilities_of<kFirstTile, false>(scores, stage);
  }

  // Replaces dP by dS, and adds it to dbias.
  template <int kFirstTile, int kTileCount>
  __device__ void make_gradients(const float (&p)[kTileCount][4], float (&gradients)[kTileCount][4], int stage) {
    float delta[2] = {};
    if constexpr (!Config::kFolds) // else the products include it
#pragma unroll
      for (int half = 0; half < 2; ++half)
        delta[half] = shared.known.stages[stage].delta[16 * warp() + accumulator_row(half)];
    for_accumulators(gradients, [&](int n, int i) {
      const float gradient = Config::kFolds ? gradients[n][i] : gradients[n][i] - delta[i / 2];
      gradients[n][i] = p[n][i] * gradient;
      dbias[kFirstTile + n][i] += gradients[n][i];
    });
  }

  __device__ void write_dbias() const {
    const FusedWork &division = work.fused;
    const fdm_problem &p = work.call.p;
    if (!present(work.a.dbias)) return;
    const FusedDbiasTile tile{task.plane, task.row_tile, task.key_tile};
    const int first = Config::band() * (Config::kTile / 8) * 32 + lane(); // in quads
    if (division.dbias) {
      float *sums = division.dbias + (dbias_tile_number(division, tile) * kTileQuadsSm90 + first) * 4;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) ptx::add_global(sums + n * 128, dbias[n]);
      return;
    }
    if constexpr (Config::kSmallTiles) return; // several thread blocks share a small tile
    const bool whole =
        int64_t(task.row_tile + 1) * Config::kTile <= p.queries && int64_t(task.key_tile + 1) * Config::kTile <= p.keys;
    if (work.dbias_pairs && whole) return store_whole_dbias();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      store_quad<Element>(work, tile, first + n * 32, make_float4(dbias[n][0], dbias[n][1], dbias[n][2], dbias[n][3]));
  }

private:
  // The products include -lse, and -inf for dropped keys.
  template <int kFirstTile, int kTileCount>
  __device__ void make_folded_probabilities(float (&scores)[kTileCount][4]) const {
    const float factor = work.call.p.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < kTileCount; ++n) {
      float bias[1][4];
      read_bias(kFirstTile + n, bias);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = ptx::exp2_approximate(fmaf(scores[n][i], factor, bias[0][i]));
    }
  }
  template <int kFirstTile, bool kDrops, int kTileCount>
  __device__ void make_probabilities_of(float (&scores)[kTileCount][4], int stage) const {
    const auto &known = shared.known.stages[stage];
    const float scale = work.call.p.scale;
    const float low = known.shift[16 * warp() + accumulator_row(0)],
                high = known.shift[16 * warp() + accumulator_row(1)];
    float bias[kChunkTiles][4];
#pragma unroll
    for (int n = 0; n < kTileCount; ++n) {
      if (n % kChunkTiles == 0) read_bias((kFirstTile + n) / kChunkTiles, bias);
      float dropped[2];
      if constexpr (kDrops) known.dropped.read(kFirstTile + n, dropped); // inf or -inf
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float score = fmaf(scores[n][i], scale, bias[n % kChunkTiles][i]);
        // The bias of a dropped pair may be NaN, which fminf ignores.
        if constexpr (kDrops) score = fminf(score, dropped[i % 2]);
        scores[n][i] = ptx::exp2_approximate(fmaf(score, kLog2E, i < 2 ? low : high));
      }
    }
  }

  // Loads the bias of this thread's scores; -inf for dropped and absent pairs.
  __device__ void load_bias() const {
    const fdm_problem &p = work.call.p;
    const Source source = source_of(work.call, task.plane, task.first);
    const Sequence s = pair_bias_sequence(p, source.batch);
    const Matrix bias = score_matrix(p, p.bias, s, source.head, kBiasBytes);
    const int64_t last_row = int64_t(task.row_tile + 1) * Config::kSourceTile,
                  last_key = int64_t(task.key_tile + 1) * Config::kSourceTile;
    const bool sees_all = !is_causal(p) || last_key <= last_row - Config::kSourceTile + p.keys - p.queries + 1;
    if (work.call.bias_chunks && last_row <= p.queries && last_key <= p.keys && !present(p.start)) {
      if (!has_query_rows(p.mask) && sees_all) return load_whole_bias(bias, [](int, int) { return kNoneDropped; });
      if (!has_query_rows(p.mask))
        return load_whole_bias(bias, [&](int half, int n) { return dropped_later(half, n); });
      if (work.call.mask_chunks) {
        const Matrix mask = score_matrix(p, p.mask, s, source.head, 1);
        const auto *const first = static_cast<const char *>(mask.base) + key(0);
        const uint16_t *const rows[2] = {reinterpret_cast<const uint16_t *>(first + row(0) * mask.row),
                                         reinterpret_cast<const uint16_t *>(first + row(1) * mask.row)};
        return load_whole_bias(bias, [&](int half, int n) {
          const uint32_t kept = rows[half][4 * n];
          return (sees_all ? kNoneDropped : dropped_later(half, n)) | (kept & 0xff ? 0u : 1u) |
                 (kept & 0xff00 ? 0u : 2u);
        });
      }
    }
#pragma unroll 1
    for (int c = 0; c < Config::kBiasChunks; ++c) {
      uint32_t words[4];
      uint16_t halves[8];
#pragma unroll
      for (int i = 0; i < 4 * kChunkTiles; ++i) {
        const int64_t r = row(i / 2 % 2), k = key(c * kChunkTiles + i / 4) + i % 2,
                      offset = r * bias.row + k * bias.col;
        const bool keeps = is_kept_pair(p, s, source.head, r, k);
        if constexpr (Config::kFloats)
          words[i] = keeps ? word_of(bias, offset) : 0xff800000u;
        else
          halves[i] = keeps ? static_cast<const uint16_t *>(bias.base)[offset]
                            : uint16_t(__is_same(Element, __half) ? 0xfc00 : 0xff80);
      }
      if constexpr (!Config::kFloats)
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = halves[2 * i] | uint32_t(halves[2 * i + 1]) << 16;
      shared.bias[c][threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  // An element of the bias as it is stored.
  __device__ static uint32_t word_of(const Matrix &bias, int64_t offset) {
    float element;
    if constexpr (Config::kFloat32Bias)
      element = static_cast<const float *>(bias.base)[offset];
    else
      element = float(static_cast<const Element *>(bias.base)[offset]);
    return __float_as_uint(element * (Config::kFolds ? kLog2E : 1.0f));
  }
  static constexpr uint32_t kNoneDropped = 0;
  // Bits for this thread's two neighbours in tile n of 8 keys: set if the causal mask drops them.
  __device__ uint32_t dropped_later(int half, int n) const {
    const fdm_problem &p = work.call.p;
    const int later = int(key(n) - row(half) - (p.keys - p.queries));
    return (later > 0 ? 1u : 0u) | (later >= 0 ? 2u : 0u);
  }
  // Loads a complete tile, two neighbours at a time. dropped(half, n) has a bit for each dropped one.
  template <class Dropped> __device__ void load_whole_bias(const Matrix &bias, const Dropped &dropped) const {
    using Pair = std::conditional_t<Config::kFloat32Bias, uint2, uint32_t>;
    const Pair *first[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      first[half] = reinterpret_cast<const Pair *>(static_cast<const char *>(bias.base) +
                                                   (row(half) * bias.row + key(0)) * kBiasBytes);
#pragma unroll
    for (int c = 0; c < Config::kBiasChunks; ++c) {
      Pair pairs[kChunkTiles][2];
      for_pairs<kChunkTiles>([&](int n, int half) {
        pairs[n][half] = first[half][4 * (c * kChunkTiles + n)];
        drop(pairs[n][half], dropped(half, c * kChunkTiles + n));
      });
      if constexpr (Config::kFolds) {
        float words[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (Config::kFloat32Bias) {
            words[2 * half] = __uint_as_float(pairs[0][half].x);
            words[2 * half + 1] = __uint_as_float(pairs[0][half].y);
          } else {
            ptx::unpack<Element>(pairs[0][half], words[2 * half], words[2 * half + 1]);
          }
        }
#pragma unroll
        for (float &word : words) word *= kLog2E;
        shared.bias[c][threadIdx.x] = reinterpret_cast<const uint4 &>(words);
      } else {
        static_assert(sizeof(pairs) == sizeof(uint4));
        shared.bias[c][threadIdx.x] = reinterpret_cast<const uint4 &>(pairs);
      }
    }
  }
  // Sets the elements whose bits are set to -inf.
  __device__ static void drop(uint2 &pair, uint32_t dropped) {
    if (dropped & 1) pair.x = 0xff800000u;
    if (dropped & 2) pair.y = 0xff800000u;
  }
  __device__ static void drop(uint32_t &pair, uint32_t dropped) {
    constexpr uint32_t kDropped = __is_same(Element, __half) ? 0xfc00 : 0xff80;
    if (dropped & 1) pair = (pair & 0xffff0000u) | kDropped;
    if (dropped & 2) pair = (pair & 0xffffu) | kDropped << 16;
  }
  __device__ void read_bias(int chunk, float (&values)[kChunkTiles][4]) const {
    const uint4 words = shared.bias[chunk][threadIdx.x];
    if constexpr (Config::kFloats) {
      values[0][0] = __uint_as_float(words.x);
      values[0][1] = __uint_as_float(words.y);
      values[0][2] = __uint_as_float(words.z);
      values[0][3] = __uint_as_float(words.w);
    } else {
      ptx::unpack<Element>(words.x, values[0][0], values[0][1]);
      ptx::unpack<Element>(words.y, values[0][2], values[0][3]);
      ptx::unpack<Element>(words.z, values[1][0], values[1][1]);
      ptx::unpack<Element>(words.w, values[1][2], values[1][3]);
    }
  }

  // Stores a complete tile, two neighbours at a time.
  __device__ void store_whole_dbias() const {
    const fdm_tensor &t = work.a.dbias;
    const int64_t head = task.plane / t.shape[1] * t.stride[0] + task.plane % t.shape[1] * t.stride[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t first = head + row(half) * t.stride[2] + key(0);
      if (t.dtype == FDM_FLOAT32) {
        auto *pairs = reinterpret_cast<float2 *>(static_cast<float *>(t.data) + first);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) pairs[4 * n] = {dbias[n][2 * half], dbias[n][2 * half + 1]};
      } else {
        auto *pairs = reinterpret_cast<uint32_t *>(static_cast<Element *>(t.data) + first);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) pairs[4 * n] = ptx::pack<Element>(dbias[n][2 * half], dbias[n][2 * half + 1]);
      }
    }
  }
};

} // namespace fdm::cuda
