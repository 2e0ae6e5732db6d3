// SPDX-License-Identifier: BSD-3-Clause
// All gradients of dense blocks at once, with Hopper's wgmma: a tile of 128 x 128 scores stays with a block of threads
// while the sources of its bias go by, and the tile of dbias stays in registers.
//
// Two consumer warpgroups have 64 rows each. S = Q K', P = exp(S - lse), dP = dO V' and dS = P (dP - delta) are theirs
// alone; P and dS then go to shared memory, since dV = P' dO and dK = dS' Q sum over the rows of both, 64 keys to each.
// dQ, dK and dV are sums over tiles of other blocks, so they are added to float32 sums in global memory, in no fixed
// order, as is a tile of dbias whose sources several blocks share.
//
// The kernel is persistent: while the results of a tile are written, the producer copies the first rows of the next.
//
// Nothing here knows the rare cases. What NaN, Inf and very large numbers do where a pair is not kept shows in sums that are
// not finite, which are found when they are rounded (../fused_sums.cu); then the kernels of fixed order do all.
#pragma once

#include "../../tile/score.cuh"
#include "../../tile/sm90/products.cuh"
#include "fused_producer.cuh"

namespace fdm::cuda {

template <class Config> struct DenseFusedConsumer {
  using Element = typename Config::Element;
  using Pair = typename Config::Pair;
  using Tile = typename Pair::Tile;
  static constexpr int kTiles = Config::kTile / 8, kOutTiles = Config::kHeadDim / 8;
  using Scores = float[kTiles][4];
  static constexpr int kFullBarrier = 4; // of P and dS
  static constexpr int kSize = Config::kWide ? 4 : 2, kChunkTiles = kTiles / Config::kBiasChunks;

  const DenseBackward &work;
  DenseFusedShared<Config> &shared;
  DenseFusedTask task;
  PipelineState<Config::kStages> state;
  Scores dbias;

  __device__ DenseFusedConsumer(const DenseBackward &own_work, DenseFusedShared<Config> &memory)
      : work(own_work), shared(memory) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ int64_t row(int half) const {
    return int64_t(task.row_tile) * Config::kTile + 16 * warp() + accumulator_row(half);
  }
  __device__ int64_t key(int n) const { return int64_t(task.key_tile) * Config::kTile + 8 * n + accumulator_column(); }

  // The elements of the bias that meet this thread's scores; those of dropped pairs, and where there are none, are -inf.
  __device__ void load_bias() const {
    const fdm_problem &p = work.call.p;
    const Source source = source_of(work.call, task.unit, task.first);
    const Sequence s = dense_sequence(p, source.batch);
    const Matrix bias = score_matrix(p, p.bias, s, source.head, kSize);
    const int64_t last_row = int64_t(task.row_tile + 1) * Config::kTile,
                  last_key = int64_t(task.key_tile + 1) * Config::kTile;
    const bool sees_all = !is_causal(p) || last_key <= last_row - Config::kTile + p.keys - p.queries + 1;
    if (work.call.bias_chunks && !folds_mask(p) && sees_all && last_row <= p.queries && last_key <= p.keys)
      return load_whole_bias(bias);
#pragma unroll 1
    for (int c = 0; c < Config::kBiasChunks; ++c) {
      uint32_t words[4];
      uint16_t halves[8];
#pragma unroll
      for (int i = 0; i < 4 * kChunkTiles; ++i) {
        const int64_t r = row(i / 2 % 2), k = key(c * kChunkTiles + i / 4) + i % 2,
                      offset = r * bias.row + k * bias.col;
        const bool keeps = is_kept(s, source, r, k);
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
  // An element of the bias as it is kept.
  __device__ static uint32_t word_of(const Matrix &bias, int64_t offset) {
    float element;
    if constexpr (Config::kWide)
      element = static_cast<const float *>(bias.base)[offset];
    else
      element = float(static_cast<const Element *>(bias.base)[offset]);
    return __float_as_uint(element * (Config::kFolds ? kLog2E : 1.0f));
  }
  // Loads two neighbours at a time, of a tile that is whole, and of which no pair is dropped.
  __device__ void load_whole_bias(const Matrix &bias) const {
    using Pair = std::conditional_t<Config::kWide, uint2, uint32_t>;
    const Pair *first[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      first[half] = reinterpret_cast<const Pair *>(static_cast<const char *>(bias.base) +
                                                   (row(half) * bias.row + key(0)) * kSize);
#pragma unroll
    for (int c = 0; c < Config::kBiasChunks; ++c) {
      Pair pairs[kChunkTiles][2];
#pragma unroll
      for (int n = 0; n < kChunkTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) pairs[n][half] = first[half][4 * (c * kChunkTiles + n)];
      if constexpr (Config::kFolds) {
        float words[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (Config::kWide) {
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
  // A mask of keys is a matter of each source.
  __device__ bool is_kept(const Sequence &s, const Source &source, int64_t r, int64_t k) const {
    const fdm_problem &p = work.call.p;
    if (r >= p.queries || k >= p.keys || (is_causal(p) && k > r + p.keys - p.queries)) return false;
    if (has_rows(p.mask)) {
      const Matrix mask = score_matrix(p, p.mask, s, source.head, 1);
      return static_cast<const uint8_t *>(mask.base)[r * mask.row + k * mask.col] != 0;
    }
    if (!present(p.start)) return true;
    const RowRange rows = rows_of_key(p, s, source.head, k);
    return rows.first <= r && r < rows.past;
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

  // Puts P in the place of products that have -lse in them, and -inf for what is dropped.
  __device__ void make_folded_probabilities(Scores &scores) const {
    const float factor = work.call.p.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float bias[1][4];
      read_bias(n, bias);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = ptx::exp2_approximate(fmaf(scores[n][i], factor, bias[0][i]));
    }
  }
  // Puts dS in the place of dP - delta, and adds it to dbias.
  __device__ void make_folded_gradients(const Scores &p, Scores &gradients) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gradients[n][i] *= p[n][i];
        dbias[n][i] += gradients[n][i];
      }
  }

  // Puts P in the place of the products Q K'.
  template <bool kDrops> __device__ void make_probabilities(Scores &scores, int stage) const {
    const auto &known = shared.known.stages[stage];
    const float scale = work.call.p.scale;
    const float low = known.shift[16 * warp() + accumulator_row(0)],
                high = known.shift[16 * warp() + accumulator_row(1)];
    float bias[kChunkTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n % kChunkTiles == 0) read_bias(n / kChunkTiles, bias);
      float dropped[2];
      if constexpr (kDrops) known.dropped.read(n, dropped); // inf or -inf
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float score = fmaf(scores[n][i], scale, bias[n % kChunkTiles][i]);
        // The bias of what is dropped may be NaN, which fminf leaves out.
        if constexpr (kDrops) score = fminf(score, dropped[i % 2]);
        scores[n][i] = ptx::exp2_approximate(fmaf(score, kLog2E, i < 2 ? low : high));
      }
    }
  }

  // Puts dS in the place of dP, and adds it to dbias.
  __device__ void make_score_gradients(const Scores &p, Scores &gradients, int stage) {
    const auto &known = shared.known.stages[stage];
    const float low = known.delta[16 * warp() + accumulator_row(0)],
                high = known.delta[16 * warp() + accumulator_row(1)];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gradients[n][i] = p[n][i] * (gradients[n][i] - (i < 2 ? low : high));
        dbias[n][i] += gradients[n][i];
      }
  }

  __device__ void store(const uint32_t (&packed)[kTiles / 2][4], const char *tile) const {
    store_left<typename Config::Scores>(packed, ptx::shared_address(tile), 16 * warp(), 0);
  }

  // Adds 16 rows for each warp, of this thread's accumulators of a tile of 128, to the sums from row `first` on.
  __device__ static void add_sums(float *sums, int64_t first, const float (&x)[kOutTiles][4]) {
    if (!sums) return;
    float *own = sums + (first + 16 * warp()) * Config::kHeadDim + lane() * 4;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) ptx::add_global(own + n * 128, x[n]);
  }

  struct Products {
    float dq[kOutTiles][4], dk[kOutTiles][4], dv[kOutTiles][4];
  };

  __device__ uint64_t rows_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sRows[stage]), which);
  }
  __device__ uint64_t keys_of(int stage, int which) const {
    return Pair::descriptor(ptx::shared_address(shared.sKeys[stage]), which);
  }

  // Starts S = Q K' or dP = dO V' of this warpgroup's rows: the first or second of each pair.
  __device__ void start_scores(Scores &products, int stage, int which) const {
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(
        products, rows_of(stage, which) + Tile::offset(64, 0) * Roles::consumer_group(), keys_of(stage, which), false);
    if constexpr (Config::kFolds) {
      const int group = Roles::consumer_group();
      const uint64_t left = which == 0 ? shared.known.shifts_of(stage, group) : shared.known.deltas_of(stage, group),
                     right = which == 0 ? shared.known.keys_of(stage) : shared.known.ones_descriptor();
      ptx::wgmma_ss<Element, false, false>(products, left, right, true);
    }
    ptx::warpgroup_commit_batch();
  }

  // Starts dV = P' dO and dK = dS' Q of this warpgroup's keys, and dQ = dS K of its rows.
  __device__ void start_gradients(Products &sums, const uint32_t (&own_ds)[kTiles / 2][4], int stage) const {
    const int group = Roles::consumer_group();
    const uint64_t p = Config::Scores::descriptor(ptx::shared_address(shared.sP)),
                   ds = Config::Scores::descriptor(ptx::shared_address(shared.sdS)),
                   own_keys = Config::Scores::offset(0, 64) * group;
    using Left = typename Config::Scores;
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kTile>(sums.dv, p + own_keys, rows_of(stage, 1),
                                                                        false);
    warpgroup_gemm_ss_columns<Element, Left, true, Tile, Config::kTile>(sums.dk, ds + own_keys, rows_of(stage, 0),
                                                                        false);
    warpgroup_gemm_rs<Element, Tile>(sums.dq, own_ds, keys_of(stage, 0), false);
    ptx::warpgroup_commit_batch();
  }

  __device__ static void finish_gradients(Products &sums, uint32_t (&own_ds)[kTiles / 2][4]) {
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(sums.dq);
    ptx::warpgroup_fence_operand(sums.dk);
    ptx::warpgroup_fence_operand(sums.dv);
    ptx::warpgroup_fence_operand(own_ds);
  }

  // Adds what start_gradients() has made to the sums, and releases the stage.
  __device__ void add_gradients(const Products &sums, int stage) const {
    const int64_t first_row = shared.places[stage].first_row, first_key = shared.places[stage].first_key;
    Roles::consumer_release(shared.empty[stage]);
    add_sums(work.fused.dq, first_row, sums.dq);
    add_sums(work.fused.dk, first_key, sums.dk);
    add_sums(work.fused.dv, first_key, sums.dv);
  }

  __device__ void turn_into_probabilities(Scores &scores, int stage) const {
    if constexpr (Config::kFolds)
      make_folded_probabilities(scores);
    else if (shared.known.stages[stage].dropped.any())
      make_probabilities<true>(scores, stage);
    else
      make_probabilities<false>(scores, stage);
  }

  __device__ void step(int stage) {
    Scores scores, gradients;
    uint32_t packed[kTiles / 2][4];
    Products sums;
    start_scores(scores, stage, 0);
    start_scores(gradients, stage, 1);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_fence_operand(scores);
    turn_into_probabilities(scores, stage);
    pack_left<Element>(packed, scores);
    Roles::take_turn(Roles::consumer_group()); // the products of the step before have read P and dS
    store(packed, shared.sP);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(gradients);
    if constexpr (Config::kFolds)
      make_folded_gradients(scores, gradients);
    else
      make_score_gradients(scores, gradients, stage);
    pack_left<Element>(packed, gradients);
    store(packed, shared.sdS);
    ptx::fence_async_proxy();
    ptx::sync_threads<kFullBarrier, Roles::kConsumerThreads>();
    ptx::warpgroup_arrive();
    start_gradients(sums, packed, stage);
    finish_gradients(sums, packed);
    Roles::pass_turn(Roles::consumer_group());
    add_gradients(sums, stage);
  }

  __device__ void write_dbias() const {
    const FusedWork &division = work.fused;
    const fdm_problem &p = work.call.p;
    if (!present(work.a.dbias)) return;
    const FusedDbiasTile tile{task.unit, task.row_tile, task.key_tile};
    const int first = warp() * kTiles * 32 + lane(); // quads
    if (division.dbias) {
      float *sums = division.dbias + (tile_number(division, tile) * kWideTileQuads + first) * 4;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) ptx::add_global(sums + n * 128, dbias[n]);
      return;
    }
    const bool whole =
        int64_t(task.row_tile + 1) * Config::kTile <= p.queries && int64_t(task.key_tile + 1) * Config::kTile <= p.keys;
    if (work.dbias_pairs && whole) return store_whole_dbias();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      store_quad<Element>(work, tile, first + n * 32, make_float4(dbias[n][0], dbias[n][1], dbias[n][2], dbias[n][3]));
  }
  // Stores two neighbours at a time.
  __device__ void store_whole_dbias() const {
    const fdm_tensor &t = work.a.dbias;
    const int64_t head = task.unit / t.shape[1] * t.stride[0] + task.unit % t.shape[1] * t.stride[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t first = head + row(half) * t.stride[2] + key(0);
      if (t.dtype == FDM_FLOAT32) {
        auto *own = reinterpret_cast<float2 *>(static_cast<float *>(t.data) + first);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) own[4 * n] = {dbias[n][2 * half], dbias[n][2 * half + 1]};
      } else {
        auto *own = reinterpret_cast<uint32_t *>(static_cast<Element *>(t.data) + first);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) own[4 * n] = ptx::pack<Element>(dbias[n][2 * half], dbias[n][2 * half + 1]);
      }
    }
  }

  __device__ void run(const DenseFusedTask &own_task) {
    task = own_task;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dbias[n][i] = 0.0f;
    if (task.first < task.past) load_bias();
    for (int64_t index = task.first; index < task.past; ++index, ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      step(state.index);
    }
    write_dbias();
  }

  __device__ void run() {
    Roles::pass_turn(Roles::consumer_group());
    DenseFusedTask::for_each(work, [&](const DenseFusedTask &next) { run(next); });
    Roles::take_turn(Roles::consumer_group()); // the last turn that was passed on
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dense_fused_kernel(const __grid_constant__ DenseBackward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  if (*work.odd) return;
  auto &shared = *reinterpret_cast<DenseFusedShared<Config> *>(dynamic_shared);
  shared.init();
  __syncthreads();
  using Registers = std::conditional_t<Config::kFolds, RoleRegisters<216, 72>, RoleRegisters<224, 56>>;
  if (Roles::is_producer()) {
    Registers::produce();
    PipelineState<Config::kStages> state;
    DenseFusedTask::for_each(
        work, [&](const DenseFusedTask &task) { DenseFusedProducer<Config>(work, shared, task).run(state); });
  } else {
    Registers::consume();
    DenseFusedConsumer<Config>(work, shared).run();
  }
}

} // namespace fdm::cuda
