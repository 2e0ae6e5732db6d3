// SPDX-License-Identifier: BSD-3-Clause
// The gradients of keys, values and of a bias that is the same for every query: one block of threads for a block of
// keys of one key/value head, or for a part of its work.
//
// K and V rows stay in shared memory while the rows of Q and dO that may keep them pass by, tile by tile, for each
// query head of the group. Products are transposed, with a key to a row of accumulators:
//   S' = K Q', P' = exp(S' - lse), dV += P' dO, dP' = V dO', dS' = P' (dP' - delta), dK += scale dS' Q,
// so P' and dS' are left operands where they are computed, and the bias gradient is the sum of a row of dS'.
#pragma once

#include "key_blocks.cuh"
#include "products.cuh"
#include "score.cuh"

namespace fdm::cuda {

// kKeyGradient: dk and the bias gradient; kValueGradient: dv. Large head dimensions take a launch for each.
template <class ElementType, int kHeadDimension, int kKeyCount, int kRowCount, int kWarpCount, int kBlockCount,
          bool kKeyGradients, bool kValueGradients, bool kIsGeneral>
struct DkdvConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = kKeyCount, kRows = kRowCount, kWarps = kWarpCount;
  static constexpr bool kKeyGradient = kKeyGradients, kValueGradient = kValueGradients;
  // Also rows that cannot be copied 16 bytes at a time, and a bias with a row for each query: rare, and much code.
  static constexpr bool kGeneral = kIsGeneral;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlockCount; // of a multiprocessor, at least
  static constexpr int kKeyTiles = kKeys / kWarps / 16;               // of 16 keys, of each warp
  using Tile = SharedTile<kHeadDim>;
  static constexpr int kKeyBytes = Tile::bytes(kKeys), kRowBytes = Tile::bytes(kRows);
  static_assert(kKeyTiles >= 1 && kTileRows % kRows == 0 && kBucketKeys % kKeys == 0);
  static_assert(kKeys <= kThreads && kRows <= kThreads);
};

template <class Config> struct DkdvShared {
  alignas(1024) char k[Config::kKeyBytes];
  char v[Config::kKeyBytes];
  char q[2][Config::kRowBytes], dout[2][Config::kRowBytes];
  alignas(16) float lse[2][Config::kRows], delta[2][Config::kRows]; // see RowStatistics
  alignas(16) RowWord words[2][Config::kKeys];                      // of row plans
  KeyStep steps[2];
  KeyBlockShared<Config::kKeys> keys;
};

