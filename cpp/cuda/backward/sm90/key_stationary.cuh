// SPDX-License-Identifier: BSD-3-Clause
// The common part of the key-stationary Hopper kernels. K and V of a key block stay in shared memory, 64 keys for
// each consumer warpgroup. A producer warpgroup loads them once. Then it finds the steps and loads their rows of Q
// and dO, into one pipeline stage for each step.
#pragma once

#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/roles.cuh"
#include "../key_gradients.cuh"
#include "ptx/tensor.cuh"

namespace fdm::cuda {

// Which inputs have a row for each query: none; possibly the mask (a row plan); the bias, and possibly the mask.
enum class PerQueryInput { none, mask, bias };

// Which products are computed: all, or only S', which reads neither V nor dO.
enum class KeyProducts { all, scores };

template <class Roles> struct Producers {
  static constexpr int kThreads = Roles::kProducerThreads;
  __device__ static __forceinline__ int thread() { return Roles::producer_thread(); }
  __device__ static __forceinline__ void sync() { Roles::sync_producers(); }
};

// With 128 keys, each consumer warpgroup has 64 of them. 64 keys (kSharesKeys) are for head dimensions whose
// gradients do not fit in the registers of one warpgroup. Two warpgroups then have the same keys. Each computes the
// scores of half of a step's rows, and half of the columns of the gradients.
template <class ElementType, int kHeadDimension, int kKeyCount, int kRowCount, int kStageCount, Softcap kSoftcapKind,
          PerQueryInput kPerQueryInput, KeyProducts kProducts = KeyProducts::all, int kValueDimension = kHeadDimension>
struct KeyStationaryConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kValueDim = kValueDimension, kKeys = kKeyCount, kRows = kRowCount,
                       kStages = kStageCount;
  static constexpr bool kSoftcap = kSoftcapKind == Softcap::applied, kSharesKeys = kKeys == 64;
  static constexpr bool kScoresOnly = kProducts == KeyProducts::scores;
  static constexpr bool kRowBias = kPerQueryInput == PerQueryInput::bias,
                        kHasRowPlans = kPerQueryInput != PerQueryInput::none;
  using Roles = cuda::Roles;
  static_assert(kSharesKeys || kKeys == 128);
  // A warpgroup computes the scores of kScoreRows rows at a time. A step has kParts such parts. kColumns counts the
  // columns of the warpgroup's gradients.
  static constexpr int kScoreRows = kSharesKeys || (kRows == 128 && !kScoresOnly) ? kRows / 2 : kRows;
  static constexpr int kColumns = kSharesKeys ? kHeadDim / 2 : kHeadDim;
  static constexpr int kParts = kRows / kScoreRows;
  static constexpr int kValueColumns = kSharesKeys ? kValueDim / 2 : kValueDim;
  static_assert(!kSharesKeys || (kHeadDim > 128 && kHeadDim % 64 == 0));
  static_assert(!kRowBias || (kSharesKeys && !kSoftcap));
  using KeyTile = SmemTile<kHeadDim, kKeys>;
  using ValueTile = SmemTile<kValueDim, kKeys>;
  using RowTile = SmemTile<kHeadDim, kRows>;
  using DoutTile = SmemTile<kValueDim, kRows>;
  // The steps in the stages, the step being loaded and the step found ahead may be of different heads.
  using Keys = KeyBlock<kKeys, Producers<Roles>, kStages + 2,
                        kRowBias       ? KeyBlockUse::segments_and_row_plans
                        : kHasRowPlans ? KeyBlockUse::row_plans
                                       : KeyBlockUse::segments>;
  using Gradients = KeyGradients<Element, kKeys, 1, kScoreRows, kColumns, GradientSet::both, TileKind::usual, Keys,
                                 kScoreRows, kValueColumns>;
};

