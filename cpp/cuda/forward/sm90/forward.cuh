// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with Hopper's wgmma: a persistent kernel, one block of threads on each SM.
//
// The kernel is warp-specialized. A lookup warpgroup finds tiles and the keys of their columns, and a producer warpgroup
// gathers the rows of Q, K and V, as far ahead as the stages of the pipeline allow, also over the end of a tile. Two
// consumer warpgroups have 64 rows each. In their mainloop, the scores of a block are started before the previous block's
// product with V, so the tensor cores work while a warpgroup makes probabilities.
#pragma once

#include "../../ptx/dependent.cuh"
#include "../../tile/sm90/bias_operand.cuh"
#include "../../tile/sm90/key_lookup.cuh"
#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/task_ring.cuh"
#include "../../tile/sm90/tile_sizes.cuh"
#include "../forward_rows.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kColumnCount, int kKStages, int kVStages>
struct ForwardConfigSm90 {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kColumnCount;
  using Pipeline = KeyStream<kHeadDim, kColumnCount, kKStages, kVStages>;
  using QTile = SmemTile<kHeadDim, kRows>;
  using Bias = BiasOperand<Element, kColumns, Pipeline::kKStages>;
  using Rows = ForwardRows<Element, 1, kColumns / 8, kHeadDim / 8, false, false, true>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kRows == Roles::kProducerThreads);
};

template <class Config> struct ForwardSharedSm90 {
  typename Config::Pipeline pipeline;
  alignas(1024) char sQ[Config::QTile::kBytes];
  typename Config::Bias bias;
  TaskRing<ForwardTask> tasks;
  // The maximum and sum of two rows, of each consumer thread, while its registers hold those of the next tile.
  float4 sums[Roles::kConsumerThreads];
};

// Q of the next tile is loaded as late as its place becomes free, and should then be in L2. Each lookup thread asks for a
// row.
template <class Config> __device__ void prefetch_queries(const ForwardParams &params, const ForwardTask &next) {
  const fdm_tensor &q = params.p.q;
  const int64_t i = next.first_row + threadIdx.x % Roles::kLookupThreads;
  if (i >= next.s.q_count) return;
  const auto *row = static_cast<const uint16_t *>(q.data) + row_offset(q, next.s, i, next.head);
  for (int d = 0; d < params.p.head_dim; d += 64) ptx::prefetch_l2(row + d);
}

// As many rows at a time as a block has columns, so that a thread needs no more registers than for those.
template <class Config>
__device__ void load_queries(const ForwardParams &params, const TaskLoader<ForwardTask> &tasks, char *sQ) {
  using QTile = typename Config::QTile;
  constexpr int kRows = Config::kColumns;
  using Gather = RowGather<QTile, kRows>;
  const fdm_tensor &q = params.p.q;
#pragma unroll 1
  for (int row = 0; row < Config::kRows; row += kRows) {
    const ForwardTask &task = tasks.current();
    const auto *first = static_cast<const uint16_t *>(q.data) + row_offset(q, task.s, task.first_row + row, task.head);
    const int64_t rows = min64(task.s.q_count - task.first_row - row, kRows);
    const auto sources = Gather::consecutive(reinterpret_cast<const char *>(first), params.rows.q_bytes, int(rows));
    if (row == 0) tasks.producer_acquire();
    uint32_t tile = ptx::shared_address(sQ) + row * QTile::kRowBytes;
    asm volatile("" : "+r"(tile)); // what follows from it would take registers throughout the loop over tiles
    Gather::copy(tile, sources, int(params.p.head_dim));
  }
}

