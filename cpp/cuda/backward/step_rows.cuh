// SPDX-License-Identifier: BSD-3-Clause
// The common part of the key-stationary kernels with mma.sync. K and V of a key block stay in shared memory. The rows
// of Q and dO that may keep its keys are loaded step by step, into one pipeline stage for each step.
#pragma once

#include "../tile/copy_rows.cuh"
#include "key_gradients.cuh"

namespace fdm::cuda {

// The addresses of row 0 of a sequence, in the first query head of the group. They take 64-bit products, computed
// once. The rows of a step then take only a few 32-bit products.
struct FirstRow {
  const uint16_t *q, *dout;
  const RowStatistics *statistics;
};

template <class Config> struct StepMemory {
  static constexpr int kKeyBytes = Config::Tile::bytes(Config::kKeys), kRowBytes = Config::Tile::bytes(Config::kRows);

  // kValuesInRegisters: V goes to registers by way of the stages of Q, and dO has one stage.
  static constexpr bool kValuesInRegisters = Config::kValuesInRegisters;
  static_assert(!kValuesInRegisters || kKeyBytes <= 2 * kRowBytes);

  alignas(1024) char sK[kKeyBytes];
  alignas(128) char sV[kValuesInRegisters ? 1 : kKeyBytes];
  alignas(128) char sQ[2][kRowBytes];
  char sdO[kValuesInRegisters ? 1 : 2][kRowBytes];
  typename Config::Gradients::Stage stages[2];
  typename Config::KeysOfBlock::Shared keys;
  FirstRow first_row;

  __device__ char *values() { return kValuesInRegisters ? sQ[0] : sV; }
};

template <class Config> struct StepRows : Config::Gradients {
  using Base = typename Config::Gradients;
  using Tile = typename Config::Tile;
  using Memory = StepMemory<Config>;
  using Base::keys, Base::params;
  static constexpr int kKeys = Config::kKeys, kRows = Config::kRows, kRowBytes = Memory::kRowBytes;
  static constexpr bool kComputesDk = Config::kComputesDk;

  Memory &shared;
  uint32_t k_fragment, v_fragment, q_base, dout_base;
  uint32_t row_offset_right, column_offset_right;

  __device__ StepRows(const BackwardParams &parameters, Memory &memory)
      : Base(parameters, memory.keys), shared(memory) {
    const int first = Base::key_row(0, 0) - accumulator_row(0);
    k_fragment = Tile::left(ptx::shared_address(shared.sK), first);
    v_fragment = Tile::left(ptx::shared_address(shared.values()), first);
    q_base = ptx::shared_address(shared.sQ[0]);
    dout_base = ptx::shared_address(shared.sdO[0]);
    row_offset_right = Tile::right_rows(0);
    column_offset_right = Tile::right_columns(0);
  }

  // Copies K and V of the block, and finds the addresses that its steps have in common.
  __device__ void load_keys() const {
    if (threadIdx.x == 0) {
      const KeyTask &task = keys.task();
      const auto row = [&](const fdm_tensor &t) {
        return static_cast<const uint16_t *>(t.data) + row_offset(t, task.s, 0, task.first_head);
      };
      shared.first_row = {row(params.p.q), row(params.a.dout), &row_statistics(params, task.s, task.first_head, 0)};
    }
    const auto copy = [&](const fdm_tensor &t, const char *tile) {
      copy_rows<Tile, kKeys, Config::kThreads>(
          ptx::shared_address(tile), int(params.p.head_dim), [&](int r) -> const uint16_t * {
            return shared.keys.readable[r] ? static_cast<const uint16_t *>(t.data) + keys.row_offset(t, r) : kZeroRow;
          });
    };
    copy(params.p.k, shared.sK);
    if constexpr (kComputesDk) copy(params.p.v, shared.values());
    __syncthreads();
  }

  // Starts the copies of a step's rows of q or dout.
  __device__ void copy_step(const KeyStep &step, const fdm_tensor &t, const uint16_t *first_row, uint32_t tile) const {
    const uint32_t first = step.tile * kRows, head = step.head;
    const int rows = int(keys.task().s.q_count) - int(first);
    const uint16_t *base = first_row + (first * t.stride[1] + head * t.stride[2]);
    copy_tile_rows<Tile, Config::kThreads>(tile, 0, base, kRows, rows, t, params.p.head_dim);
  }
  __device__ uint32_t q(int stage) const { return q_base + stage * kRowBytes; }
  __device__ uint32_t dout(int stage) const { return dout_base + (Memory::kValuesInRegisters ? 0 : stage * kRowBytes); }
  __device__ void load_queries(const KeyStep &step, int stage) const {
    copy_step(step, params.p.q, shared.first_row.q, q(stage));
    if constexpr (Config::KeysOfBlock::kRowPlans) {
      if (keys.task().has_words && int(threadIdx.x) < kKeys) {
        const TileWords words = keys.words(step, kRows);
        const int32_t key = shared.keys.key[threadIdx.x];
        ptx::cp_async_16(ptx::shared_address(&shared.stages[stage].words[threadIdx.x]), words.of(max(key, 0)),
                         key >= 0);
      }
    }
  }
  __device__ void load_dout(const KeyStep &step, int stage) const {
    copy_step(step, params.a.dout, shared.first_row.dout, dout(stage));
  }

  // The first kRows threads copy the statistics of a row each.
  __device__ void load_statistics(const KeyStep &step, int stage) const {
    const int row = step.tile * kRows + int(threadIdx.x);
    if (int(threadIdx.x) >= kRows) return;
    float &lse = shared.stages[stage].lse[threadIdx.x], &delta = shared.stages[stage].delta[threadIdx.x];
    if (row < keys.task().s.q_count) {
      const RowStatistics *statistics = shared.first_row.statistics + uint32_t(step.head) * total_rows(params.p) + row;
      ptx::cp_async_4(ptx::shared_address(&lse), &statistics->lse);
      ptx::cp_async_4(ptx::shared_address(&delta), &statistics->delta);
    } else {
      lse = INFINITY;
      delta = 0.0f;
    }
  }

  // Whether the lse of this thread's row is beyond kLargeLse. Rows past the last one have lse = inf and count, too. For
  // them the extra work is wasted, once for each head.
  __device__ bool has_large_lse(int stage) const {
    return int(threadIdx.x) < kRows && fabsf(shared.stages[stage].lse[threadIdx.x]) > kLargeLse;
  }

  // Starts the copies of a step if it is valid, and returns whether it is. The copies of dO start later if dO has one
  // stage.
  __device__ bool load(const KeyStep &step, int stage) const {
    if (step.valid) {
      load_queries(step, stage);
      if constexpr (!Memory::kValuesInRegisters) load_dout(step, stage);
      load_statistics(step, stage);
    }
    if (threadIdx.x == 0) shared.stages[stage].step = step;
    ptx::cp_async_fence();
    return step.valid;
  }

  // Clears rows without a gradient, so that non-finite values in their dO reach no result. This is rarely needed.
  __device__ void clear_empty_rows(int stage) const {
    for (int i = threadIdx.x; i < kRows * Tile::kChunks; i += Config::kThreads) {
      const int r = i / Tile::kChunks;
      if (shared.stages[stage].lse[r] != INFINITY) continue;
      for (const uint32_t base : {q(stage), dout(stage)})
        ptx::store_shared(Tile::chunk_address(base, r, i % Tile::kChunks), uint4{});
    }
    __syncthreads();
  }
};

} // namespace fdm::cuda
