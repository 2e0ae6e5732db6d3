// SPDX-License-Identifier: BSD-3-Clause
// All gradients at once, with mma.sync: five products for each block of keys and step of rows, where kernels for dq and
// for dk and dv take seven. One block of threads for a block of keys or a part of its work, as dkdv.cuh tells.
//
// The warps give each other their dS' through shared memory, and each then computes a part of the step's dQ = dS K. dQ of
// a row is a sum over all blocks of keys, each of which adds its own part to float32 sums in global memory, in no fixed
// order.
#pragma once

#include "query_sums.cuh"
#include "step_rows.cuh"
#include "sum_bands.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kKeyCount, int kRowCount, int kWarpCount, int kBlockCount>
struct AllGradientsConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = kKeyCount, kRows = kRowCount, kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlockCount; // kBlocks is the least number of blocks on an SM
  static constexpr bool kKeyGradient = true, kGeneral = false;
  static constexpr int kKeyTiles = kKeys / kWarps / 16; // tiles of 16 keys of each warp
  using Tile = SmemTile<kHeadDim>;
  using ScoreTile = SmemTile<kRows>;                // a row for each key
  static constexpr int kGroupKeys = 16 * kKeyTiles; // whose rows are known: those of a warp
  using KeysOfBlock =
      KeyBlock<kKeys, WholeBlock<kThreads>, 2, true, false, kGroupKeys>; // the head of a step and that before
  using Gradients = KeyGradients<Element, kKeys, kKeyTiles, kRows, kHeadDim, true, true, false, KeysOfBlock>;
  static_assert(kKeyTiles >= 1 && kTileRows % kRows == 0 && kRows <= 64 && kRows <= kThreads &&
                (kKeys == 64 || kKeys == 128));

  // dQ of a step is divided among row_warps x column_warps warps, in squares as far as there are: they read least. A
  // warp has pairs of tiles of 8 columns, every column_warps-th.
  static constexpr int row_warps() {
    int rows = kRows / 32;
    while (kHeadDim % (16 * (kWarps / rows)) != 0) rows *= 2;
    return rows;
  }
  static constexpr int kRowWarps = row_warps(), kColumnWarps = kWarps / kRowWarps;
  static constexpr int kDqRowTiles = kRows / 16 / kRowWarps, kDqTiles = kHeadDim / 8 / kColumnWarps;
  static_assert(kDqRowTiles >= 1 && kDqTiles % 2 == 0 && kColumnWarps <= 4);
};

template <class Config> struct AllGradientsShared : StepMemory<Config> {
  alignas(128) char sdS[Config::ScoreTile::bytes(Config::kKeys)];
};

template <class Config> struct AllGradientsBlock : StepRows<Config> {
  using Base = StepRows<Config>;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using ScoreTile = typename Config::ScoreTile;
  using Base::dk, Base::dv, Base::keys, Base::params;
  static constexpr int kKeyTiles = Config::kKeyTiles, kKeys = Config::kKeys, kRows = Config::kRows;
  static constexpr int kHeadDim = Config::kHeadDim, kHalfKeys = 64, kGroupKeys = Config::kGroupKeys;
  using Scores = float[kKeyTiles][kRows / 8][4];

  AllGradientsShared<Config> &shared;
  uint32_t ds_base;

  __device__ AllGradientsBlock(const BackwardParams &parameters, AllGradientsShared<Config> &memory)
      : Base(parameters, memory), shared(memory), ds_base(ptx::shared_address(memory.sdS)) {}

  __device__ static int first_key() { return threadIdx.x / 32 * (16 * kKeyTiles); }

  // Puts P' in the place of the scores, and dS' in that of the gradients.
  __device__ void make_scores(int stage, bool careful, Scores &scores, Scores &gradients) {
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, this->k_fragment, this->q(stage) + this->row_offset_right);
    clear(gradients);
    gemm_ss<Element, kHeadDim>(gradients, this->v_fragment, this->dout(stage) + this->row_offset_right);
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
    const KeyTask &task = keys.task();
    float *own = query_sums(params, task.s, task.sequence_index, keys.head(step), int64_t(step.tile) * kRows) +
                 (row_warp * kRowTiles * (kHeadDim / 8) + column_warp * 2) * 128 + first_number();
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
    store_accumulators<Element, ScoreTile>(gradients, ds_base, first_key(), 0);
    gemm_rs<Element, kHeadDim>(dv, scores, this->dout(stage) + this->column_offset_right);
    gemm_rs<Element, kHeadDim>(dk, gradients, this->q(stage) + this->column_offset_right);
  }

  // dS' of keys that the step does not concern, beside others that it does.
  __device__ void clear_score_gradients() const {
    const Scores zeros{};
    store_accumulators<Element, ScoreTile>(zeros, ds_base, first_key(), 0);
  }

  __device__ void run_step(const KeyStep &step, int stage, bool careful) {
    // A bit for each warp whose keys the step concerns.
    constexpr int kHalf = kHalfKeys / kGroupKeys;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool concerns = lane < Config::kWarps && keys.concerns(min(lane, Config::kWarps - 1), step, kRows);
    const uint32_t warps = __ballot_sync(0xffffffffu, concerns);
    const bool low = warps & ((1u << kHalf) - 1), high = warps >> kHalf;
    if (warps >> warp & 1)
      add_own(stage, careful);
    else if (warp < kHalf ? low : high)
      clear_score_gradients();
    __syncthreads(); // dS' of all keys is there
    if (kKeys > kHalfKeys && low && high)
      add_dq<kKeys>(step, 0);
    else if (low || high)
      add_dq<kHalfKeys>(step, low ? 0 : kHalfKeys);
  }

  // The prologue loads K and V and starts the copies of the first step; the mainloop goes through all steps.
  __device__ void run() {
    this->start();
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
  block.write_bias(0);
  block.add_segment_sums();
  block.write();
}

} // namespace fdm::cuda