template <class Config>
__device__ void look_up_forward(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
  const fdm_problem &p = params.p;
  const auto make = [&](const HeadTile &t, ForwardTask &task) {
    task.s = t.s;
    task.sequence_index = t.sequence_index;
    task.head = t.head;
    task.kv_head = kv_head_of(p, t.head);
    task.first_row = t.tile * Config::kRows;
    task.bias = score_view(p, p.bias, t.s, t.head);
    task.columns = tile_columns(p, params.plan, t.s, t.sequence_index, t.head, t.tile);
    task.sink = sink_score(p, t.head);
  };
  TaskMaker<ForwardTask, decltype(make)> scheduler(p, params.sequences_together, params.tickets, shared.tasks, make);
  const auto on_column = [&](int stage, int i, float bias) {
    if (present(p.bias) && params.bias_factor != 0.0f) shared.bias.store(stage, i, bias, params.bias_factor);
  };
  KeyLookup<typename Config::Pipeline, decltype(on_column)> keys(p, shared.pipeline, params.rows, on_column);
  keys.start(scheduler.current());
  for (; !scheduler.at_end(); scheduler.advance()) {
    keys.run(scheduler, [&] {
      prefetch_queries<Config>(params, scheduler.next());
      if (!scheduler.prepares()) return;
      keys.park();
      scheduler.prepare_ahead();
      keys.unpark();
    });
  }
}

template <class Config>
__device__ void produce_forward(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
  const fdm_problem &p = params.p;
  TaskLoader<ForwardTask> tasks(shared.tasks);
  KeyGatherer<typename Config::Pipeline> keys(shared.pipeline, int(p.head_dim), params.rows.k_bytes,
                                              params.rows.v_bytes);
  for (; tasks.wait(); tasks.advance()) {
    const ForwardTask &task = tasks.current();
    const char *first_k = RowPlaces::rows(p, p.k, params.rows.k_bytes, task.s, task.kv_head).first;
    // Read from shared memory each time, their number takes no register.
    const auto blocks = [&] { return (tasks.current().columns.count + Config::kColumns - 1) / Config::kColumns; };
#pragma unroll 1
    for (int block = 0; block == 0 || block < blocks(); ++block) {
      keys.load(first_k, block < blocks());
      if (block > 0) continue;
      // K of the first block need not wait until there is room for Q.
      keys.first_v = RowPlaces::rows(p, p.v, params.rows.v_bytes, task.s, task.kv_head).first;
      load_queries<Config>(params, tasks, shared.sQ);
      tasks.producer_commit();
    }
  }
  keys.load(nullptr, false);
  tasks.producer_tail();
}

