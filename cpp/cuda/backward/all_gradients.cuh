// SPDX-License-Identifier: BSD-3-Clause
// All gradients in one kernel with mma.sync. It computes five products for each key block and step of rows. Separate
// kernels for dQ and for dK and dV compute seven. A thread block has a key block or a part of its work, as in
// dkdv.cuh.
//
// The warps exchange dS' through shared memory. Each warp then computes a part of the step's dQ = dS K. If the
// registers of a warp do not hold dK and dV of its keys, two warps have the same keys: each computes the scores of
// half of the step's rows, and half of the columns of dK and dV. These warps exchange P', too. If shared memory does
// not hold two stages of Q and dO beside K and V, V stays in registers and dO has one stage: the copies of a step's
// dO start when the dO of the previous step has been read.
//
// dQ of a row is a sum over all key blocks. Each adds its part to float32 sums in global memory, in no fixed order.
#pragma once

#include "query_sums.cuh"
#include "step_rows.cuh"
#include "sum_bands.cuh"

namespace fdm::cuda {

// kShares warps have the same keys. kValuesInRegisters: V is in registers, and dO has one stage.
template <class ElementType, int kHeadDimension, int kKeyCount, int kRowCount, int kWarpCount, int kBlockCount,
          int kShareCount, SmemContents kSharedHolds>
struct AllGradientsConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = kKeyCount, kRows = kRowCount, kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlockCount; // kBlocks is the least number of blocks on an SM
  static constexpr bool kComputesDk = true, kGeneral = false,
                        kValuesInRegisters = kSharedHolds == SmemContents::one_dout;
  static constexpr int kShares = kShareCount, kKeyWarps = kWarps / kShares;
  static constexpr int kKeyTiles = kKeys / kKeyWarps / 16; // tiles of 16 keys of each warp
  static constexpr int kOwnRows = kRows / kShares, kOwnColumns = kHeadDim / kShares;
  using Tile = SmemTile<kHeadDim>;
  using GradientTile = SmemTile<kRows>;             // a row for each key
  static constexpr int kGroupKeys = 16 * kKeyTiles; // the keys of a warp: KeyBlock finds the rows that may keep them
  using KeysOfBlock =
      KeyBlock<kKeys, WholeBlock<kThreads>, 2, KeyBlockUse::segments, kGroupKeys>; // two consecutive steps' heads
  using Gradients = KeyGradients<Element, kKeys, kKeyTiles, kOwnRows, kOwnColumns, GradientSet::both, TileKind::usual,
                                 KeysOfBlock, kRows>;
  static_assert(kKeyTiles >= 1 && kTileRows % kRows == 0 && kRows <= 64 && kRows <= kThreads &&
                (kKeys == 64 || kKeys == 128));
  // A share of the columns is whole panels. If the number of panels is odd, each share also has half of the last one.
  static constexpr int kPanelTiles = kShares == 1 ? kHeadDim / 8 : kOwnColumns / 64 * 8;
  static constexpr int kHalfPanelTiles = kOwnColumns / 8 - kPanelTiles;
  static_assert(kShares == 1 || kOwnColumns % 32 == 0);
  static_assert(!kValuesInRegisters || kShares > 1);

  // dQ of a step is divided among kRowWarps x kColumnWarps warps. Parts are as square as possible, since such parts
  // read the least shared memory. A warp has every kColumnWarps-th pair of tiles of 8 columns.
  static constexpr int row_warps() {
    int rows = kRows / 32;
    while (kWarps / rows > 4 || kHeadDim % (16 * (kWarps / rows)) != 0) rows *= 2;
    return rows;
  }
  static constexpr int kRowWarps = row_warps(), kColumnWarps = kWarps / kRowWarps;
  static constexpr int kDqRowTiles = kRows / 16 / kRowWarps, kDqTiles = kHeadDim / 8 / kColumnWarps;
  static_assert(kShares <= 2 && kDqRowTiles >= 1 && kDqTiles % 2 == 0 && kColumnWarps <= 4);
};

