// SPDX-License-Identifier: BSD-3-Clause
// The gradients of keys, values and of a bias per key. A thread block has a key block of one KV head, or a part of
// its work.
//
// K and V stay in shared memory. The rows of Q and dO that may keep the keys are loaded tile by tile, for each query
// head of the group. Products are transposed, so that a row of accumulators is a key:
//   S' = K Q', P' = exp(S' - lse), dV += P' dO, dP' = V dO', dS' = P' (dP' - delta), dK += scale dS' Q.
// So P' and dS' become left operands without leaving their registers, and the bias gradient is the sum of a row of
// dS'. Each warp copies the bias per query of its keys a step ahead.
#pragma once

#include "step_rows.cuh"

namespace fdm::cuda {

// Large head dimensions take one launch for dk and the bias gradient, and another one for dv.
template <class ElementType, int kHeadDimension, int kKeyCount, int kRowCount, int kWarpCount, int kBlockCount,
          GradientSet kGradients, TileKind kKind>
struct DkdvConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kKeys = kKeyCount, kRows = kRowCount, kWarps = kWarpCount;
  static constexpr bool kComputesDk = kGradients != GradientSet::dv;
  static constexpr bool kComputesDv = kGradients != GradientSet::dk;
  static constexpr bool kGeneral = kKind == TileKind::general, kValuesInRegisters = false;
  static constexpr int kThreads = 32 * kWarps, kBlocks = kBlockCount; // kBlocks is the least number of blocks on an SM
  static constexpr int kKeyTiles = kKeys / kWarps / 16;               // tiles of 16 keys of each warp
  using Tile = SmemTile<kHeadDim>;
  static constexpr int kBiasPitch = kKeys + 4; // four rows, two apart, of eight keys (a warp's load) cover all banks
  static_assert(kKeyTiles >= 1 && kTileRows % kRows == 0 && kBucketKeys % kKeys == 0);
  static_assert(kRows <= kThreads);
  using KeysOfBlock = KeyBlock<kKeys, WholeBlock<kThreads>, 2, KeyBlockUse::row_plans>; // two consecutive steps' heads
  using Gradients = KeyGradients<Element, kKeys, kKeyTiles, kRows, kHeadDim, kGradients, kKind, KeysOfBlock>;
};

template <class Config> struct DkdvShared : StepMemory<Config> {
  uint32_t sBias[Config::kGeneral ? Config::kRows : 1][Config::kBiasPitch];
};