// The blocks of all tiles are one stream. A step starts the scores of a block and the product of the block before with
// V, then turns the scores into probabilities while that product is computed. So the last product of a tile goes along
// with the first scores of the next tile, and a tile is written out in the first step of the next.
template <class Config> struct ForwardConsumer {
  using Element = typename Config::Element;
  using Pipeline = typename Config::Pipeline;
  using QTile = typename Config::QTile;
  using KeyTile = typename Pipeline::Tile;
  using Rows = typename Config::Rows;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;

  const ForwardParams &params;
  ForwardSharedSm90<Config> &shared;
  typename Pipeline::KPipelineState k_state;
  typename Pipeline::VPipelineState v_state;
  int group;
  uint32_t probabilities[kColumns / 16][4];
  Rows rows;

  __device__ ForwardConsumer(const ForwardParams &parameters, ForwardSharedSm90<Config> &memory)
      : params(parameters), shared(memory), group(Roles::consumer_group()), rows(parameters, memory.tasks.tasks[0]) {
    if (group == 1) Roles::pass_turn(group);
  }

  // Starts Q K', with the bias added if scores are linear in it.
  __device__ void start_scores() {
    const bool folds = params.bias_factor != 0.0f && present(params.p.bias);
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.pipeline.sK[k_state.index]));
    const uint64_t q = QTile::descriptor(ptx::shared_address(shared.sQ)) + QTile::offset(64 * uniform(group), 0);
    ptx::warpgroup_arrive();
    if (folds) {
      ptx::wgmma_ss<Element, false, false>(rows.scores[0], shared.bias.ones_descriptor(),
                                           shared.bias.descriptor(k_state.index), false);
    }
    warpgroup_gemm_ss<Element, QTile, KeyTile, kHeadDim>(rows.scores[0], q, k, folds);
    ptx::warpgroup_commit_batch();
  }

  __device__ void start_output() {
    const uint64_t v = KeyTile::descriptor(ptx::shared_address(shared.pipeline.sV[v_state.index]));
    Roles::consumer_wait(shared.pipeline.v_full[v_state.index], v_state.phase);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, KeyTile>(rows.out[0], probabilities, v);
    ptx::warpgroup_commit_batch();
  }

  template <int kMark> __device__ void finish_output() {
    ptx::warpgroup_wait<0, kMark>();
    ptx::warpgroup_fence_operand(rows.out[0]);
    ptx::warpgroup_fence_operand(probabilities);
    Roles::consumer_release(shared.pipeline.v_empty[v_state.index]);
    ++v_state;
  }

  // What comes before a block: nothing, the last block of the tile before, or a block of the same tile.
  enum class After { nothing, tile, block };

  // The blocks of a task that are left, this one among them, and how many of the last may be partial.
  struct BlocksLeft {
    int count, partial;
  };

  // In the first block of a task these are read when they are needed: with the sums of the task before, registers are
  // scarce.
  template <After kAfter>
  __device__ static BlocksLeft left_of(const RingConsumer<ForwardTask> &tasks, const BlocksLeft &left) {
    return kAfter == After::block ? left : blocks_of(tasks.current());
  }

  template <After kAfter> __device__ void step(const RingConsumer<ForwardTask> &tasks, const BlocksLeft &left) {
    Pipeline &pipeline = shared.pipeline;
    Roles::consumer_wait(pipeline.k_full[k_state.index], k_state.phase);
    Roles::take_turn(group);
    start_scores();
    if constexpr (kAfter != After::nothing) start_output();
    Roles::pass_turn(group);
    ptx::warpgroup_wait<kAfter == After::nothing ? 0 : 1>();
    ptx::warpgroup_fence_operand(rows.scores[0]);
    if (left_of<kAfter>(tasks, left).count == 1) tasks.release(); // Q of the next tile may come
    if constexpr (kAfter == After::tile) put_sums_aside();
    const BlocksLeft now = left_of<kAfter>(tasks, left);
    softmax<kAfter>(tasks, now.count <= now.partial);
    Roles::consumer_release(pipeline.k_empty[k_state.index]);
    ++k_state;
    pack_left<Element>(probabilities, rows.scores[0]);
    if constexpr (kAfter == After::tile) write_before(tasks.before());
    if constexpr (kAfter != After::block) clear(rows.out);
  }

  // Turns products into probabilities, and finishes the product with V that is under way.
  //
  // The first block of a tile gives the maximum of its rows. It mostly stays, and is not looked for in other blocks
  // unless their sums show that it does not. That branch also keeps the wait for the product with V behind the
  // probabilities, which ptxas would else compute after it.
  template <After kAfter> __device__ void softmax(const RingConsumer<ForwardTask> &tasks, bool partial) {
    const auto &facts = shared.pipeline.facts[k_state.index];
    const bool linear = params.bias_factor != 0.0f;
    if (linear) {
      const float scale = params.factors.scale;
      if (partial) rows.drop_columns(facts);
      if constexpr (kAfter != After::block) rows.find_maximum(scale);
      float added[2];
      rows.quick_softmax(scale, added);
      if (__all_sync(0xffffffffu, added[0] <= Rows::kMostSum && added[1] <= Rows::kMostSum)) {
        if constexpr (kAfter != After::nothing) finish_output<0>();
#pragma unroll
        for (int half = 0; half < 2; ++half)
          rows.sum[0][half] = kAfter == After::block ? rows.sum[0][half] + added[half] : added[half];
        return;
      }
    }
    if constexpr (kAfter != After::nothing) finish_output<1>();
    if (linear) scores_again(tasks.current());
    rows.finish_scores(facts, partial);
    if constexpr (kAfter != After::block) rows.start_sums();
    const float factors[2] = {rows.softmax(0, 0), rows.softmax(0, 1)};
    if constexpr (kAfter == After::block) {
      rows.rescale(0, 0, factors[0]);
      rows.rescale(0, 1, factors[1]);
    }
  }

  // Computes the products of this warp's rows and the keys once more, without their bias. Q comes from global memory,
  // since its tile may have been released.
  __device__ void scores_again(const ForwardTask &task) {
    const fdm_tensor &q = params.p.q;
    const uint32_t sK = ptx::shared_address(shared.pipeline.sK[k_state.index]);
    const int lane = threadIdx.x % 32, head_dim = int(params.p.head_dim);
    const uint16_t *row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = task.first_row + Rows::row(0, half);
      row[half] =
          i < task.s.q_count ? static_cast<const uint16_t *>(q.data) + row_offset(q, task.s, i, task.head) : nullptr;
    }
    clear(rows.scores);
