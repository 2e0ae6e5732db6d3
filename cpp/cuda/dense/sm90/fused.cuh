// SPDX-License-Identifier: BSD-3-Clause
// All gradients of dense blocks at once, with Hopper's wgmma: a tile of 128 x 128 scores stays with a block of threads
// while the sources of its bias go by, and the tile of dbias stays in registers.
//
// Two consumer warpgroups have 64 rows each. S = Q K', P = exp(S - lse), dP = dO V' and dS = P (dP - delta) are theirs
// alone; P and dS then go to shared memory, since dV = P' dO and dK = dS' Q sum over the rows of both, 64 keys to each.
// dQ, dK and dV are sums over tiles of other blocks, so they are added to float32 sums in global memory, in no fixed
// order, as is a tile of dbias whose sources several blocks share.
//
// Nothing here knows the rare cases. Products with numbers so large, NaN or Inf, that what a pair does not keep could
// reach a result, are found before (odd_values.cu); then this kernel does nothing, and those of fixed order do all.
#pragma once

#include "../../tile/score.cuh"
#include "../../tile/sm90/products.cuh"
#include "../fused_tiles.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, bool kWideBias> struct DenseFusedConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kTile = kWideTile;
  static constexpr bool kWide = kWideBias; // the bias is float32
  using Pair = TilePair<kHeadDim>;         // Q and dO, or K and V
  using Scores = SmemTile<kTile, kTile>;
  static constexpr int kStages = kHeadDim == 64 && kWide ? 1 : 2;
  static constexpr int kBiasChunks = kWide ? 16 : 8; // 16 bytes each, of a thread
};

template <class Config> struct DenseFusedShared {
  struct Stage {
    float shift[Config::kTile], delta[Config::kTile]; // -lse to base 2, of the rows
    DroppedKeys dropped;
    int64_t first_row, first_key; // of the tile in the sums of the source
  };

  alignas(1024) char sRows[Config::kStages][Config::Pair::kBytes], sKeys[Config::kStages][Config::Pair::kBytes];
  char sP[Config::Scores::kBytes], sdS[Config::Scores::kBytes];
  uint4 bias[Config::kBiasChunks][Roles::kConsumerThreads]; // each thread's own elements, -inf where a pair is dropped
  Stage stages[Config::kStages];
  uint64_t full[Config::kStages], empty[Config::kStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
  }
};

// The tile of a block of threads, and the sources that go by.
struct DenseFusedTask {
  int unit, row_tile, key_tile;
  int64_t first, past;

  __device__ explicit DenseFusedTask(const DenseBackward &work) {
    const FusedWork &division = work.fused;
    int64_t number = blockIdx.x;
    key_tile = int(number % division.key_tiles);
    number /= division.key_tiles;
    row_tile = int(number % division.row_tiles);
    number /= division.row_tiles;
    unit = division.first_unit + int(number % division.units);
    const int64_t split = number / division.units;
    first = division.first_source + division.sources * split / division.splits;
    past = division.first_source + division.sources * (split + 1) / division.splits;
    const fdm_problem &p = work.call.p;
    const int64_t last_row = min64(p.queries, (row_tile + 1) * int64_t(kWideTile)) - 1;
    if (is_causal(p) && int64_t(key_tile) * kWideTile > last_row + p.keys - p.queries) past = first;
  }
};

