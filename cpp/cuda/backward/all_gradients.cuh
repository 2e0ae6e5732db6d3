// SPDX-License-Identifier: BSD-3-Clause
// All gradients at once, with mma.sync: five products for each block of keys and step of rows, where kernels for dq and
// for dk and dv take seven. One block of threads for a block of keys or a part of its work, as dkdv.cuh tells.
//
// The warps give each other their dS' through shared memory, and each then computes a part of the step's dQ = dS K. Where
// the registers of a warp do not hold dk and dv of its keys, two warps have the same keys: each computes the scores of half
// of the step's rows, and dk and dv of half of the columns. They give each other P' too.
//
// dQ of a row is a sum over all blocks of keys, each of which adds its own part to float32 sums in global memory, in no
// fixed order.
#pragma once

#include "query_sums.cuh"
#include "step_rows.cuh"
#include "sum_bands.cuh"

namespace fdm::cuda {

// kShares is the number of warps that have the same keys.
template <class ElementType, int kHeadDimension, int kKeyCount, int kRowCount, int kWarpCount, int kBlockCount,
          int kShareCount = 1>
struct AllGradientsConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = kKeyCount, kRows = kRowCount, kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlockCount; // kBlocks is the least number of blocks on an SM
  static constexpr bool kKeyGradient = true, kGeneral = false;
  static constexpr int kShares = kShareCount, kKeyWarps = kWarps / kShares;
  static constexpr int kKeyTiles = kKeys / kKeyWarps / 16; // tiles of 16 keys of each warp
  static constexpr int kOwnRows = kRows / kShares, kOwnColumns = kHeadDim / kShares;
  using Tile = SmemTile<kHeadDim>;
  using ScoreTile = SmemTile<kRows>;                // a row for each key
  static constexpr int kGroupKeys = 16 * kKeyTiles; // whose rows are known: those of a warp
  using KeysOfBlock =
      KeyBlock<kKeys, WholeBlock<kThreads>, 2, true, false, kGroupKeys>; // the head of a step and that before
  using Gradients =
      KeyGradients<Element, kKeys, kKeyTiles, kOwnRows, kOwnColumns, true, true, false, KeysOfBlock, kRows>;
  static_assert(kKeyTiles >= 1 && kTileRows % kRows == 0 && kRows <= 64 && kRows <= kThreads &&
                (kKeys == 64 || kKeys == 128));
  static_assert(kShares == 1 || kOwnColumns % 64 == 0, "a share of the columns is a number of panels");

  // dQ of a step is divided among row_warps x column_warps warps, in squares as far as there are: they read least. A
  // warp has pairs of tiles of 8 columns, every column_warps-th.
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
  static constexpr int kScoreBytes = Config::ScoreTile::bytes(Config::kKeys);
  alignas(128) char sdS[kScoreBytes];
  alignas(128) char sP[Config::kShares > 1 ? kScoreBytes : 1];
  float dbias[Config::kShares > 1 ? Config::kKeys : 1]; // what the second of two warps has
  float *first_sums;                                    // those of dq of row 0, in the first query head of the group
};