// The facts that every consumer reads about a step, in one load. Separate loads would take as long as a product.
struct alignas(16) StepFacts {
  bool test_rows
      [Roles::kProducerWarps]; // test all pairs of a warp's rows: a row is beyond kLargeLse, or KeyStep::tests is set
  bool valid;                  // false ends the steps
  bool ends_bias_sum;          // RowProducer::ends_bias_sum()
  uint8_t concerned_groups;    // bit n: a row may keep a key of group n
  uint8_t buffer;              // of the KeyStep
  int32_t head;                // of the KeyStep
  int32_t first_row;           // the first row

  __device__ bool any_test_rows() const { return test_rows[0] || test_rows[1] || test_rows[2] || test_rows[3]; }
  // All lanes of the warp call this. The second word is uniform, so branches on `valid` to `buffer` are uniform.
  __device__ StepFacts read() const {
    auto words = *reinterpret_cast<const int4 *>(this);
    words.y = uniform(words.y);
    return *reinterpret_cast<const StepFacts *>(&words);
  }
};
static_assert(sizeof(StepFacts) == sizeof(int4));

// Facts about a row tile while it is in shared memory.
template <class Config> struct StageRows {
  RowStage<Config::kKeys, Config::kScoreRows, Config::Keys::kRowPlans>
      parts[Config::kParts]; // step.tile of a part is counted in parts
  StepFacts facts;
};

template <class Config> struct KeyStationaryShared {
  using Roles = typename Config::Roles;

  static constexpr bool kNoValues = Config::kScoresOnly;

  alignas(1024) char sK[Config::KeyTile::kBytes];
  alignas(kNoValues ? 16 : 1024) char sV[kNoValues ? 16 : Config::ValueTile::kBytes];
  alignas(1024) char sQ[Config::kStages][Config::RowTile::kBytes];
  alignas(kNoValues ? 16 : 1024) char sdO[kNoValues ? 1 : Config::kStages][kNoValues ? 16 : Config::DoutTile::kBytes];
  StageRows<Config> stages[Config::kStages]; // an invalid step ends the steps
  typename Config::Keys::Shared keys;
  bool has_key_block; // the thread block has a key block
  uint64_t keys_full, full[Config::kStages], empty[Config::kStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(keys_full, 2 * Roles::kProducerThreads);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
    ptx::fence_async_proxy(); // TMA copies arrive at these barriers
  }
};

// The tensor maps of Q and dO for TMA copies of the rows of a step that a warp loads. `valid`: both exist.
struct RowMaps {
  CUtensorMap q, dout;
  bool valid;
};