template <class Config> struct DkdvBlock {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kKeyTiles = Config::kKeyTiles, kKeys = Config::kKeys, kRows = Config::kRows;
  static constexpr int kHeadDim = Config::kHeadDim, kRowTiles = kRows / 8, kWordCount = (kRows + 31) / 32;
  static constexpr bool kKeyGradient = Config::kKeyGradient, kValueGradient = Config::kValueGradient;

  const BackwardParams &params;
  DkdvShared<Config> &shared;
  KeyBlock<Config::kKeys, Config::kThreads> keys;
  uint32_t k_fragment, v_fragment, q_base, dout_base;
  uint32_t row_offset_right, column_offset_right;
  float dk[kKeyTiles][kKeyGradient ? kHeadDim / 8 : 1][4], dv[kKeyTiles][kValueGradient ? kHeadDim / 8 : 1][4];
  float dbias[kKeyTiles][2];

  __device__ DkdvBlock(const BackwardParams &parameters, DkdvShared<Config> &memory)
      : params(parameters), shared(memory), keys(parameters, memory.keys) {
    const int first = threadIdx.x / 32 * (16 * kKeyTiles);
    k_fragment = Tile::left(ptx::shared_address(shared.k), first);
    v_fragment = Tile::left(ptx::shared_address(shared.v), first);
    q_base = ptx::shared_address(shared.q[0]), dout_base = ptx::shared_address(shared.dout[0]);
    row_offset_right = Tile::right_rows(0), column_offset_right = Tile::right_columns(0);
  }

  __device__ static int key_row(int m, int half) {
    return threadIdx.x / 32 * (16 * kKeyTiles) + 16 * m + accumulator_row(half);
  }
  __device__ bool wants_score_gradients() const {
    return kKeyGradient && (present(params.a.dk) || params.wants_bias_sums);
  }

  __device__ void load_keys() const {
    const auto copy = [&](const fdm_tensor &t, const char *to) {
      copy_rows<Tile, kKeys, Config::kThreads>(
          ptx::shared_address(to), !Config::kGeneral || params.aligned, int(params.p.head_dim), t.stride[3],
          [&](int r) -> const uint16_t * {
            return shared.keys.readable[r] ? static_cast<const uint16_t *>(t.data) + keys.row_offset(t, r) : kZeroRow;
          });
    };
    copy(params.p.k, shared.k);
    if constexpr (kKeyGradient) copy(params.p.v, shared.v);
  }

  __device__ void load_rows(const KeyStep &step, int stage) const {
    const int64_t head = keys.head(step);
    const int first = step.tile * kRows, rows = min(kRows, int(keys.task().s.q_count) - first);
    const auto copy = [&](const fdm_tensor &t, uint32_t to, bool aligned) {
      const auto *base = static_cast<const uint16_t *>(t.data) + row_offset(t, keys.task().s, first, head);
      copy_rows<Tile, kRows, Config::kThreads>(
          to + stage * Config::kRowBytes, aligned, int(params.p.head_dim), t.stride[3],
          [&](int r) -> const uint16_t * { return r < rows ? base + r * t.stride[1] : kZeroRow; });
    };
    copy(params.p.q, q_base, !Config::kGeneral || params.aligned);
    copy(params.a.dout, dout_base, !Config::kGeneral || params.dout_aligned);
    if (keys.task().words && int(threadIdx.x) < kKeys) {
      const RowWord *words = keys.words(step, kRows);
      const int32_t key = shared.keys.key[threadIdx.x];
      ptx::copy_async_16(ptx::shared_address(&shared.words[stage][threadIdx.x]), words + max(key, 0), key >= 0);
    }
  }

  // Threads that have a row of the tile copy its statistics.
  __device__ void load_statistics(const KeyStep &step, int stage) {
    const int row = step.tile * kRows + int(threadIdx.x);
    if (int(threadIdx.x) >= kRows) return;
    float &lse = shared.lse[stage][threadIdx.x], &delta = shared.delta[stage][threadIdx.x];
    if (row < keys.task().s.q_count) {
      const RowStatistics &from = row_statistics(params, keys.task().s, keys.head(step), row);
      ptx::copy_async_4(ptx::shared_address(&lse), &from.lse);
      ptx::copy_async_4(ptx::shared_address(&delta), &from.delta);
    } else {
      lse = INFINITY, delta = 0.0f;
    }
  }

  // Does the row whose statistics this thread has copied need care? Rows past the last have lse = inf too, but are
  // zeros already; what clears them again costs little, once for each head.
  __device__ bool is_odd(int stage) const {
    return int(threadIdx.x) < kRows && fabsf(shared.lse[stage][threadIdx.x]) > kLargeLse;
  }

  // Starts the copies of a step, if there is one.
  __device__ bool load(const KeyStep &step, int stage) {
    if (step.valid) {
      load_rows(step, stage), load_statistics(step, stage);
      if (threadIdx.x == 0) shared.steps[stage] = step;
    }
    ptx::commit_copies();
    return step.valid;
  }

  // Rows without a gradient become zeros, whatever lies there: not even NaN in dO may reach a result. Seldom needed.
  __device__ void clear_empty_rows(int stage) const {
    for (int i = threadIdx.x; i < kRows * Tile::kChunks; i += Config::kThreads) {
      const int r = i / Tile::kChunks;
      if (shared.lse[stage][r] != INFINITY) continue;
      for (const uint32_t base : {q_base, dout_base})
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(
                         Tile::chunk_address(base + stage * Config::kRowBytes, r, i % Tile::kChunks)),
                     "r"(0)
                     : "memory");
    }
    __syncthreads();
  }

  // Which rows of the tile keep a key: bit 8 n + i of word n / 4 is for this thread's row i of row tile n.
  __device__ void keep_bits(const KeyStep &step, int stage, int key, uint32_t (&bits)[kWordCount]) const {
    const int first = step.tile * kRows;
    const RowRange range = shared.keys.rows[step.buffer][key];
#pragma unroll
    for (int w = 0; w < kWordCount; ++w) {
      uint32_t word = row_bits(range.first - first - 32 * w, range.past - first - 32 * w);
      if (keys.task().words) word &= shared.words[stage][key].part[first % kTileRows / 32 + w] >> (first % 32);
      bits[w] = word >> accumulator_column();
    }
  }

  // P' in the place of the scores, dS' in that of the gradients, which held dP' - delta. kTest: some pairs may not be
  // kept.
  template <bool kCap, bool kTest>
  __device__ void make_gradients(const KeyStep &step, int stage, float (&scores)[kKeyTiles][kRowTiles][4],
                                 float (&gradients)[kKeyTiles][kRowTiles][4]) {
    const ScoreFactors factors(params.p);
    ScoreView row_bias;
    if constexpr (Config::kGeneral) row_bias = score_view(params.p, params.p.bias, keys.task().s, keys.head(step));
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) { // key by key: few facts about keys are in registers at a time
        const int key = key_row(m, half);
        const float bias = shared.keys.bias[step.buffer][key];
        uint32_t bits[kWordCount];
        if constexpr (kTest) keep_bits(step, stage, key, bits);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          const float2 lse = *reinterpret_cast<const float2 *>(&shared.lse[stage][8 * n + accumulator_column()]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float &score = scores[m][n][2 * half + i], &gradient = gradients[m][n][2 * half + i];
            float slope, x = factors.score<kCap>(score, bias, &slope);
            bool kept = true;
            if constexpr (kTest) kept = bits[n / 4] >> (8 * (n % 4) + i) & 1;
            if constexpr (Config::kGeneral) {
              if (kept && row_bias.rows) {
                const int row = step.tile * kRows + 8 * n + accumulator_column() + i;
                const float b = to_base_2(row_bias.load(row, shared.keys.key[key]));
                kept = b != -INFINITY, x += b;
              }
            }
            x -= i ? lse.y : lse.x;
            if constexpr (kTest) x = fminf(x, 0.0f);
            score = ptx::exp2_approximate(x);
            if constexpr (kTest) score = kept ? score : 0.0f;
            if constexpr (kKeyGradient) {
              float ds = score * gradient;
              if constexpr (kTest) ds = kept ? ds : 0.0f; // V of a key that is not kept may be anything
              dbias[m][half] += ds;
              gradient = ds * slope;
            }
          }
        }
      }
  }

  __device__ void make_gradients(const KeyStep &step, int stage, bool careful, float (&scores)[kKeyTiles][kRowTiles][4],
                                 float (&gradients)[kKeyTiles][kRowTiles][4]) {
    const bool cap = params.p.softcap > 0;
    if (Config::kGeneral || careful || !keys.covers(step, kRows)) {
      if (cap) return make_gradients<true, true>(step, stage, scores, gradients);
      return make_gradients<false, true>(step, stage, scores, gradients);
    }
    if constexpr (!Config::kGeneral) {
      if (cap) return make_gradients<true, false>(step, stage, scores, gradients);
      make_gradients<false, false>(step, stage, scores, gradients);
    }
  }

  __device__ void multiply(const KeyStep &step, int stage, bool careful) {
    const uint32_t q = q_base + stage * Config::kRowBytes, dout = dout_base + stage * Config::kRowBytes;
    float scores[kKeyTiles][kRowTiles][4], gradients[kKeyTiles][kRowTiles][4];
    clear(scores);
    multiply_rows<Element, kHeadDim>(scores, k_fragment, q + row_offset_right);
    if (wants_score_gradients()) {
      // The sums start from -delta, which saves a subtraction.
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const float2 delta = *reinterpret_cast<const float2 *>(&shared.delta[stage][8 * n + accumulator_column()]);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) gradients[m][n][i] = i % 2 ? -delta.y : -delta.x;
      }
      multiply_rows<Element, kHeadDim>(gradients, v_fragment, dout + row_offset_right);
    } else {
      clear(gradients);
    }
    make_gradients(step, stage, careful, scores, gradients);
    if constexpr (kValueGradient)
      if (present(params.a.dv)) multiply_columns<Element, kHeadDim>(dv, scores, dout + column_offset_right);
    if constexpr (kKeyGradient)
      if (present(params.a.dk)) multiply_columns<Element, kHeadDim>(dk, gradients, q + column_offset_right);
  }

  // Writes the sums of the bias gradient over the rows of a head, or of all heads that share the bias.
  __device__ void write_bias(int64_t head_of_group) {
    if constexpr (kKeyGradient) {
      if (!params.wants_bias_sums) return;
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float sum = ptx::row_sum(dbias[m][half]);
          dbias[m][half] = 0.0f;
          const int key = key_row(m, half);
          if (threadIdx.x % 4 == 0 && shared.keys.key[key] >= 0) *keys.bias_sum(head_of_group, key) = sum;
        }
    }
  }

  __device__ void run() {
    if constexpr (kKeyGradient) clear(dk);
    if constexpr (kValueGradient) clear(dv);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) dbias[m][0] = dbias[m][1] = 0.0f;
    load_keys();
    bool more = load(keys.first_step(kRows), 0);
    for (int stage = 0; more; stage ^= 1) {
      ptx::wait_copies<0>();
      const bool careful = __syncthreads_or(is_odd(stage)); // this tile is there; nobody reads the last one any more
      const KeyStep &step = shared.steps[stage];
      const KeyStep next = keys.next_step(step, kRows);
      const bool head_ends = !next.valid || next.head != step.head;
      more = load(next, stage ^ 1);
      if (careful) clear_empty_rows(stage);
      multiply(step, stage, careful);
      if (params.bias_heads > 1 && head_ends) write_bias(step.head);
    }
    ptx::wait_copies<0>();
    if (params.bias_heads == 1) write_bias(0);
  }

  // dk and dv where nothing else is added to them, float32 partial sums otherwise.
  __device__ void write() const {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = key_row(m, half);
        if (shared.keys.key[key] < 0) continue;
        const auto write = [&](const fdm_tensor &t, const auto &sums, float factor, int which) {
          if (!present(t)) return;
          if (float *partial = keys.partial_sums(which, key)) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 8; ++d)
              *reinterpret_cast<float2 *>(partial + 8 * d + accumulator_column()) =
                  make_float2(sums[d][2 * half], sums[d][2 * half + 1]);
          } else {
            write_row(static_cast<Element *>(t.data) + keys.row_offset(t, key), t.stride[3], int(params.p.head_dim),
                      sums, half, factor);
          }
        };
        if constexpr (kKeyGradient) write(params.a.dk, dk[m], params.p.scale, 0);
        if constexpr (kValueGradient) write(params.a.dv, dv[m], 1.0f, 1);
      }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    dkdv_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ char dynamic_shared[];
  auto &shared = *reinterpret_cast<DkdvShared<Config> *>(dynamic_shared);
  if (int(blockIdx.x) >= *params.keys.item_count) return;
  DkdvBlock<Config> block(params, shared);
  block.keys.start(params.keys.items[blockIdx.x], Config::kKeyGradient);
  block.run();
  block.write();
}

} // namespace fdm::cuda
