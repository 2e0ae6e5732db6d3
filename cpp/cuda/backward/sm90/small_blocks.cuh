// SPDX-License-Identifier: BSD-3-Clause
// All gradients in one kernel, as in fused.cuh, for key blocks with few steps. A thread block is one warpgroup. It
// has 64 keys and loads its rows itself. Several thread blocks share an SM: while one loads its keys or writes its
// gradients, the others compute. A thread block that fills an SM would need room for a second set of keys for this
// overlap.
#pragma once

#include "../../tile/copy_rows.cuh"
#include "../../tile/sm90/products.cuh"
#include "../key_gradients.cuh"
#include "fused_kernel.cuh"
#include "ptx/dependent.cuh"
#include "ptx/store.cuh"
#include "ptx/tensor.cuh"
#include "query_chain.cuh"
#include "step_shares.cuh"

namespace fdm::cuda {

// The thread blocks of a cluster are the key blocks of a chain, or share the steps of one key block.
enum class ClusterUse { shared_steps, chain };

template <class ElementType, int kHeadDimension, ClusterUse kCluster> struct SmallBlocksConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = kSmallBlock.keys, kRows = kSmallBlock.rows, kStages = 2;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = 3; // thread blocks that share an SM
  static constexpr bool kChained = kCluster == ClusterUse::chain;
  using KeyTile = SmemTile<kHeadDim, kKeys>;
  using RowTile = SmemTile<kHeadDim, kRows>;
  using GradientTile = SmemTile<kRows, kKeys>; // a row for each key
  using Keys = KeyBlock<kKeys, WholeBlock<kThreads>, 1, KeyBlockUse::few_steps, kKeys>;
  using Gradients = KeyGradients<Element, kKeys, 1, kRows, kHeadDim, GradientSet::both, TileKind::usual, Keys>;
  using Chain = QueryChain<Element, kHeadDim / 8, kWarps>;
  using Reduction = ClusterReduction<kHeadDim / 8, kThreads>;
};

// The common facts about the steps of a block. The rows that may keep its keys are the same for all heads of the
// group.
struct alignas(16) BlockSteps {
  int32_t first_tile, past_tile;   // the tiles that may keep a key
  uint32_t statistics_row, dq_row; // the index of row 0 of the first head in the statistics and in the sums of dQ
};

// The shared memory with which the thread blocks of a cluster cooperate.
template <class Config, bool = Config::kChained> struct SmallBlocksCluster {
  ClusterReductionBarriers reduction;

  __device__ void init() { reduction.init(); }
};
template <class Config> struct SmallBlocksCluster<Config, true> {
  ChainWalk walk;
  typename Config::Chain::Shared tiles;

  __device__ void init() { tiles.init(); }
};

template <class Config> struct SmallBlocksShared {
  alignas(1024) char sK[Config::KeyTile::kBytes];
  char sV[Config::KeyTile::kBytes];
  char sQ[Config::kStages][Config::RowTile::kBytes], sdO[Config::kStages][Config::RowTile::kBytes];
  char sdS[Config::GradientTile::kBytes];
  typename Config::Gradients::Stage stages[Config::kStages];
  typename Config::Keys::Shared keys;
  BlockSteps steps;
  SmallBlocksCluster<Config> cluster;
  // A step's first row among the sums of dQ; in a chain, its ChainWalk::step_flags().
  uint32_t step_data[Config::kStages];
  uint64_t keys_full, full[Config::kStages];

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(keys_full, Config::kThreads);
    for (uint64_t &barrier : full) ptx::init_barrier(barrier, Config::kThreads);
    cluster.init();
    ptx::fence_async_proxy(); // TMA copies arrive at these barriers
  }
};