template <class Config> struct RowProducer {
  using Roles = typename Config::Roles;
  static constexpr int kRows = Config::kRows, kOwnRows = kRows / Roles::kProducerWarps;

  const BackwardParams &params;
  KeyStationaryShared<Config> &shared;
  const RowMaps *maps; // null: there are none
  typename Config::Keys keys;
  PipelineState<Config::kStages> state;

  __device__ RowProducer(const BackwardParams &parameters, KeyStationaryShared<Config> &memory,
                         const RowMaps *row_maps = nullptr)
      : params(parameters), shared(memory), maps(row_maps), keys(parameters, memory.keys) {}

  __device__ static int warp() { return Roles::producer_thread() / 32; }
  // A lane of a producer warp has one row of a tile, or none.
  __device__ static bool has_row() { return threadIdx.x % 32 < kOwnRows; }
  __device__ static int row() { return warp() * kOwnRows + threadIdx.x % 32; }

  __device__ void load_keys() {
    constexpr int kWarps = Roles::kProducerWarps, kOwnKeys = Config::kKeys / kWarps;
    const int r = warp() * kOwnKeys + threadIdx.x % 32;
    const bool readable = threadIdx.x % 32 < kOwnKeys && shared.keys.readable[r];
    const auto load = [&](auto tile_type, const fdm_tensor &t, char *tile) {
      const uint16_t *row = kZeroRow;
      if (readable) row = static_cast<const uint16_t *>(t.data) + keys.row_offset(t, r);
      decltype(tile_type)::template gather<kWarps>(ptx::shared_address(tile), warp(), row, int(t.shape[3]));
    };
    load(typename Config::KeyTile{}, params.p.k, shared.sK);
    if constexpr (!Config::kScoresOnly) load(typename Config::ValueTile{}, params.p.v, shared.sV);
    Roles::producer_commit(shared.keys_full);
  }

  // The statistics of this lane's row of a step. They are read one step ahead. lse = inf: the row does not exist, or
  // it has no gradient.
  __device__ RowStatistics find_statistics(const KeyStep &step) const {
    const Sequence &s = keys.task().s;
    const int i = step.tile * kRows + row();
    if (!step.valid || !has_row() || i >= s.q_count) return {INFINITY, 0.0f};
    return row_statistics(params, s, keys.head(step), i);
  }

  // Rows without a gradient are loaded as zeros, so that non-finite values in their dO reach no result.
  __device__ void load_rows(const KeyStep &step, const RowStatistics &statistics, bool ends_bias_sum) {
    auto &stage = shared.stages[state.index];
    if (has_row()) {
      auto &part = stage.parts[row() / Config::kScoreRows];
      part.lse[row() % Config::kScoreRows] = statistics.lse;
      part.delta[row() % Config::kScoreRows] = statistics.delta;
    }
    const uint32_t used = __ballot_sync(0xffffffffu, !statistics.empty());
    const bool large_lse = __any_sync(0xffffffffu, !statistics.empty() && fabsf(statistics.lse) > kLargeLse);
    // With a bias per query, consumers test all pairs anyway, and `test_rows` only marks rows beyond kLargeLse.
    if (threadIdx.x % 32 == 0) stage.facts.test_rows[warp()] = large_lse || (!Config::kRowBias && step.tests);
    if (Roles::producer_thread() == 0) set_step(step, ends_bias_sum);
    constexpr uint32_t kAllOwnRows = ~0u >> (32 - kOwnRows);
    if (maps && maps->valid && used == kAllOwnRows) {
      if (threadIdx.x % 32 == 0) copy_boxes(step);
    } else {
      copy_rows<typename Config::RowTile>(params.p.q, step, used, shared.sQ[state.index]);
      if constexpr (!Config::kScoresOnly)
        copy_rows<typename Config::DoutTile>(params.a.dout, step, used, shared.sdO[state.index]);
    }
    if constexpr (Config::Keys::kRowPlans) {
      if (keys.task().has_words) {
        // Each part of a step has the words of all keys.
        constexpr int kWords = Config::kParts * Config::kKeys;
        static_assert(kWords % Roles::kProducerThreads == 0);
#pragma unroll
        for (int n = Roles::producer_thread(); n < kWords; n += Roles::kProducerThreads) {
          const int part = n / Config::kKeys, r = n % Config::kKeys;
          const int32_t key = shared.keys.key[r];
          ptx::cp_async_16(ptx::shared_address(&stage.parts[part].words[r]), keys.words(step, kRows).of(max(key, 0)),
                           key >= 0);
        }
      }
    }
  }

  // Stores the step of the stage for the consumers. An invalid step ends the steps.
  __device__ void set_step(const KeyStep &step, bool ends_bias_sum) const {
    auto &stage = shared.stages[state.index];
#pragma unroll
    for (int n = 0; n < Config::kParts; ++n) {
      KeyStep &own_step = stage.parts[n].step;
      own_step = step;
      own_step.tile = step.tile * Config::kParts + n;
    }
    StepFacts &facts = stage.facts;
    facts.valid = step.valid;
    facts.ends_bias_sum = ends_bias_sum;
    uint32_t concerned_groups = 0;
#pragma unroll
    for (int n = 0; n < Config::kKeys / 64; ++n) concerned_groups |= uint32_t(keys.concerns(n, step, kRows)) << n;
    facts.concerned_groups = uint8_t(concerned_groups);
    facts.buffer = uint8_t(step.buffer);
    facts.head = step.head;
    facts.first_row = step.tile * kRows;
  }

  // Starts the TMA copies of this warp's rows of a step, if all of them are used. One thread calls this before it
  // arrives.
  __device__ void copy_boxes(const KeyStep &step) const {
    using RowTile = typename Config::RowTile;
    using DoutTile = typename Config::DoutTile;
    constexpr int kPanels = RowTile::kPanels + (Config::kScoresOnly ? 0 : DoutTile::kPanels);
    uint64_t &full = shared.full[state.index];
    const Sequence &s = keys.task().s;
    const int first = warp() * kOwnRows, row = int(s.q_begin) + step.tile * kRows + first;
    const int head = int(keys.head(step)), batch = int(s.batch);
    ptx::expect_bytes(full, kPanels * kOwnRows * RowTile::kRowBytes);
#pragma unroll
    for (int panel = 0; panel < RowTile::kPanels; ++panel) {
      const uint32_t offset = panel * RowTile::kPanelBytes + first * RowTile::kRowBytes;
      ptx::copy_box(ptx::shared_address(shared.sQ[state.index]) + offset, maps->q, 64 * panel, row, head, batch, full);
      if (!Config::kScoresOnly && panel < DoutTile::kPanels)
        ptx::copy_box(ptx::shared_address(shared.sdO[state.index]) + offset, maps->dout, 64 * panel, row, head, batch,
                      full);
    }
  }

  // Starts the copies of this warp's rows of a step. Bit r of `used`: row r is used; otherwise it becomes zeros.
  template <class RowTile>
  __device__ void copy_rows(const fdm_tensor &t, const KeyStep &step, uint32_t used, const char *tile) const {
    constexpr int kTotal = kOwnRows * RowTile::kChunks;
    static_assert(kOwnRows <= 32 && kTotal % 32 == 0);
    const int first = warp() * kOwnRows;
    const uint32_t base = ptx::shared_address(tile);
    const auto *rows = static_cast<const uint16_t *>(t.data) +
                       row_offset(t, keys.task().s, int64_t(step.tile) * kRows + first, keys.head(step));
#pragma unroll 4 // fully unrolled, each copy would need an address in registers
    for (int i = threadIdx.x % 32; i < kTotal; i += 32) {
      const int r = i / RowTile::kChunks, chunk = i % RowTile::kChunks;
      ptx::cp_async_16(RowTile::chunk_address(base, first + r, chunk), rows + r * t.stride[1] + chunk * 8,
                       used >> r & 1 && chunk * 8 < t.shape[3]);
    }
  }

  // Prefetches the bias of a step's rows to L2, from the first and from the last key of the block on.
  __device__ void prefetch_bias(const KeyStep &step) const {
    if constexpr (Config::kRowBias) {
      if (!step.valid || keys.params.keys.takes_planned_keys) return;
      const fdm_tensor &t = params.p.bias;
      const Sequence &s = keys.task().s;
      const int size = t.dtype == FDM_FLOAT32 ? 4 : 2, thread = Roles::producer_thread();
      const int64_t row = min64(int64_t(step.tile) * kRows + thread / 2, s.q_count - 1);
      const int32_t key = shared.keys.key[thread % 2 * (Config::kKeys - 1)];
      const Matrix m = score_matrix(params.p, t, s, keys.head(step), size);
      if (key >= 0) ptx::prefetch_l2(static_cast<const char *>(m.base) + (row * m.row + key * m.col) * size);
    }
  }
  // Whether this step is the last one of a sum of bias gradients: the sum of a head or, for a bias per query, of all
  // heads that share a tile.
  __device__ bool ends_bias_sum(const KeyStep &step, const KeyStep &next) const {
    if (!next.valid) return true;
    if constexpr (Config::kRowBias) return params.p.bias.shape[1] == params.p.heads || next.tile != step.tile;
    return next.head != step.head;
  }

  __device__ void run(const KeyItem &item, const KeyBlockPlace &place) {
    keys.start(item, place, true);
    KeyTask task;
    if constexpr (Config::kScoresOnly) { // the producers of other kernels have too few registers
      task = shared.keys.task;
      keys.hold(task);
    }
    KeyStep step = keys.first_step(kRows);
    prefetch_bias(step);
    RowStatistics statistics = find_statistics(step);
    load_keys();
    for (; step.valid; ++state) {
      const KeyStep next = keys.next_step(step, kRows);
      prefetch_bias(next);
      const RowStatistics next_statistics = find_statistics(next);
      Roles::producer_acquire(shared.empty[state.index], state.phase);
      load_rows(step, statistics, ends_bias_sum(step, next));
      Roles::producer_commit(shared.full[state.index]);
      step = next;
      statistics = next_statistics;
    }
    Roles::producer_acquire(shared.empty[state.index], state.phase);
    if (Roles::producer_thread() == 0) set_step(step, true);
    Roles::producer_commit(shared.full[state.index]);
  }
};

