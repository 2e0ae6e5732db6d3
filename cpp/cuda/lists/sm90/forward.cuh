// SPDX-License-Identifier: BSD-3-Clause
// Columns of the persistent forward kernel (forward/sm90/forward.cuh) for queries that list their keys, with many heads
// per list. The rows of a tile are query heads of one query; its columns are the listed keys.
//
// The kernel sees query heads as the rows of a sequence, and queries as heads: the host exchanges the strides of heads
// and rows of Q, out and lse. Lookup warps flag blocks that have columns without a key. Words of zeros drop these
// columns.
#pragma once

#include "../../forward/sm90/forward.cuh"
#include "../../tile/sm90/key_columns.cuh"
#include "../../tile/sm90/stream_lookup.cuh"
#include "../list_tile.cuh"

namespace fdm::cuda {

struct ListForwardParamsSm90 {
  ForwardParams forward;
  ListTiles tiles;
  int64_t count; // number of tiles
};

struct ListForwardTask : ForwardTask {
  ListTask list;

  __device__ void set(const ForwardParams &params, const ListTiles &tiles, int64_t number) {
    const fdm_problem &p = params.p;
    list.set(p, tiles, number);
    const int64_t rows = group_size(p);
    s = {list.s.batch, list.kv_head * rows, rows, list.s.k_begin, list.s.k_count, 0};
    sequence_index = list.sequence_index;
    head = list.s.q_begin + list.query;
    kv_head = list.kv_head;
    first_row = list.head - s.q_begin;
    bias = list.bias;
    reference = {};
    columns = {};
    columns.count = list.length;
    columns.column_keys = list.indices;
    set_results(params);
  }
};

// The pipeline of K and V, with the flags that lookup warps set for each block.
template <int kHeadDim, int kColumnCount, int kKStageCount, int kVStageCount>
struct ListStream : KeyStream<kHeadDim, kHeadDim, kColumnCount, kKStageCount, kVStageCount, Lookup::warps> {
  static constexpr bool kHasBlockFlags = true;
  BlockFlagSlots<kKStageCount> flags;
};

// Makes the tasks of a thread block. All tiles have equally many columns, so the order of tiles is static.
template <class Config> struct ListTaskMaker {
  static constexpr int kSlots = Config::Ring::kSlots;

  const ListForwardParamsSm90 &params;
  typename Config::Ring &ring;

  // One warp makes and returns task `index`; null after the last task.
  __device__ const ListForwardTask *prepare(uint32_t index) const {
    const int64_t number = tile_of_round(index);
    const bool end = number >= params.count;
    ListForwardTask &task = ring.tasks[index % kSlots];
    if (threadIdx.x % 32 == 0) {
      ring.end[index % kSlots] = end;
      if (!end) task.set(params.forward, params.tiles, number);
      ptx::arrive(ring.made[index % kSlots]);
    }
    return end ? nullptr : &task;
  }
};

// A lookup warp. Lookup warps take turns at the blocks of all tasks. Lane l has columns l, l + 32, ... of a block.
template <class Config> struct ListLookup : StreamLookup<typename Config::Pipeline, BiasStore<Config>> {
  using Stream = typename Config::Pipeline;
  using Base = StreamLookup<Stream, BiasStore<Config>>;
  using Base::kColumns, Base::k_state, Base::row_state, Base::stream, Base::p;
  static constexpr int kLaneColumns = kColumns / 32, kWarps = Stream::kTurnWarps;
  static_assert(kColumns % 32 == 0);

  int block; // this warp's next block, relative to the task's first

  __device__ ListLookup(const ForwardParams &params, Stream &shared, const BiasStore<Config> &call, int warp)
      : Base(params.p, shared, params.rows, call), block(warp) {
#pragma unroll 1
    for (int i = 0; i < warp; ++i) Base::pass_block();
  }

  // Stores the column facts of this warp's blocks of a task.
  __device__ void run(const ListForwardTask &task) {
    const int blocks = Base::blocks_of(task);
    int32_t keys[kLaneColumns];
    fetch_keys(task, keys);
#pragma unroll 1
    while (block < blocks) {
      store_block(task, keys);
#pragma unroll
      for (int i = 0; i < kWarps; ++i) Base::pass_block();
    }
    block -= blocks;
  }

private:
  __device__ static int lane() { return int(threadIdx.x) % 32; }

  __device__ void fetch_keys(const ListForwardTask &task, int32_t (&keys)[kLaneColumns]) const {
#pragma unroll
    for (int n = 0; n < kLaneColumns; ++n) keys[n] = fetch_key(task.columns, block * kColumns + 32 * n + lane());
  }

  // `keys` holds the keys of the block, and on return those of this warp's next block.
  __device__ void store_block(const ListForwardTask &task, int32_t (&keys)[kLaneColumns]) {
    const int stage = k_state.index, first = block * kColumns + lane(), limit = task.list.limit;
    const bool is_last = first - lane() + kColumns >= task.columns.count;
    const ScoreView bias = task.bias, index_bias = task.list.index_bias;
    uint32_t bias_bits[kLaneColumns], index_bits[kLaneColumns];
    int32_t rows[kLaneColumns];
#pragma unroll
    for (int n = 0; n < kLaneColumns; ++n) {
      rows[n] = keys[n] < limit ? keys[n] : -1;
      if (rows[n] >= 0 && bias.data) bias_bits[n] = bias.load_bits(rows[n]);
      if (rows[n] >= 0 && index_bias.data) index_bits[n] = index_bias.load_bits(first + 32 * n);
    }
    block += kWarps;
    fetch_keys(task, keys);
    Roles::producer_acquire(stream.k_empty[stage], k_state.phase);
    auto &facts = stream.facts[stage];
    bool drops = false;
#pragma unroll
    for (int n = 0; n < kLaneColumns; ++n) {
      const int i = 32 * n + lane();
      float column_bias = rows[n] < 0 ? -INFINITY : 0.0f;
      if (rows[n] >= 0) {
        if (bias.data) column_bias = bias.convert(bias_bits[n]);
        if (index_bias.data) column_bias += index_bias.convert(index_bits[n]);
        column_bias = to_base_2(column_bias);
      }
      facts.bias[i] = column_bias;
      this->on_column(task, stage, i, column_bias);
      if (column_bias == -INFINITY) rows[n] = -1;
      stream.rows[row_state.index][Stream::Gather::list_index(i)] =
          rows[n] < 0 ? -1 : this->places.row(p, task.sequence_index, rows[n]);
      drops |= rows[n] < 0;
    }
    drops = __any_sync(0xffffffffu, drops);
    if (drops) {
#pragma unroll
      for (int n = 0; n < kLaneColumns; ++n)
#pragma unroll
        for (int part = 0; part < kTileRows / 32; ++part) facts.word[part][32 * n + lane()] = rows[n] < 0 ? 0u : ~0u;
    }
    stream.flags.of(k_state).set_by_one_warp(drops, is_last);
    ptx::arrive(stream.found[stage]);
  }
};

template <class ConfigType> struct ListedColumns {
  using Config = ConfigType;
  using Params = ListForwardParamsSm90;
  using Registers = ForwardRegisters<Config::kHeadDim>;

  __device__ static const ForwardParams &forward(const Params &params) { return params.forward; }
  __device__ static void look_up(const Params &params, ForwardSharedSm90<Config> &shared) {
    const int warp = Roles::lookup_warp();
    if (warp == Roles::kMaxTurnWarps) {
      make_tasks(ListTaskMaker<Config>{params, shared.tasks},
                 [&](const ListForwardTask &task) { prefetch_queries<Config, 32>(params.forward, task); });
    } else if (warp < Config::Pipeline::kTurnWarps) {
      const BiasStore<Config> on_column{params.forward, shared};
      ListLookup<Config> keys(params.forward, shared.pipeline, on_column, warp);
      look_up_tasks(shared.tasks, [&](const ListForwardTask &task) { keys.run(task); });
    }
  }
  __device__ static void produce(const Params &params, ForwardSharedSm90<Config> &shared) {
    produce_forward<Config>(params.forward, shared);
  }
};

template <class Element, int kHeadDim> struct ListForwardSm90 {
  static constexpr ForwardTileSm90 kTile = forward_tile_sm90(kHeadDim, kHeadDim);
  using Stream = ListStream<kHeadDim, kTile.columns, kTile.k_stages, kTile.v_stages>;
  using Config = ForwardConfigSm90<Element, kHeadDim, Stream, 1, RowLayout::one_query, ListForwardTask>;
};

} // namespace fdm::cuda