template <class Config> struct AllGradientsBlock : StepRows<Config> {
  using Base = StepRows<Config>;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using ScoreTile = typename Config::ScoreTile;
  using Base::dk, Base::dv, Base::keys, Base::params;
  static constexpr int kKeyTiles = Config::kKeyTiles, kKeys = Config::kKeys, kRows = Config::kRows;
  static constexpr int kHeadDim = Config::kHeadDim, kHalfKeys = 64, kGroupKeys = Config::kGroupKeys;
  static constexpr int kShares = Config::kShares, kOwnColumns = Config::kOwnColumns;
  using Scores = float[kKeyTiles][Config::kOwnRows / 8][4];

  AllGradientsShared<Config> &shared;
  uint32_t ds_base, p_base;

  __device__ AllGradientsBlock(const BackwardParams &parameters, AllGradientsShared<Config> &memory)
      : Base(parameters, memory), shared(memory), ds_base(ptx::shared_address(memory.sdS)),
        p_base(ptx::shared_address(memory.sP)) {}

  __device__ static int key_warp() { return threadIdx.x / 32 % Config::kKeyWarps; }
  __device__ static int first_key() { return key_warp() * (16 * kKeyTiles); }
  __device__ static int share() { return kShares == 1 ? 0 : threadIdx.x / 32 / Config::kKeyWarps; }
  __device__ static int first_column() { return share() * kOwnColumns; }

  // Puts P' in the place of the scores, and dS' in that of the gradients.
  __device__ void make_scores(int stage, bool careful, Scores &scores, Scores &gradients) {
    const uint32_t rows = this->row_offset_right + this->first_row() * Tile::kRowBytes;
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, this->k_fragment, this->q(stage) + rows);
    clear(gradients);
    gemm_ss<Element, kHeadDim>(gradients, this->v_fragment, this->dout(stage) + rows);
    const typename Base::Stage &row_stage = shared.stages[stage];
    if (params.p.softcap > 0)
      Base::template make<true>(row_stage, careful, scores, gradients);
    else
      Base::template make<false>(row_stage, careful, scores, gradients);
  }

  // Adds this warp's part of dQ of a step. Either 64 keys are left out if the step does not concern them.
  template <int kConcernedKeys> __device__ void add_dq(const KeyStep &step, int first) const {
    constexpr int kRowTiles = Config::kDqRowTiles, kTiles = Config::kDqTiles, kColumnWarps = Config::kColumnWarps;
    const int warp = threadIdx.x / 32, row_warp = warp / kColumnWarps, column_warp = warp % kColumnWarps;
    // Whole rows of a tile are an addition away, and columns an exclusive or: SmemTile::fragment_address.
    const uint32_t ds = (ScoreTile::right_rows(ds_base) ^ row_warp * kRowTiles * 32) + first * ScoreTile::kRowBytes;
    const uint32_t k =
        ((ptx::shared_address(shared.sK) + this->column_offset_right) ^ column_warp * 32) + first * Tile::kRowBytes;
    float dq[kRowTiles][kTiles][4];
    clear(dq);
    gemm_columns<Element, Tile, kConcernedKeys, 16 * kColumnWarps>(dq, k, [&](uint32_t (&a)[kRowTiles][4], int key) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_trans(a[m], ScoreTile::fragment_address(ds, key, 16 * m));
    });
    const QuerySums &sums = params.query_sums;
    float *own = shared.first_sums +
                 (uint32_t(step.head) * sums.head_rows + step.tile * kRows + row_warp * (16 * kRowTiles)) * kHeadDim +
                 column_warp * 256 + first_number();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        add_to_tile(own + (m * (kHeadDim / 8) + n / 2 * (2 * kColumnWarps) + n % 2) * 128, dq[m][n]);
  }

  // The gradients of this warp's keys, and dS', which it gives to the others.
  __device__ void add_own(int stage, bool careful) {
    Scores scores, gradients;
    make_scores(stage, careful, scores, gradients);
    store_accumulators<Element, ScoreTile>(gradients, ds_base, first_key(), this->first_row());
    if constexpr (kShares > 1) {
      store_accumulators<Element, ScoreTile>(scores, p_base, first_key(), this->first_row());
    } else {
      gemm_rs<Element, kHeadDim>(dv, scores, this->dout(stage) + this->column_offset_right);
      gemm_rs<Element, kHeadDim>(dk, gradients, this->q(stage) + this->column_offset_right);
    }
  }

  // This warp's columns of dv and dk, from P' and dS' of all rows of the step.
  __device__ void add_shared(int stage) {
    const uint32_t columns = this->column_offset_right + share() * (kOwnColumns / 64 * Tile::kPanelBytes);
    const auto add = [&](auto &sums, uint32_t scores, uint32_t rows) {
      const uint32_t left = ScoreTile::left(scores, first_key());
      gemm_columns<Element, Tile, kRows>(sums, rows + columns, [&](uint32_t (&a)[kKeyTiles][4], int row) {
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) ptx::ldmatrix(a[m], ScoreTile::fragment_address(left, 16 * m, row));
      });
    };
    add(dv, p_base, this->dout(stage));
    add(dk, ds_base, this->q(stage));
  }

  // dS' of keys that the step does not concern, beside others that it does.
  __device__ void clear_score_gradients() const {
    const Scores zeros{};
    store_accumulators<Element, ScoreTile>(zeros, ds_base, first_key(), this->first_row());
  }

  __device__ void run_step(const KeyStep &step, int stage, bool careful) {
    // A bit for each warp whose keys the step concerns.
    constexpr int kHalf = kHalfKeys / kGroupKeys;
    const int lane = threadIdx.x % 32, warp = key_warp();
    const bool concerns = lane < Config::kKeyWarps && keys.concerns(min(lane, Config::kKeyWarps - 1), step, kRows);
    const uint32_t warps = __ballot_sync(0xffffffffu, concerns);
    const bool low = warps & ((1u << kHalf) - 1), high = warps >> kHalf;
    if (warps >> warp & 1)
      add_own(stage, careful);
    else if (warp < kHalf ? low : high)
      clear_score_gradients();
    __syncthreads(); // dS' of all keys is there
    if constexpr (kShares > 1)
      if (warps >> warp & 1) add_shared(stage);
    if (kKeys > kHalfKeys && low && high)
      add_dq<kKeys>(step, 0);
    else if (low || high)
      add_dq<kHalfKeys>(step, low ? 0 : kHalfKeys);
  }

  // The prologue loads K and V and starts the copies of the first step; the mainloop goes through all steps.
  __device__ void run() {
    this->start();
    const KeyTask &task = keys.task();
    if (threadIdx.x == 0) shared.first_sums = query_sums(params, task.s, task.sequence_index, task.first_head, 0);
    this->load_keys();
    bool more = this->load(keys.first_step(kRows), 0);
    for (int stage = 0; more; stage ^= 1) {
      ptx::cp_async_wait<0>();
      // This step is there, and nobody reads the last one any more.
      const bool careful = __syncthreads_or(this->is_odd(stage));
      const KeyStep &step = shared.stages[stage].step;
      more = this->load(keys.next_step(step, kRows), stage ^ 1);
      if (careful) this->clear_empty_rows(stage);
      run_step(step, stage, careful);
    }
    ptx::cp_async_wait<0>();
  }

  // The epilogue adds the shares of the bias gradient of a key, and writes all.
  __device__ void write() {
    if constexpr (kShares > 1) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &own = this->dbias[m][half];
          float &other = shared.dbias[this->key_row(m, half)];
          own = ptx::row_sum(own);
          if (share() == 1 && threadIdx.x % 4 == 0) other = own;
          __syncthreads();
          own = threadIdx.x % 4 == 0 ? own + other : 0.0f;
        }
    }
    if (share() == 0) this->write_bias(0);
    this->add_segment_sums(first_column());
    Base::write(first_column());
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    all_gradients_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<AllGradientsShared<Config> *>(dynamic_shared);
  KeyItem item;
  KeyBlockPlace place;
  if (!find_key_item(params, int32_t(blockIdx.x), item, place)) return;
  AllGradientsBlock<Config> block(params, shared);
  block.keys.start(item, place, true);
  block.run();
  block.write();
}

} // namespace fdm::cuda