// Where K and V are as left operands of S' and dP'. With both operands of a product in shared memory, reads of it are
// the bottleneck.
enum class KeyOperands { shared, registers };

template <class Config, KeyOperands kKeyOperands = KeyOperands::shared> struct KeyConsumer {
  static constexpr bool kKeysInRegisters = kKeyOperands == KeyOperands::registers;
  using Roles = typename Config::Roles;
  using Element = typename Config::Element;
  using KeyTile = typename Config::KeyTile;
  using ValueTile = typename Config::ValueTile;
  using RowTile = typename Config::RowTile;
  using DoutTile = typename Config::DoutTile;
  static constexpr int kRows = Config::kRows, kScoreRows = Config::kScoreRows, kHeadDim = Config::kHeadDim,
                       kValueDim = Config::kValueDim;
  using Scores = float[1][kScoreRows / 8][4];

  const BackwardParams &params;
  KeyStationaryShared<Config> &shared;
  typename Config::Gradients sums;
  uint64_t k_desc, v_desc;
  // The same keys in registers, if kKeysInRegisters.
  uint32_t own_k[kKeysInRegisters ? kHeadDim / 16 : 1][4], own_v[kKeysInRegisters ? kValueDim / 16 : 1][4];

  __device__ KeyConsumer(const BackwardParams &parameters, KeyStationaryShared<Config> &memory)
      : params(parameters), shared(memory), sums(parameters, memory.keys) {
    const uint64_t own_keys = Config::kSharesKeys ? 0 : KeyTile::offset(64, 0) * Roles::consumer_group();
    k_desc = KeyTile::descriptor(ptx::shared_address(shared.sK)) + own_keys;
    v_desc = ValueTile::descriptor(ptx::shared_address(shared.sV)) + own_keys;
  }

  __device__ static void sync_consumers() { ptx::sync_threads<2, Roles::kConsumerThreads>(); }

  // Sets the non-finite elements of K to 0. dQ = dS K also sums over keys that a row drops, and 0 times NaN or inf is
  // NaN. If a row keeps such a key, the row's lse shows it. All consumers call this.
  __device__ void clear_non_finite_keys() const {
    constexpr uint32_t kExponent = __is_same(Element, __half) ? 0x7c00 : 0x7f80;
    const auto finite = [](uint32_t word) {
      if ((word & kExponent) == kExponent) word &= 0xffff0000u;
      if ((word >> 16 & kExponent) == kExponent) word &= 0xffffu;
      return word;
    };
    const uint32_t base = ptx::shared_address(shared.sK);
#pragma unroll 1
    for (int offset = 16 * int(threadIdx.x); offset < KeyTile::kBytes; offset += 16 * Roles::kConsumerThreads) {
      uint4 words = ptx::load_shared_16_bytes(base + offset);
      words = {finite(words.x), finite(words.y), finite(words.z), finite(words.w)};
      ptx::store_shared(base + offset, words);
    }
    ptx::fence_async_proxy();
    sync_consumers();
  }

  // Loads K and V into registers, if kKeysInRegisters. They are complete in shared memory.
  __device__ void load_keys() {
    if constexpr (!kKeysInRegisters) return;
    load_left<KeyTile>(own_k, ptx::shared_address(shared.sK), threadIdx.x / 32 * 16);
    load_left<ValueTile>(own_v, ptx::shared_address(shared.sV), threadIdx.x / 32 * 16);
  }

  // The part of a step whose scores this warpgroup computes in a turn.
  __device__ static int own_part(int turn = 0) { return Config::kSharesKeys ? Roles::consumer_group() : turn; }
  // The facts about the rows of this part.
  __device__ const auto &own_rows(int stage, int turn = 0) const { return shared.stages[stage].parts[own_part(turn)]; }

  // Starts the product S' with rows of Q. With a bias per query, it is added to the initial contents of `scores`.
  __device__ void start_key_product(Scores &scores, uint64_t rows) const {
    if constexpr (kKeysInRegisters)
      warpgroup_gemm_rs_transposed<Element, RowTile>(scores[0], own_k, rows);
    else
      warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(scores[0], k_desc, rows, Config::kRowBias);
    ptx::warpgroup_commit_batch();
  }
  // Starts the product dP' with rows of dO.
  __device__ void start_value_product(Scores &gradients, uint64_t rows) const {
    if constexpr (kKeysInRegisters)
      warpgroup_gemm_rs_transposed<Element, DoutTile>(gradients[0], own_v, rows);
    else
      warpgroup_gemm_ss<Element, ValueTile, DoutTile, kValueDim>(gradients[0], v_desc, rows, false);
    ptx::warpgroup_commit_batch();
  }
  // Starts both for a part of a step.
  __device__ void start_scores(Scores &scores, Scores &gradients, int stage, int turn = 0) const {
    const uint64_t part = RowTile::offset(kScoreRows, 0) * own_part(turn);
    static_assert(RowTile::offset(kScoreRows, 0) == DoutTile::offset(kScoreRows, 0));
    ptx::warpgroup_arrive();
    start_key_product(scores, row_desc(shared.sQ[stage]) + part);
    start_value_product(gradients, row_desc(shared.sdO[stage]) + part);
  }

  __device__ static uint64_t row_desc(const char *tile) { return RowTile::descriptor(ptx::shared_address(tile)); }

  // Starts sum += left * tile. `left` has a column for each row of the tile.
  template <class Tile = RowTile, int kTiles>
  __device__ static void start_sum(float (&sum)[kTiles][4], const uint32_t (&left)[kRows / 16][4], const char *tile) {
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, Tile>(sum, left, row_desc(tile));
    ptx::warpgroup_commit_batch();
  }

  // Whether pairs of this warp's keys and of the rows from `first` on need PairTests.
  __device__ bool needs_test(const StepFacts &facts, int first, int rows) const {
    return uniform(facts.any_test_rows() || sums.keys.drops_keys(facts.head, facts.buffer) ||
                   !sums.keys.keep_all(threadIdx.x / 32 % (Config::kKeys / 16), 1, first, rows));
  }

  // Waits for the products of start_scores(). Replaces the scores by P', and dP' in the gradients by dS'.
  template <BiasSums kBiasSums = BiasSums::if_wanted>
  __device__ void compute_p_and_ds(const StepFacts &facts, Scores &scores, Scores &gradients, int stage, int turn = 0) {
    const auto &rows = own_rows(stage, turn);
    if constexpr (Config::kSoftcap) {
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(scores[0]);
      ptx::warpgroup_fence_operand(gradients[0]);
      sums.template compute_p_and_ds<true>(rows, facts.any_test_rows(), scores, gradients);
    } else {
      const int first = facts.first_row + kScoreRows * own_part(turn);
      const bool test = needs_test(facts, first, kScoreRows);
      const ScoreFactors factors = ScoreFactors::uncapped(params.p);
      ptx::warpgroup_wait<1>();
      ptx::warpgroup_fence_operand(scores[0]);
      if (test)
        sums.template compute_p<PairTests::kept_and_cut>(rows, first, facts.buffer, scores, factors);
      else
        sums.template compute_p<PairTests::none>(rows, first, facts.buffer, scores, factors);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_fence_operand(gradients[0]);
      if (test)
        sums.template compute_ds<PairTests::kept, kBiasSums>(rows, scores, gradients);
      else
        sums.template compute_ds<PairTests::none, kBiasSums>(rows, scores, gradients);
    }
  }
};

} // namespace fdm::cuda
