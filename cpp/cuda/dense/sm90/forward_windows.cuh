// SPDX-License-Identifier: BSD-3-Clause
// Forward pass of problems with at most 64 rows and keys, whose batch shares a bias: windows. Each consumer warpgroup has a source of its own, and its part of the bias in registers for as many sources as the
// task has.
#pragma once

#include "../../tile/sm90/bias_operand.cuh"
#include "../../tile/sm90/products.cuh"
#include "forward_rows.cuh"
#include "odd_tasks.cuh"

namespace fdm::cuda {

template <class ElementType, bool kWideBias> struct WindowForwardConfig {
  using Element = ElementType;
  static constexpr bool kWide = kWideBias; // the bias is float32
  static constexpr int kTile = kWideTile, kSide = kWindow, kSources = kTile / kSide, kStages = 4;
  using Pair = TilePair<kWindowHeadDim>;
  using Registers = RoleRegisters<208, 80>;
};

template <class Config> struct WindowForwardShared {
  alignas(1024) char sQ[Config::kStages][Config::Pair::kBytes], sKV[Config::kStages][Config::Pair::kBytes];
  BiasOperand<typename Config::Element, Config::kTile, Config::kStages> drops; // -inf of keys that are dropped
  uint32_t live[Config::kSources][Config::kSide / 32]; // of an exact run: keys that a row of the source keeps
  OddTasks<1> odd;                                     // a block of threads has one task
  uint64_t full[Config::kStages], empty[Config::kStages];

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    drops.init();
    if (threadIdx.x > 0) return;
    odd.init();
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
  }
};

// Some of the sources of a head of the bias.
struct WindowTask {
  int unit;
  int64_t first, past;

  __device__ explicit WindowTask(const DenseForward &work) {
    const int64_t sources = int64_t(work.call.batches) * work.call.heads;
    const int group = int(blockIdx.x) % work.groups;
    unit = int(blockIdx.x) / work.groups;
    first = sources * group / work.groups;
    past = sources * (group + 1) / work.groups;
  }
};

template <class Config> struct WindowForwardProducer {
  using Rows = WideRows<typename Config::Pair>;

  const DenseForward &work;
  WindowForwardShared<Config> &shared;
  const WindowTask &task;
  const Rows q, k, v;
  const uint32_t used; // the rows of this warp that exist
  PipelineState<Config::kStages> &state;

  __device__ WindowForwardProducer(const DenseForward &own_work, WindowForwardShared<Config> &memory,
                                   const WindowTask &own_task, PipelineState<Config::kStages> &own_state)
      : work(own_work), shared(memory), task(own_task), q(own_work.call.p.q, own_work.call.p.head_dim, first_row()),
        k(own_work.call.p.k, own_work.call.p.head_dim, first_row()),
        v(own_work.call.p.v, own_work.call.p.head_dim, first_row()),
        used(__ballot_sync(0xffffffffu, row() < own_work.call.p.queries)), state(own_state) {}

  __device__ static int own_source() { return Roles::producer_thread() / Config::kSide; }
  __device__ static int first_row() { return -own_source() * Config::kSide; } // of the tile, in the rows of the source
  __device__ static int row() { return Roles::producer_thread() % Config::kSide; }

  // Returns a byte that is not 0 if the source keeps this thread's key.
  __device__ uint8_t fetch_kept(const SourceWalk &source) const {
    const fdm_problem &p = work.call.p;
    if (row() >= p.keys) return 0;
    const uint8_t *const kept = kept_key(p, source.batch, source.head, row());
    return kept ? *kept : 1;
  }

  __device__ void run() const {
    SourceWalk source(work.call, task.unit, task.first + own_source());
    bool exists = task.first + own_source() < task.past;
    uint8_t kept = 0;
    if (exists) kept = fetch_kept(source);
    for (int64_t index = task.first; index < task.past; index += Config::kSources, ++state) {
      SourceWalk after = source;
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) ++after;
      const bool next_exists = index + Config::kSources + own_source() < task.past;
      uint8_t next_kept = 0;
      if (next_exists) next_kept = fetch_kept(after);
      const int stage = state.index;
      Roles::producer_acquire(shared.empty[stage], state.phase);
      const uint32_t there = __ballot_sync(0xffffffffu, kept != 0);
      shared.drops.drop(stage, Roles::producer_thread(), kept == 0);
      q.copy(shared.sQ[stage], 0, q.row_of(source.batch, source.head), exists ? used : 0);
      k.copy(shared.sKV[stage], 0, k.row_of(source.batch, source.head), there);
      v.copy(shared.sKV[stage], 1, v.row_of(source.batch, source.head), there);
      Roles::producer_commit(shared.full[stage]);
      source = after;
      exists = next_exists;
      kept = next_kept;
    }
  }
};