#pragma unroll 1
    for (int d = 0; d < kHeadDim; d += 16) {
      uint32_t left[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = d + 8 * (i / 2) + accumulator_column();
        const bool valid = row[i % 2] && column < head_dim;
        left[i] = valid ? *reinterpret_cast<const uint32_t *>(row[i % 2] + column) : 0u;
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        uint32_t right[4];
        ptx::ldmatrix(right, KeyTile::chunk_address(sK, 8 * n + lane / 16 * 8 + lane % 8, d / 8 + lane / 8 % 2));
        ptx::mma<Element>(rows.scores[0][n], left, right[0], right[1]);
        ptx::mma<Element>(rows.scores[0][n + 1], left, right[2], right[3]);
      }
    }
  }

  __device__ float4 &own_sums() { return shared.sums[TaskRing<ForwardTask>::thread()]; }
  __device__ void put_sums_aside() {
    own_sums() = {rows.maximum[0][0], rows.maximum[0][1], rows.sum[0][0], rows.sum[0][1]};
  }

  // The epilogue of a task, whose sums have made room for those of the next tile.
  __device__ void write_before(const ForwardTask &task) {
    const float4 sums = own_sums();
    put_sums_aside();
    rows.maximum[0][0] = sums.x;
    rows.maximum[0][1] = sums.y;
    rows.sum[0][0] = sums.z;
    rows.sum[0][1] = sums.w;
    write(task);
    const float4 next = own_sums();
    rows.maximum[0][0] = next.x;
    rows.maximum[0][1] = next.y;
    rows.sum[0][0] = next.z;
    rows.sum[0][1] = next.w;
  }
  __device__ void write(const ForwardTask &task) {
    rows.task = &task;
    rows.finish();
    rows.write();
  }

  // Goes through all tasks.
  __device__ void run() {
    RingConsumer<ForwardTask> tasks(shared.tasks);
    while (tasks.wait()) {
      if (blocks_of(tasks.current()).count > 0) {
        run_stream(tasks);
        continue;
      }
      tasks.release();
      rows.task = &tasks.current();
      rows.start();
      rows.write();
      tasks.advance();
    }
  }

  // Goes through tasks up to one without columns.
  __device__ void run_stream(RingConsumer<ForwardTask> &tasks) {
    step<After::nothing>(tasks, {});
    BlocksLeft left = blocks_of(tasks.current());
    for (;;) {
      while (--left.count > 0) step<After::block>(tasks, left);
      tasks.advance();
      if (!tasks.wait()) break;
      if (blocks_of(tasks.current()).count == 0) break;
      step<After::tile>(tasks, {});
      left = blocks_of(tasks.current());
    }
    start_output();
    finish_output<0>();
    write(tasks.before());
  }

  __device__ static BlocksLeft blocks_of(const ForwardTask &task) {
    const int count = uniform(task.columns.count), full = uniform(task.columns.full);
    const int blocks = int(uint32_t(count + kColumns - 1) / kColumns);
    return {blocks, blocks - int(uint32_t(full) / kColumns)};
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreadsWithLookup, 1)
    forward_kernel_sm90(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<ForwardSharedSm90<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) {
    shared.pipeline.init();
    shared.tasks.init();
  }
  shared.bias.init();
  ptx::wait_for_kernel_ahead();
  __syncthreads();
  using Registers = ForwardRegisters<Config::kHeadDim>;
  if (Roles::is_lookup()) {
    Registers::look_up();
    look_up_forward<Config>(params, shared);
  } else if (Roles::is_producer()) {
    Registers::produce();
    produce_forward<Config>(params, shared);
  } else {
    Registers::consume();
    ForwardConsumer<Config> consumer(params, shared);
    consumer.run();
  }
}

} // namespace fdm::cuda