template <class Config> struct DenseFusedProducer {
  using Rows = WideRows<typename Config::Pair>;

  const DenseBackward &work;
  DenseFusedShared<Config> &shared;
  const DenseFusedTask &task;
  const int first_row, first_key;
  const Rows q, dout, k, v;
  const uint32_t used; // the rows of this warp that exist

  __device__ DenseFusedProducer(const DenseBackward &own_work, DenseFusedShared<Config> &memory,
                                const DenseFusedTask &own_task)
      : work(own_work), shared(memory), task(own_task), first_row(own_task.row_tile * Config::kTile),
        first_key(own_task.key_tile * Config::kTile), q(own_work.call.p.q, own_work.call.p.head_dim, first_row),
        dout(own_work.a.dout, own_work.call.p.head_dim, first_row),
        k(own_work.call.p.k, own_work.call.p.head_dim, first_key),
        v(own_work.call.p.v, own_work.call.p.head_dim, first_key),
        used(__ballot_sync(0xffffffffu, first_row + own() < own_work.call.p.queries)) {}

  // What this thread knows of its row and its key, fetched a step ahead, as it lies in memory.
  struct Facts {
    RowStatistics row;
    uint8_t kept;
  };

  __device__ static int own() { return Roles::producer_thread(); }

  __device__ Facts fetch(const SourceWalk &source) const {
    const fdm_problem &p = work.call.p;
    Facts facts{{INFINITY, 0.0f}, 0};
    if (first_row + own() < p.queries)
      facts.row = fetch_statistics(work, {source.batch, source.head, true}, first_row + own());
    if (first_key + own() < p.keys) {
      const uint8_t *kept = kept_key(p, source.batch, source.head, first_key + own());
      facts.kept = kept ? *kept : 1;
    }
    return facts;
  }

  __device__ void load(int stage, const SourceWalk &source, const Facts &facts) const {
    const fdm_problem &p = work.call.p;
    const FusedWork &division = work.fused;
    auto &known = shared.stages[stage];
    const RowStatistics row = to_base_2(facts.row);
    known.shift[own()] = -row.lse;
    known.delta[own()] = row.delta;
    const uint32_t kept = known.dropped.set(facts.kept != 0);
    const int64_t kv_head = kv_head_of(p, source.head), batch = source.batch - division.first_batch;
    if (own() == 0) {
      known.first_row = (batch * p.heads + source.head) * division.sum_rows() + first_row;
      known.first_key = (batch * p.kv_heads + kv_head) * division.sum_keys() + first_key;
    }
    q.copy(shared.sRows[stage], 0, q.row_of(source.batch, source.head), used);
    k.copy(shared.sKeys[stage], 0, k.row_of(source.batch, kv_head), kept);
    dout.copy(shared.sRows[stage], 1, dout.row_of(source.batch, source.head), used);
    v.copy(shared.sKeys[stage], 1, v.row_of(source.batch, kv_head), kept);
  }

  __device__ void run() const {
    if (task.first >= task.past) return;
    PipelineState<Config::kStages> state;
    SourceWalk source(work.call, task.unit, task.first);
    Facts facts = fetch(source);
    for (int64_t index = task.first; index < task.past; ++index, ++state) {
      SourceWalk after = source;
      ++after;
      Facts next{};
      if (index + 1 < task.past) next = fetch(after);
      Roles::producer_acquire(shared.empty[state.index], state.phase);
      load(state.index, source, facts);
      Roles::producer_commit(shared.full[state.index]);
      source = after;
      facts = next;
    }
  }
};

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
  const DenseFusedTask &task;
  Scores dbias;

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
        if constexpr (Config::kWide)
          words[i] = keeps ? static_cast<const uint32_t *>(bias.base)[offset] : 0xff800000u;
        else
          halves[i] = keeps ? static_cast<const uint16_t *>(bias.base)[offset]
                            : uint16_t(__is_same(Element, __half) ? 0xfc00 : 0xff80);
      }
      if constexpr (!Config::kWide)
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = halves[2 * i] | uint32_t(halves[2 * i + 1]) << 16;
      shared.bias[c][threadIdx.x] = make_uint4(words[0], words[1], words[2], words[3]);
    }
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
      static_assert(sizeof(pairs) == sizeof(uint4));
      shared.bias[c][threadIdx.x] = reinterpret_cast<const uint4 &>(pairs);
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
    if constexpr (Config::kWide) {
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

  // Puts P in the place of the products Q K'.
  template <bool kDrops> __device__ void make_probabilities(Scores &scores, int stage) const {
    const auto &known = shared.stages[stage];
    const float scale = work.call.p.scale;
    const float low = known.shift[16 * warp() + accumulator_row(0)],
                high = known.shift[16 * warp() + accumulator_row(1)];
    float bias[kChunkTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n % kChunkTiles == 0) read_bias(n / kChunkTiles, bias);
      float dropped[2];
      if constexpr (kDrops) known.dropped.read(n, dropped);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float score = fmaf(scores[n][i], scale, bias[n % kChunkTiles][i]);
        // The bias of what is dropped may be NaN.
        if constexpr (kDrops) score = dropped[i % 2] == 0.0f ? score : -INFINITY;
        scores[n][i] = ptx::exp2_approximate(fmaf(score, kLog2E, i < 2 ? low : high));
      }
    }
  }

  // Puts dS in the place of dP, and adds it to dbias.
  __device__ void make_score_gradients(const Scores &p, Scores &gradients, int stage) {
    const auto &known = shared.stages[stage];
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

  __device__ void step(int stage, bool first) {
    const int group = Roles::consumer_group();
    const uint32_t rows_at = ptx::shared_address(shared.sRows[stage]),
                   keys_at = ptx::shared_address(shared.sKeys[stage]);
    const uint64_t queries = Pair::descriptor(rows_at, 0), dout = Pair::descriptor(rows_at, 1);
    const uint64_t keys = Pair::descriptor(keys_at, 0), values = Pair::descriptor(keys_at, 1);
    const uint64_t own_rows = Tile::offset(64, 0) * group;

    Scores scores, gradients;
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(scores, queries + own_rows, keys, false);
    ptx::warpgroup_commit_batch();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(gradients, dout + own_rows, values, false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_fence_operand(scores);
    const auto &known = shared.stages[stage];
    if (known.dropped.any())
      make_probabilities<true>(scores, stage);
    else
      make_probabilities<false>(scores, stage);
    uint32_t packed[kTiles / 2][4];
    pack_left<Element>(packed, scores);
    if (!first) Roles::take_turn(group); // the products of the step before have read P and dS
    store(packed, shared.sP);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(gradients);
    make_score_gradients(scores, gradients, stage);
    pack_left<Element>(packed, gradients);
    store(packed, shared.sdS);
    ptx::fence_async_proxy();
    ptx::sync_threads<kFullBarrier, Roles::kConsumerThreads>();

    float dq[kOutTiles][4], dk[kOutTiles][4], dv[kOutTiles][4];
    clear_sums(dq);
    const uint64_t own_keys = Config::Scores::offset(0, 64) * group;
    const uint64_t p_desc = Config::Scores::descriptor(ptx::shared_address(shared.sP)) + own_keys;
    const uint64_t ds_desc = Config::Scores::descriptor(ptx::shared_address(shared.sdS)) + own_keys;
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, typename Config::Scores, true, Tile, Config::kTile>(dv, p_desc, dout, false);
    warpgroup_gemm_ss_columns<Element, typename Config::Scores, true, Tile, Config::kTile>(dk, ds_desc, queries, false);
    warpgroup_gemm_rs<Element, Tile>(dq, packed, keys);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(dq);
    ptx::warpgroup_fence_operand(dk);
    ptx::warpgroup_fence_operand(dv);
    ptx::warpgroup_fence_operand(packed);
    const int64_t first_row = known.first_row, first_key = known.first_key;
    Roles::consumer_release(shared.empty[stage]);
    Roles::pass_turn(group);
    add_sums(work.fused.dq, first_row, dq);
    add_sums(work.fused.dk, first_key, dk);
    add_sums(work.fused.dv, first_key, dv);
  }

  __device__ static void clear_sums(float (&sums)[kOutTiles][4]) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
  }

  __device__ void write_dbias() const {
    const FusedWork &division = work.fused;
    if (!present(work.a.dbias)) return;
    const FusedDbiasTile tile{task.unit, task.row_tile, task.key_tile};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int index = (warp() * kTiles + n) * 32 + lane();
      if (division.dbias)
        ptx::add_global(division.dbias + (tile_number(division, tile) * kWideTileQuads + index) * 4, dbias[n]);
      else
        store_quad<Element>(work, tile, index, make_float4(dbias[n][0], dbias[n][1], dbias[n][2], dbias[n][3]));
    }
  }

  __device__ void run() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dbias[n][i] = 0.0f;
    if (task.first < task.past) load_bias();
    PipelineState<Config::kStages> state;
    for (int64_t index = task.first; index < task.past; ++index, ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      step(state.index, index == task.first);
    }
    if (task.first < task.past) Roles::take_turn(Roles::consumer_group()); // the last turn that was passed on
    write_dbias();
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1) dense_fused_kernel(const __grid_constant__ DenseBackward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  if (*work.odd) return;
  auto &shared = *reinterpret_cast<DenseFusedShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const DenseFusedTask task(work);
  using Registers = RoleRegisters<232, 40>;
  if (Roles::is_producer()) {
    Registers::produce();
    DenseFusedProducer<Config>(work, shared, task).run();
  } else {
    Registers::consume();
    DenseFusedConsumer<Config>{work, shared, task}.run();
  }
}

} // namespace fdm::cuda