template <class Config> struct DkdvBlock : StepRows<Config> {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kKeyTiles = Config::kKeyTiles, kKeys = Config::kKeys, kRows = Config::kRows;
  static constexpr int kHeadDim = Config::kHeadDim, kRowTiles = kRows / 8;
  static constexpr bool kComputesDk = Config::kComputesDk, kComputesDv = Config::kComputesDv;
  using Base = StepRows<Config>;
  using Base::column_offset_right, Base::row_offset_right;
  using Base::dk, Base::dv, Base::keys, Base::params, Base::k_fragment, Base::v_fragment;

  DkdvShared<Config> &shared;

  __device__ DkdvBlock(const BackwardParams &parameters, DkdvShared<Config> &memory)
      : Base(parameters, memory), shared(memory) {}

  __device__ RowBiasTile bias_tile(const KeyStep &step) const {
    return {params.p.bias, score_view(params.p, params.p.bias, keys.task().s, keys.head(step))};
  }

  // Copies the bias of a step's rows and the warp's keys.
  __device__ void load_row_bias(const KeyStep &step) const {
    if (!step.valid) return;
    constexpr int kWarpKeys = 16 * kKeyTiles;
    const int first_key = threadIdx.x / 32 * kWarpKeys, first = step.tile * kRows;
    bias_tile(step).template copy<kRows, kWarpKeys, Config::kBiasPitch>(&shared.sBias[0][first_key],
                                                                        &shared.keys.key[first_key], first,
                                                                        min(kRows, int(keys.task().s.q_count) - first));
  }

  // The row_bias of KeyGradients::compute_p_and_ds.
  struct RowBias {
    RowBiasElements<Element> reader;
    const DkdvShared<Config> &shared;
    uint32_t even_shift, odd_shift; // a thread has pairs of neighbouring rows, an even number of rows apart

    __device__ __forceinline__ RowBias(const RowBiasTile &tile, const DkdvShared<Config> &memory, int64_t first)
        : reader(tile), shared(memory), even_shift(reader.row_shift(first)), odd_shift(reader.row_shift(first + 1)) {}

    __device__ __forceinline__ uint32_t key_shift(int key) const { return reader.key_shift(shared.keys.key[key]); }
    __device__ __forceinline__ float2 elements(int key, int row, uint32_t key_shift) const {
      return {reader.element(shared.sBias[row][key], key_shift ^ even_shift),
              reader.element(shared.sBias[row + 1][key], key_shift ^ odd_shift)};
    }
  };

  template <bool kHasSoftcap, class Accumulators>
  __device__ void compute_p_and_ds(int stage, bool cuts_probabilities, Accumulators &scores, Accumulators &gradients) {
    const typename Base::Stage &row_stage = shared.stages[stage];
    if constexpr (Config::kGeneral) {
      const RowBias row_bias(bias_tile(row_stage.step), shared, int64_t(row_stage.step.tile) * kRows);
      Base::template compute_p_and_ds<kHasSoftcap>(row_stage, cuts_probabilities, scores, gradients, row_bias);
    } else {
      Base::template compute_p_and_ds<kHasSoftcap>(row_stage, cuts_probabilities, scores, gradients);
    }
  }

  __device__ void multiply(int stage, bool cuts_probabilities, const KeyStep &next) {
    const uint32_t q = this->q(stage), dout = this->dout(stage);
    float scores[kKeyTiles][kRowTiles][4], gradients[kKeyTiles][kRowTiles][4];
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, k_fragment, q + row_offset_right);
    clear(gradients);
    if (this->wants_score_gradients() && !params.only_mass)
      gemm_ss<Element, kHeadDim>(gradients, v_fragment, dout + row_offset_right);
    if (params.p.softcap > 0)
      compute_p_and_ds<true>(stage, cuts_probabilities, scores, gradients);
    else
      compute_p_and_ds<false>(stage, cuts_probabilities, scores, gradients);
    if constexpr (Config::kGeneral) {
      __syncwarp(); // the bias has been read
      load_row_bias(next);
      ptx::cp_async_fence();
    }
    if constexpr (kComputesDv)
      if (present(params.a.dv)) gemm_rs<Element, kHeadDim>(dv, scores, dout + column_offset_right);
    if constexpr (kComputesDk)
      if (present(params.a.dk)) gemm_rs<Element, kHeadDim>(dk, gradients, q + column_offset_right);
  }

  // The prologue loads K and V and starts the copies of the first step. The mainloop iterates over the steps.
  __device__ void run() {
    this->start();
    this->load_keys();
    const KeyStep first = keys.first_step(kRows);
    if constexpr (Config::kGeneral) load_row_bias(first);
    bool more = this->load(first, 0);
    for (int stage = 0; more; stage ^= 1) {
      ptx::cp_async_wait<0>();
      const bool large_lse =
          __syncthreads_or(this->has_large_lse(stage)); // this tile has arrived; all threads have read the previous one
      const KeyStep &step = shared.stages[stage].step;
      const KeyStep next = keys.next_step(step, kRows);
      const bool head_ends = !next.valid || next.head != step.head;
      more = this->load(next, stage ^ 1);
      if (large_lse) this->clear_empty_rows(stage);
      multiply(stage, large_lse, next);
      if (params.bias_heads > 1 && head_ends) this->write_bias(step.head);
    }
    ptx::cp_async_wait<0>();
    if (params.bias_heads == 1) this->write_bias(0);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    dkdv_kernel(const __grid_constant__ BackwardParams params) {
  auto &shared = dynamic_memory<DkdvShared<Config>>();
  if (!has_key_item(params, blockIdx.x)) return;
  DkdvBlock<Config> block(params, shared);
  block.keys.start(key_item(params.keys, blockIdx.x), Config::kComputesDk);
  block.run();
  block.write();
}

} // namespace fdm::cuda