template <class Config> struct AllGradientsShared : StepMemory<Config> {
  static constexpr int kGradientBytes = Config::GradientTile::bytes(Config::kKeys);
  alignas(128) char sdS[kGradientBytes];
  alignas(128) char sP[Config::kShares > 1 ? kGradientBytes : 1];
  float dbias[Config::kShares > 1 ? Config::kKeys : 1]; // the sums of the second of two warps with the same keys
  float *dq_sums;                                       // the sums of dQ of row 0 of the group's first query head
};

template <class Config> struct AllGradientsBlock : StepRows<Config> {
  using Base = StepRows<Config>;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using GradientTile = typename Config::GradientTile;
  using Base::dk, Base::dv, Base::keys, Base::params;
  static constexpr int kKeyTiles = Config::kKeyTiles, kKeys = Config::kKeys, kRows = Config::kRows;
  static constexpr int kHeadDim = Config::kHeadDim, kHalfKeys = 64, kGroupKeys = Config::kGroupKeys;
  static constexpr int kShares = Config::kShares, kOwnColumns = Config::kOwnColumns;
  static constexpr bool kValuesInRegisters = Config::kValuesInRegisters;
  using Scores = float[kKeyTiles][Config::kOwnRows / 8][4];

  AllGradientsShared<Config> &shared;
  uint32_t ds_base, p_base;
  LeftOperand<Element, kHeadDim, kKeyTiles, kValuesInRegisters> values; // V of this warp's keys

  __device__ AllGradientsBlock(const BackwardParams &parameters, AllGradientsShared<Config> &memory)
      : Base(parameters, memory), shared(memory), ds_base(ptx::shared_address(memory.sdS)),
        p_base(ptx::shared_address(memory.sP)) {
    values.left = this->v_fragment;
  }

  __device__ static int key_warp() { return threadIdx.x / 32 % Config::kKeyWarps; }
  __device__ static int first_key() { return key_warp() * (16 * kKeyTiles); }
  __device__ static int share() { return kShares == 1 ? 0 : threadIdx.x / 32 / Config::kKeyWarps; }
  // The first columns of this warp's tiles of sums: of the tiles from 0 on, and of those from Config::kPanelTiles on.
  __device__ static int first_column() { return share() * (8 * Config::kPanelTiles); }
  __device__ static int first_half_panel_column() {
    return kShares * 8 * Config::kPanelTiles + share() * (8 * Config::kHalfPanelTiles);
  }

  // The address of this warp's rows of Q or dO as right operands.
  __device__ uint32_t own_rows(uint32_t tile) const {
    return tile + this->row_offset_right + this->first_row() * Tile::kRowBytes;
  }

  __device__ void multiply_keys(int stage, Scores &scores) const {
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, this->k_fragment, own_rows(this->q(stage)));
  }

  // Replaces the scores by P', and computes dP' and then dS' in the gradients.
  __device__ void compute_p_and_ds(int stage, bool cuts_probabilities, Scores &scores, Scores &gradients) {
    clear(gradients);
    values.multiply(gradients, own_rows(this->dout(stage)));
    const typename Base::Stage &row_stage = shared.stages[stage];
    if (params.p.softcap > 0)
      Base::template compute_p_and_ds<true>(row_stage, cuts_probabilities, scores, gradients);
    else
      Base::template compute_p_and_ds<false>(row_stage, cuts_probabilities, scores, gradients);
  }

  // Adds this warp's part of dQ of a step: the sum over kConcernedKeys keys from key `first` on. The step concerns none
  // of the others.
  template <int kConcernedKeys> __device__ void add_dq(const KeyStep &step, int first) const {
    constexpr int kRowTiles = Config::kDqRowTiles, kTiles = Config::kDqTiles, kColumnWarps = Config::kColumnWarps;
    const int warp = threadIdx.x / 32, row_warp = warp / kColumnWarps, column_warp = warp % kColumnWarps;
    // As in SmemTile::fragment_address, an addition moves by whole rows and an exclusive or by columns.
    const uint32_t ds =
        (GradientTile::right_rows(ds_base) ^ row_warp * kRowTiles * 32) + first * GradientTile::kRowBytes;
    const uint32_t k =
        ((ptx::shared_address(shared.sK) + this->column_offset_right) ^ column_warp * 32) + first * Tile::kRowBytes;
    float dq[kRowTiles][kTiles][4];
    clear(dq);
    gemm_columns<Element, Tile, kConcernedKeys, 16 * kColumnWarps>(dq, k, [&](uint32_t (&a)[kRowTiles][4], int key) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_trans(a[m], GradientTile::fragment_address(ds, key, 16 * m));
    });
    const QuerySums &sums = params.query_sums;
    float *thread_sums =
        shared.dq_sums +
        (uint32_t(step.head) * sums.head_rows + step.tile * kRows + row_warp * (16 * kRowTiles)) * kHeadDim +
        column_warp * 256 + first_number();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        add_to_tile(thread_sums + (m * (kHeadDim / 8) + n / 2 * (2 * kColumnWarps) + n % 2) * 128, dq[m][n]);
  }

  // Computes P' and dS' of this warp's keys and rows, and stores dS' for the other warps. If no other warp has these
  // keys, adds to dV and dK; otherwise stores P', too.
  __device__ void add_own(int stage, bool cuts_probabilities, Scores &scores) {
    Scores gradients;
    compute_p_and_ds(stage, cuts_probabilities, scores, gradients);
    store_accumulators<Element, GradientTile>(gradients, ds_base, first_key(), this->first_row());
    if constexpr (kShares > 1) {
      store_accumulators<Element, GradientTile>(scores, p_base, first_key(), this->first_row());
    } else {
      gemm_rs<Element, kHeadDim>(dv, scores, this->dout(stage) + this->column_offset_right);
      gemm_rs<Element, kHeadDim>(dk, gradients, this->q(stage) + this->column_offset_right);
    }
  }

  // Adds to this warp's columns of dV and dK. Reads P' and dS' of all rows of the step from shared memory.
  __device__ void add_shared(int stage) {
    constexpr int kPanelTiles = Config::kPanelTiles, kPanels = kPanelTiles / 8;
    const auto add = [&](auto &sums, uint32_t scores, uint32_t rows) {
      const uint32_t left = GradientTile::left(scores, first_key()), right = rows + this->column_offset_right;
      const uint32_t share_columns = right + share() * (kPanels * Tile::kPanelBytes);
      const uint32_t half_panel =
          (right ^ share() * (Config::kHalfPanelTiles * 16)) + kShares * kPanels * Tile::kPanelBytes;
      gemm_columns_at<Element, kRows>(
          sums,
          [&](int row, int d) {
            return d < kPanelTiles ? Tile::fragment_address(share_columns, row, 8 * d)
                                   : Tile::fragment_address(half_panel, row, 8 * (d - kPanelTiles));
          },
          [&](uint32_t (&a)[kKeyTiles][4], int row) {
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) ptx::ldmatrix(a[m], GradientTile::fragment_address(left, 16 * m, row));
          });
    };
    add(dv, p_base, this->dout(stage));
    add(dk, ds_base, this->q(stage));
  }

  // Stores dS' = 0 for this warp's keys if the step concerns others of the same 64 keys, but not these.
  __device__ void store_zero_ds() const {
    const Scores zeros{};
    store_accumulators<Element, GradientTile>(zeros, ds_base, first_key(), this->first_row());
  }

  __device__ void run_step(const KeyStep &step, int stage, bool cuts_probabilities) {
    // A bit for each warp whose keys the step concerns.
    constexpr int kHalf = kHalfKeys / kGroupKeys;
    const int lane = threadIdx.x % 32, warp = key_warp();
    const bool concerns = lane < Config::kKeyWarps && keys.concerns(min(lane, Config::kKeyWarps - 1), step, kRows);
    const uint32_t warps = __ballot_sync(0xffffffffu, concerns);
    const bool low = warps & ((1u << kHalf) - 1), high = warps >> kHalf;
    const bool concerns_warp = warps >> warp & 1;
    Scores scores;
    if (concerns_warp) multiply_keys(stage, scores);
    if constexpr (kValuesInRegisters) {
      ptx::cp_async_wait<1>(); // dO has arrived; the next step's Q may still be in flight
      __syncthreads();
    }
    if (concerns_warp)
      add_own(stage, cuts_probabilities, scores);
    else if (warp < kHalf ? low : high)
      store_zero_ds();
    __syncthreads(); // dS' of all keys is stored
    if constexpr (kShares > 1)
      if (concerns_warp) add_shared(stage);
    if constexpr (kValuesInRegisters) {
      __syncthreads(); // all threads have read dO
      load_only_dout(stage ^ 1);
    }
    if (kKeys > kHalfKeys && low && high)
      add_dq<kKeys>(step, 0);
    else if (low || high)
      add_dq<kHalfKeys>(step, low ? 0 : kHalfKeys);
  }

  // Starts the copies of dO of the step of `stage`, if it is valid, to the only stage of dO.
  __device__ void load_only_dout(int stage) const {
    const KeyStep &step = shared.stages[stage].step;
    if (step.valid) this->load_dout(step, stage);
    ptx::cp_async_fence();
  }

  // Loads V into registers, from the memory that the stages of Q use later.
  __device__ void load_values() {
    ptx::cp_async_fence();
    ptx::cp_async_wait<0>();
    __syncthreads();
    values.load();
    __syncthreads();
  }

  // The prologue loads K and V and starts the copies of the first step. The mainloop iterates over the steps.
  __device__ void run() {
    this->start();
    const KeyTask &task = keys.task();
    if (threadIdx.x == 0) shared.dq_sums = query_sums(params, task.s, task.sequence_index, task.first_head, 0);
    this->load_keys();
    if constexpr (kValuesInRegisters) load_values();
    bool more = this->load(keys.first_step(kRows), 0);
    if constexpr (kValuesInRegisters) {
      __syncthreads(); // the step is visible to all threads
      load_only_dout(0);
    }
    for (int stage = 0; more; stage ^= 1) {
      ptx::cp_async_wait<kValuesInRegisters ? 1 : 0>();
      // This step has arrived, except its dO if dO has one stage. After the barrier, all threads have also read the
      // previous step.
      const bool large_lse = __syncthreads_or(this->has_large_lse(stage));
      const KeyStep &step = shared.stages[stage].step;
      more = this->load(keys.next_step(step, kRows), stage ^ 1);
      if (large_lse) {
        if constexpr (kValuesInRegisters) {
          ptx::cp_async_wait<0>();
          __syncthreads();
        }
        this->clear_empty_rows(stage);
      }
      run_step(step, stage, large_lse);
    }
    ptx::cp_async_wait<0>();
  }

  // The epilogue adds the shares of each key's bias gradient, and writes all gradients of keys.
  __device__ void write() {
    if constexpr (kShares > 1) {
      for_pairs<kKeyTiles>([&](int m, int half) {
        float &bias_sum = this->dbias[m][half];
        float &other = shared.dbias[this->key_row(m, half)];
        bias_sum = ptx::row_sum(bias_sum);
        if (share() == 1 && threadIdx.x % 4 == 0) other = bias_sum;
        __syncthreads();
        bias_sum = threadIdx.x % 4 == 0 ? bias_sum + other : 0.0f;
      });
    }
    if (share() == 0) this->write_bias(0);
    write_tiles<0, Config::kPanelTiles>(first_column());
    if constexpr (Config::kHalfPanelTiles > 0)
      write_tiles<Config::kPanelTiles, Config::kHalfPanelTiles>(first_half_panel_column());
  }
  template <int kFirst, int kTiles> __device__ void write_tiles(int column) const {
    Base::template add_segment_sums<kFirst, kTiles>(column);
    Base::template write<kFirst, kTiles>(column);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    all_gradients_kernel(const __grid_constant__ BackwardParams params) {
  auto &shared = dynamic_memory<AllGradientsShared<Config>>();
  KeyItem item;
  KeyBlockPlace place;
  if (!find_key_item(params, int32_t(blockIdx.x), item, place)) return;
  AllGradientsBlock<Config> block(params, shared);
  block.keys.start(item, place, true);
  block.run();
  block.write();
}

} // namespace fdm::cuda