template <class Config> struct WindowForwardConsumer {
  using Element = typename Config::Element;
  using Pair = typename Config::Pair;
  using Tile = typename Pair::Tile;
  static constexpr int kTiles = Config::kSide / 8, kOutTiles = kWindowHeadDim / 8;
  static constexpr int kGroupThreads = Roles::kConsumerThreads / Roles::kConsumerGroups;
  static constexpr int kGroupBarrier = 4; // and the next: one for each warpgroup

  const DenseForward &work;
  WindowForwardShared<Config> &shared;
  const WindowTask &task;
  PipelineState<Config::kStages> &state;
  DenseSoftmax<1, kTiles> softmax;
  float out[1][kOutTiles][4];
  float bias[kTiles][4]; // -inf where a pair is dropped

  __device__ WindowForwardConsumer(const DenseForward &own_work, WindowForwardShared<Config> &memory,
                                   const WindowTask &own_task, PipelineState<Config::kStages> &own_state)
      : work(own_work), shared(memory), task(own_task), state(own_state) {}

  __device__ static int row(int half) {
    return int(threadIdx.x) / 32 % (Config::kSide / 16) * 16 + accumulator_row(half);
  }

  __device__ void load_bias() {
    const fdm_problem &p = work.call.p;
    const SourceWalk source(work.call, task.unit, task.first);
    const Sequence s = dense_sequence(p, source.batch);
    const Matrix m = score_matrix(p, p.bias, s, source.head, Config::kWide ? 4 : 2);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row(i / 2), k = 8 * n + accumulator_column() + i % 2;
        const int64_t offset = r * m.row + k * m.col;
        bias[n][i] = -INFINITY;
        if (!is_kept_pair(p, s, source.head, r, k)) continue;
        if constexpr (Config::kWide)
          bias[n][i] = static_cast<const float *>(m.base)[offset];
        else
          bias[n][i] = float(static_cast<const Element *>(m.base)[offset]);
      }
  }

  // Makes scores of products.
  template <bool kExact> __device__ void add_bias(float (&scores)[kTiles][4], int stage) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float score = fmaf(scores[n][i], work.call.p.scale, bias[n][i]);
        scores[n][i] = score;
        if constexpr (kExact) {
          const auto &drop =
              shared.drops.slots[stage][Config::kSide * Roles::consumer_group() + 8 * n + accumulator_column() + i % 2];
          const bool dropped = bias[n][i] == -INFINITY || float(drop.column[0]) == -INFINITY;
          scores[n][i] = dropped ? -INFINITY : ptx::max_or_nan(score, kLowestBias);
        }
      }
  }

  // Makes zeros of V of keys that no row of the source keeps: 0 times NaN is NaN.
  __device__ void clear_dead_values(const float (&scores)[1][kTiles][4], int stage) {
    const int group = Roles::consumer_group(), own = int(threadIdx.x) % kGroupThreads;
    const auto sync = [&] { ptx::sync_threads<kGroupThreads>(kGroupBarrier + group); };
    if (own < Config::kSide / 32) shared.live[group][own] = 0;
    sync();
    const uint32_t columns =
        live_columns(scores, -INFINITY, [&](int, int half) { return row(half) < work.call.p.queries; });
    if (threadIdx.x % 32 < 4)
#pragma unroll 1
      for (int bit = 0; bit < 2 * kTiles; ++bit) {
        const int column = bit / 2 * 8 + accumulator_column() + bit % 2;
        if (columns >> bit & 1) atomicOr(&shared.live[group][column / 32], 1u << column % 32);
      }
    sync();
    if (own < Config::kSide && !(shared.live[group][own / 32] >> own % 32 & 1))
#pragma unroll 1
      for (int chunk = 0; chunk < kOutTiles; ++chunk)
        for (int word = 0; word < 4; ++word)
          ptx::store_shared(
              Pair::chunk_address(ptx::shared_address(shared.sKV[stage]), 1, Config::kSide * group + own, chunk) +
                  4 * word,
              0);
    ptx::fence_async_proxy();
    sync();
  }

  // Returns whether a result shows what only an exact run can compute.
  template <bool kExact> __device__ bool step(const SourceWalk &source, bool exists) {
    const int stage = state.index;
    const uint64_t own_part = Tile::offset(Config::kSide, 0) * Roles::consumer_group();
    const uint64_t queries = Pair::descriptor(ptx::shared_address(shared.sQ[stage]), 0) + own_part,
                   keys = Pair::descriptor(ptx::shared_address(shared.sKV[stage]), 0) + own_part,
                   values = Pair::descriptor(ptx::shared_address(shared.sKV[stage]), 1) + own_part;
    float scores[1][kTiles][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, kWindowHeadDim>(scores[0], queries, keys, false);
    ptx::wgmma_ss<Element, false, false>(scores[0], shared.drops.ones_descriptor(),
                                         shared.drops.descriptor(stage, Config::kSide * Roles::consumer_group()), true);
    ptx::warpgroup_commit_batch();
    softmax.start();
    clear(out);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(scores[0]);
    add_bias<kExact>(scores[0], stage);
    if constexpr (kExact) clear_dead_values(scores, stage);
    softmax.apply(scores, out, kExact);
    uint32_t p[kTiles / 2][4];
    pack_left<Element>(p, scores[0]);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, Tile>(out[0], p, values);
    ptx::warpgroup_commit_batch();
    softmax.finish();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(out[0]);
    ptx::warpgroup_fence_operand(p);
    Roles::consumer_release(shared.empty[stage]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      write_aligned_row<Element>(work, source, row(half), exists && row(half) < work.call.p.queries, out[0], half,
                                 softmax.sum[0][half], softmax.shift[0][half]);
    return !is_finite(out[0]) || softmax.is_odd([](int, int) { return true; });
  }

  template <bool kExact> __device__ bool run() {
    const int group = Roles::consumer_group();
    SourceWalk source(work.call, task.unit, task.first + group);
    bool odd = false;
    for (int64_t index = task.first; index < task.past; index += Config::kSources, ++state) {
      Roles::consumer_wait(shared.full[state.index], state.phase);
      odd |= step<kExact>(source, index + group < task.past);
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) ++source;
    }
    return odd;
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    dense_window_forward_kernel(const __grid_constant__ DenseForward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<WindowForwardShared<Config> *>(dynamic_shared);
  shared.init();
  __syncthreads();
  const WindowTask task(work);
  PipelineState<Config::kStages> state;
  if (Roles::is_producer()) {
    Config::Registers::produce();
    const WindowForwardProducer<Config> producer(work, shared, task, state);
    producer.run();
    if (shared.odd.any()) producer.run();
  } else {
    Config::Registers::consume();
    WindowForwardConsumer<Config> consumer(work, shared, task, state);
    consumer.load_bias();
    if (consumer.template run<false>()) shared.odd.mark(0);
    shared.odd.finish();
    if (shared.odd.any()) consumer.template run<true>();
  }
}

} // namespace fdm::cuda