// Starts the copies of a step's rows if TMA cannot copy them. It is rarely needed, so it is not inlined.
template <class Config>
__device__ __noinline__ void copy_rows_of_step(const BackwardParams &params, SmallBlocksShared<Config> &shared,
                                               KeyStep step, int stage) {
  using RowTile = typename Config::RowTile;
  constexpr int kOwnRows = Config::kRows / Config::kWarps;
  const KeyTask &task = shared.keys.task;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = step.tile * Config::kRows + warp * kOwnRows + lane;
  const auto load = [&](const fdm_tensor &t, const char *tile) {
    const uint16_t *row = kZeroRow;
    if (lane < kOwnRows && i < task.s.q_count)
      row = static_cast<const uint16_t *>(t.data) + row_offset(t, task.s, i, task.first_head + step.head);
    RowTile::template gather<Config::kWarps>(ptx::shared_address(tile), warp, row, int(params.p.head_dim));
  };
  load(params.p.q, shared.sQ[stage]);
  load(params.a.dout, shared.sdO[stage]);
  ptx::arrive_after_copies(shared.full[stage]);
}

template <class Config> struct SmallBlock {
  using Element = typename Config::Element;
  using KeyTile = typename Config::KeyTile;
  using RowTile = typename Config::RowTile;
  using GradientTile = typename Config::GradientTile;
  static constexpr int kRows = Config::kRows, kHeadDim = Config::kHeadDim;
  using Scores = float[1][kRows / 8][4];
  using Reduction = typename Config::Reduction;
  static_assert(Reduction::kBufferBytes <= offsetof(SmallBlocksShared<Config>, stages),
                "no room for the sums of remote blocks");

  const BackwardParams &params;
  const RowMaps &maps;
  SmallBlocksShared<Config> &shared;
  typename Config::Gradients sums;

  __device__ SmallBlock(const BackwardParams &parameters, const RowMaps &row_maps, SmallBlocksShared<Config> &memory)
      : params(parameters), maps(row_maps), shared(memory), sums(parameters, memory.keys) {}

  // Starts the copies of K and V. Keys of a list are copied only if they are readable. Consecutive keys are copied
  // before this is known.
  __device__ void load_keys(const KeyBlockPlace &place) const {
    constexpr int kOwnKeys = Config::kKeys / Config::kWarps;
    const int r = threadIdx.x / 32 * kOwnKeys + threadIdx.x % 32;
    const bool listed = params.keys.takes_planned_keys, has_key = threadIdx.x % 32 < kOwnKeys;
    const int64_t key = listed ? (has_key ? shared.keys.key[r] : 0) : int64_t(place.block) * Config::kKeys + r;
    const bool exists = has_key && (listed ? shared.keys.readable[r] : key < place.s.k_count);
    const auto load = [&](const fdm_tensor &t, const char *tile) {
      const uint16_t *row = kZeroRow;
      if (exists)
        row = static_cast<const uint16_t *>(t.data) + place.s.batch * t.stride[0] +
              (place.s.k_begin + key) * t.stride[1] + place.kv_head * t.stride[2];
      KeyTile::template gather<Config::kWarps>(ptx::shared_address(tile), threadIdx.x / 32, row,
                                               int(params.p.head_dim));
    };
    load(params.p.k, shared.sK);
    load(params.p.v, shared.sV);
  }
  // Sets copied keys that no row keeps to 0, since they may hold any value.
  __device__ void clear_dropped_keys() const {
    constexpr int kThreadsOfKey = Config::kThreads / Config::kKeys;
    const int r = int(threadIdx.x) / kThreadsOfKey;
    if (shared.keys.key[r] < 0 || shared.keys.readable[r]) return;
    for (int chunk = int(threadIdx.x) % kThreadsOfKey; chunk < KeyTile::kChunks; chunk += kThreadsOfKey)
      for (const char *tile : {shared.sK, shared.sV})
        ptx::store_shared(KeyTile::chunk_address(ptx::shared_address(tile), r, chunk), uint4{});
    ptx::fence_async_proxy();
  }

  // Row indices have 32 bits: there are fewer than 2^32 rows, since their float32 sums fit in memory.
  __device__ BlockSteps find_steps() const {
    const KeyTask &task = sums.keys.task();
    const RowRange rows = shared.keys.group_rows[0];
    const auto head = uint32_t(task.s.batch) * uint32_t(params.p.heads) + uint32_t(task.first_head);
    return {max(task.steps.first_tile, rows.first / kRows),
            min(task.steps.first_tile + task.steps.tiles, (rows.past + kRows - 1) / kRows),
            head * uint32_t(params.p.queries), head * uint32_t(params.query_sums.head_rows)};
  }
  // The first step of this thread block, and the step after another. Facts about keys are the same for all heads of
  // the group, so every step has buffer 0.
  __device__ KeyStep first_step(const BlockSteps &steps) const {
    if constexpr (Config::kChained) {
      const ChainWalk &walk = shared.cluster.walk;
      return {0, 0, walk.first, 0, walk.has_steps()};
    }
    return next_head({0, 0, steps.first_tile + static_cast<int32_t>(blockIdx.y), 0, steps.first_tile < steps.past_tile},
                     steps);
  }
  __device__ KeyStep next_step(KeyStep step, const BlockSteps &steps) const {
    if constexpr (Config::kChained) {
      const ChainWalk &walk = shared.cluster.walk;
      if (step.tile == walk.last) step.valid = ++step.head < params.group;
      step.tile = step.tile == walk.last ? walk.first : walk.next_tile(step.tile);
      return step;
    }
    step.tile += static_cast<int32_t>(gridDim.y);
    return next_head(step, steps);
  }
  // If the tile of a step is beyond the last one, the step belongs to a later head.
  __device__ KeyStep next_head(KeyStep step, const BlockSteps &steps) const {
    while (step.valid && step.tile >= steps.past_tile) {
      step.tile -= steps.past_tile - steps.first_tile;
      step.valid = ++step.head < params.group;
    }
    return step;
  }
  // Whether a row of a step may keep a key. Only a chain has steps without such rows.
  __device__ static bool concerns(const KeyStep &step, const BlockSteps &steps) {
    return !Config::kChained || (step.tile >= steps.first_tile && step.tile < steps.past_tile);
  }

  __device__ uint32_t step_data_of(const KeyStep &step, const BlockSteps &steps) const {
    if constexpr (Config::kChained) return shared.cluster.walk.step_flags(step.tile, step.head + 1 == params.group);
    return steps.dq_row + uint32_t(step.head) * uint32_t(params.query_sums.head_rows) + uint32_t(step.tile * kRows);
  }

  // Starts the copies of the statistics of a step's rows. lse = inf: the row does not exist, or it has no gradient.
  __device__ void load_statistics(const KeyStep &step, const BlockSteps &steps, int stage) const {
    const uint32_t own_row = ptx::thread_index(); // read again rather than held in a register
    const auto queries = uint32_t(params.p.queries), i = uint32_t(step.tile * kRows) + own_row;
    if (int(own_row) >= kRows) return;
    auto &rows = shared.stages[stage];
    float &lse = rows.lse[own_row], &delta = rows.delta[own_row];
    if (i < queries) {
      const RowStatistics &row_statistics = params.statistics[steps.statistics_row + uint32_t(step.head) * queries + i];
      ptx::cp_async_4(ptx::shared_address(&lse), &row_statistics.lse);
      ptx::cp_async_4(ptx::shared_address(&delta), &row_statistics.delta);
    } else {
      lse = INFINITY;
      delta = 0.0f;
    }
  }
  // Starts the copies of a step's rows and their statistics.
  __device__ void load_rows(const KeyStep &step, const BlockSteps &steps, int stage) const {
    if (!step.valid) return;
    if (!concerns(step, steps)) return ptx::arrive(shared.full[stage]);
    load_statistics(step, steps, stage);
    if (!maps.valid) return copy_rows_of_step<Config>(params, shared, step, stage);
    if (threadIdx.x == 0) copy_boxes(step, stage);
    ptx::arrive_after_copies(shared.full[stage]);
  }
  // Whether a row of a step has no gradient, or an lse beyond kLargeLse. All warps get the same answer.
  __device__ bool has_large_lse(int stage) const {
    const float *const lse = shared.stages[stage].lse + ptx::thread_index() % 32;
    static_assert(kRows == 64);
    return __any_sync(0xffffffffu, fmaxf(fabsf(lse[0]), fabsf(lse[32])) > kLargeLse);
  }
  __device__ void copy_boxes(const KeyStep &step, int stage) const {
    uint64_t &full = shared.full[stage];
    const Sequence &s = sums.keys.task().s;
    const int row = int(s.q_begin) + step.tile * kRows, head = int(sums.keys.head(step)), batch = int(s.batch);
    ptx::expect_bytes(full, 2 * RowTile::kBytes);
#pragma unroll
    for (int panel = 0; panel < RowTile::kPanels; ++panel) {
      const uint32_t offset = panel * RowTile::kPanelBytes;
      ptx::copy_box(ptx::shared_address(shared.sQ[stage]) + offset, maps.q, 64 * panel, row, head, batch, full);
      ptx::copy_box(ptx::shared_address(shared.sdO[stage]) + offset, maps.dout, 64 * panel, row, head, batch, full);
    }
  }

  // Clears rows without a gradient, so that non-finite values in their dO reach no result.
  __device__ void clear_empty_rows(int stage) const {
    for (int i = threadIdx.x; i < kRows * RowTile::kChunks; i += Config::kThreads) {
      const int r = i / RowTile::kChunks;
      if (shared.stages[stage].lse[r] != INFINITY) continue;
      for (const char *tile : {shared.sQ[stage], shared.sdO[stage]})
        ptx::store_shared(RowTile::chunk_address(ptx::shared_address(tile), r, i % RowTile::kChunks), uint4{});
    }
    ptx::fence_async_proxy();
    __syncthreads();
  }

  // Adds the products of a step to dK and dV, and computes its dQ. In a chain, receive() loads the sums that dQ is
  // added to.
  template <class Receive>
  __device__ void run_step(int stage, bool cuts_probabilities, float (&dq)[kHeadDim / 8][4], const Receive &receive) {
    const auto &rows = shared.stages[stage];
    const KeyStep &step = rows.step;
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.sK));
    const uint64_t v = KeyTile::descriptor(ptx::shared_address(shared.sV));
    const uint64_t q = RowTile::descriptor(ptx::shared_address(shared.sQ[stage]));
    const uint64_t dout = RowTile::descriptor(ptx::shared_address(shared.sdO[stage]));
    Scores scores, gradients;
    uint32_t p[kRows / 16][4], ds[kRows / 16][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(scores[0], k, q, false);
    ptx::warpgroup_commit_batch();
    warpgroup_gemm_ss<Element, KeyTile, RowTile, kHeadDim>(gradients[0], v, dout, false);
    ptx::warpgroup_commit_batch();
    const bool test = sums.needs_test(step, cuts_probabilities);
    ptx::warpgroup_wait<1>(scores[0]);
    const ScoreFactors factors = ScoreFactors::uncapped(params.p);
    if (cuts_probabilities)
      sums.template compute_p<PairTests::kept_and_cut>(rows, step.tile * kRows, step.buffer, scores, factors);
    else if (test)
      sums.template compute_p<PairTests::kept>(rows, step.tile * kRows, step.buffer, scores, factors);
    else
      sums.template compute_p<PairTests::none>(rows, step.tile * kRows, step.buffer, scores, factors);
    ptx::warpgroup_wait<0>(gradients[0]);
    if (test)
      sums.template compute_ds<PairTests::kept>(rows, scores, gradients);
    else
      sums.template compute_ds<PairTests::none>(rows, scores, gradients);
    pack_left<Element>(p, scores[0]);
    pack_left<Element>(ds, gradients[0]);
    const uint32_t sdS = ptx::shared_address(shared.sdS);
    store_left<GradientTile>(ds, sdS, int(threadIdx.x) / 32 * 16, 0);
    ptx::fence_async_proxy();
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, RowTile>(sums.dv[0], p, dout);
    ptx::warpgroup_commit_batch();
    warpgroup_gemm_rs<Element, RowTile>(sums.dk[0], ds, q);
    ptx::warpgroup_commit_batch();
    __syncthreads();                       // dS' of all keys is stored
    ptx::warpgroup_wait<1>(sums.dv[0], p); // the product with P' is complete, so its registers are free
    receive();
    ptx::warpgroup_fence_operand(dq);
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss_columns<Element, GradientTile, ptx::Major::mn, KeyTile, Config::kKeys>(
        dq, GradientTile::descriptor(sdS), k, Config::kChained);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>(dq, sums.dk[0], ds);
  }

  // Adds dQ of a step to the sums of all blocks.
  __device__ void add_dq(int stage, const float (&dq)[kHeadDim / 8][4]) const {
    const uint32_t thread = ptx::thread_index();
    float *thread_sums = params.query_sums.data + uint64_t(shared.step_data[stage]) * kHeadDim +
                         thread / 32 * (kHeadDim / 8) * 128 + thread % 32 * 4;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) ptx::add_global(thread_sums + n * 128, dq[n]);
  }

  __device__ void run(const KeyBlockPlace &block) {
    const bool listed = params.keys.takes_planned_keys;
    if (!listed) load_keys(block);
    sums.keys.start({block.block, 0, 1, 0}, block, false);
    const BlockSteps all_steps = find_steps();
    if (threadIdx.x == 0) shared.steps = all_steps;
    if constexpr (Config::kChained) {
      if (threadIdx.x == 0) shared.cluster.walk = ChainWalk(params.p, kRows, Config::kKeys);
      __syncthreads();
    }
    bool more; // whether there is a next step
    const auto prepare = [&](const KeyStep &step, int stage, const BlockSteps &steps) {
      more = step.valid;
      load_rows(step, steps, stage);
      if (threadIdx.x > 0) return;
      shared.stages[stage].step = step;
      shared.step_data[stage] = step_data_of(step, steps);
    };
    if (!listed) ptx::wait_for_kernel_ahead(); // late: the kernel ahead writes only statistics and zeros
    prepare(first_step(all_steps), 0, all_steps);
    if (listed) load_keys(block);
    ptx::arrive_after_copies(shared.keys_full); // keys.start() has made this barrier visible to all threads
    sums.start();
    ptx::wait(shared.keys_full, 0);
    if (!listed) clear_dropped_keys();
    [[maybe_unused]] typename Config::Chain chain(params);
    // All blocks of the cluster have begun and initialized their barriers.
    if (gridDim.y > 1) ptx::wait_cluster_barrier();
    for (PipelineState<Config::kStages> state; more; ++state) {
      __syncthreads(); // all threads have read the previous step
      const BlockSteps steps = shared.steps;
      prepare(next_step(shared.stages[state.index].step, steps), state.index ^ 1, steps);
      ptx::wait(shared.full[state.index], state.phase);
      ptx::fence_async_proxy();
      const KeyStep &step = shared.stages[state.index].step;
      [[maybe_unused]] const uint32_t step_data = shared.step_data[state.index];
      float dq[kHeadDim / 8][4];
      const auto receive = [&] {
        if constexpr (Config::kChained) chain.receive(dq, shared.cluster.tiles, step_data);
      };
      if (concerns(step, steps)) {
        const bool large_lse = has_large_lse(state.index);
        if (large_lse) clear_empty_rows(state.index);
        run_step(state.index, large_lse, dq, receive);
      } else {
        receive();
      }
      if constexpr (Config::kChained)
        chain.send(dq, shared.cluster.tiles, step_data, sums.keys.task(), step);
      else
        add_dq(state.index, dq);
    }
    WantedSums wanted; // all sums, or those that this block of a cluster adds up
    if constexpr (!Config::kChained)
      wanted = Reduction(shared.cluster.reduction, &shared).add_up(sums.dk[0], sums.dv[0], sums.dbias[0]);
    if (wanted.dk) sums.write_bias(0);
    sums.add_segment_sums(0, wanted);
    sums.write(0, wanted);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    small_blocks_kernel(const __grid_constant__ FusedParams params) {
  auto &shared = dynamic_memory<SmallBlocksShared<Config>>();
  if (threadIdx.x == 0) shared.init();
  if (gridDim.y > 1) ptx::arrive_cluster_barrier();
  ptx::start_dependents();
  if (params.keys.takes_planned_keys) ptx::wait_for_kernel_ahead(); // the kernel ahead orders the keys
  KeyBlockPlace place;
  if constexpr (Config::kChained) // a cluster has the blocks of one head, in the order of ChainWalk
    place = small_block_of_head(params, blockIdx.x, blockIdx.y);
  else if (!find_small_block(params, blockIdx.x, place))
    return;
  SmallBlock<Config>(params, params.maps, shared).run(place);
}

} // namespace fdm::cuda
