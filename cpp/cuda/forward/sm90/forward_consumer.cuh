// SPDX-License-Identifier: BSD-3-Clause
// The consumers of the persistent Hopper forward kernels: two warpgroups of 64 rows each. The mainloop starts the
// scores of a block before the previous block's product with V, so the tensor cores work while a warpgroup computes
// probabilities.
#pragma once

#include "../../tile/sm90/bias_operand.cuh"
#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/task_ring.cuh"
#include "../forward_rows.cuh"
#include "ptx/registers.cuh"

namespace fdm::cuda {

// The pipeline is a KeyStream or KeyBoxes; the task is a ForwardTask or derived from it.
template <class ElementType, int kHeadDimension, class KeyPipelineType, int kQueryStageCount,
          RowLayout kRowLayout = RowLayout::one_head, class TaskType = ForwardTask>
struct ForwardConfigSm90 {
  using Element = ElementType;
  using Pipeline = KeyPipelineType;
  using Task = TaskType;
  static constexpr int kHeadDim = kHeadDimension, kValueDim = Pipeline::kValueDim;
  static constexpr int kRows = kTileRows, kColumns = Pipeline::kColumns;
  static constexpr int kQueryStages = kQueryStageCount;
  using QTile = SmemTile<kHeadDim, kRows>;
  // With narrow values, shared memory has no room for BiasOperand. With SmallBiasOperand, blocks with a bias of -inf
  // take the slow path of the softmax.
  using Bias = std::conditional_t<(kValueDim < kHeadDim), SmallBiasOperand<Element, kColumns, Pipeline::kKStages>,
                                  BiasOperand<Element, kColumns, Pipeline::kKStages>>;
  using Rows = ForwardRows<Element, 1, kColumns / 8, kValueDim / 8, kRowLayout>;
  using Ring = TaskRing<Task, kQueryStages>;
  using Loader = TaskLoader<Task, kQueryStages>;
  using Tasks = RingConsumer<Task, kQueryStages, Pipeline::kFenced>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kRows == Roles::kProducerThreads);
};

template <class Config> struct ForwardSharedSm90 {
  typename Config::Pipeline pipeline;
  alignas(1024) char sQ[Config::kQueryStages][Config::QTile::kBytes];
  typename Config::Bias bias;
  typename Config::Ring tasks;
  // The maximum and sum of two rows of each consumer thread, while its registers hold those of the next tile.
  float4 sums[Roles::kConsumerThreads];

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    if (threadIdx.x == 0) {
      pipeline.init();
      tasks.init(Config::Pipeline::kQueryArrivals, Config::Pipeline::kTaskReleaseThreads);
      ptx::fence_async_proxy(); // TMA uses the barriers
    }
    bias.init();
  }
};

// Whether columns have a bias: per key, or per list entry. With a branch here, ptxas would wait for each product.
template <class Config> __device__ __forceinline__ bool has_column_bias(const fdm_problem &p) {
  if constexpr (!Config::Rows::kOneQuery) return present(p.bias);
  return (reinterpret_cast<uintptr_t>(p.bias.data) | reinterpret_cast<uintptr_t>(p.index_bias.data)) != 0;
}

// Stores the bias of a column; lookup threads call this.
template <class Config> struct BiasStore {
  const ForwardParams &params;
  ForwardSharedSm90<Config> &shared;

  __device__ __forceinline__ void operator()(const ForwardTask &task, int stage, int i, float bias) const {
    if (!has_column_bias<Config>(params.p) || params.bias_factor == 0.0f) return;
    shared.bias.store(stage, i, bias - task.reference.value, params.bias_factor);
  }
};

// Makes the task of a tile.
template <class Config> struct MakeTask {
  const ForwardParams &params;

  __device__ __forceinline__ void operator()(const HeadTile &t, ForwardTask &task) const {
    task.set(params, t.s, t.sequence_index, t.head, t.tile * Config::kRows);
    task.columns = tile_columns(params.p, params.plan, t.s, t.sequence_index, t.head, t.tile);
    task.template set_walk_and_reference<Config::kColumns>();
  }
};

template <class Config> using ForwardTaskMaker = TaskMaker<ForwardTask, MakeTask<Config>, Config::kQueryStages>;

template <class Config>
__device__ __forceinline__ ForwardTaskMaker<Config> forward_task_maker(const ForwardParams &params,
                                                                       ForwardSharedSm90<Config> &shared) {
  return {params.p, params.order, params.tickets, shared.tasks, {params}};
}

// The blocks of all tiles are one stream. A step starts the scores of a block and the previous block's product with
// V. It turns the scores into probabilities while that product is computed. So the last product of a tile overlaps
// the first scores of the next tile, and a tile is written out in the first step of the next.
template <class Config> struct ForwardConsumer {
  using Element = typename Config::Element;
  using Pipeline = typename Config::Pipeline;
  using QTile = typename Config::QTile;
  using KeyTile = typename Pipeline::Tile;
  using ValueTile = typename Pipeline::ValueTile;
  using Rows = typename Config::Rows;
  using Tasks = typename Config::Tasks;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;

  const ForwardParams &params;
  ForwardSharedSm90<Config> &shared;
  typename Pipeline::KPipelineState k_state;
  typename Pipeline::VPipelineState v_state;
  int group;
  uint32_t probabilities[kColumns / 16][4];
  Rows rows;
  BiasReference reference; // of the task

  __device__ ForwardConsumer(const ForwardParams &parameters, ForwardSharedSm90<Config> &memory)
      : params(parameters), shared(memory), group(Roles::consumer_group()), rows(parameters, memory.tasks.tasks[0]) {
    if (group == 1) Roles::pass_turn(group);
  }

  // Starts Q K', plus the bias if scores are linear in it.
  __device__ void start_scores(const Tasks &tasks) {
    const bool folds = params.bias_factor != 0.0f && has_column_bias<Config>(params.p);
    const uint64_t k = KeyTile::descriptor(ptx::shared_address(shared.pipeline.sK[k_state.index]));
    uint64_t q = QTile::descriptor(ptx::shared_address(shared.sQ)) + QTile::offset(64 * uniform(group), 0);
    if constexpr (Config::kQueryStages > 1) q += uniform(tasks.stage()) * uint64_t(QTile::kBytes >> 4);
    ptx::warpgroup_arrive();
    if (folds) {
      ptx::wgmma_ss<Element, ptx::Major::k, ptx::Major::k>(rows.scores[0], shared.bias.ones_descriptor(),
                                                           shared.bias.descriptor(k_state.index), false);
    }
    warpgroup_gemm_ss<Element, QTile, KeyTile, kHeadDim>(rows.scores[0], q, k, folds);
    ptx::warpgroup_commit_batch();
  }

  __device__ void start_output() {
    const uint64_t v = ValueTile::descriptor(ptx::shared_address(shared.pipeline.sV[v_state.index]));
    Roles::consumer_wait<Pipeline::kFenced>(shared.pipeline.v_full[v_state.index], v_state.phase);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, ValueTile>(rows.out[0], probabilities, v);
    ptx::warpgroup_commit_batch();
  }

  template <int kMark> __device__ void finish_output() {
    ptx::warpgroup_wait<0, kMark>(rows.out[0], probabilities);
    Roles::consumer_release(shared.pipeline.v_empty[v_state.index]);
    ++v_state;
  }

  // The predecessor of a block: nothing, the last block of the previous tile, or a block of the same tile.
  enum class Predecessor { none, previous_tile, same_tile };

  // `count` blocks of a task are left, including this one. With limit >= 0, the last `limit` may be partial. With
  // limit < 0 (the walk begins with the last columns), a block may be partial while count >= ~limit.
  struct BlocksLeft {
    int count, limit;

    __device__ bool may_be_partial() const { return (count ^ limit >> 31) <= limit; }
  };

  // In the first block of a task, these are read on use: with the sums of the previous task, registers are scarce.
  template <Predecessor kPredecessor> __device__ static BlocksLeft left_of(const Tasks &tasks, const BlocksLeft &left) {
    return kPredecessor == Predecessor::same_tile ? left : blocks_of(tasks.current());
  }

  // Whether a row of the tile may drop a key of this block.
  template <Predecessor kPredecessor> __device__ bool is_partial(const Tasks &tasks, const BlocksLeft &left) const {
    if constexpr (Pipeline::kHasBlockFlags) return shared.pipeline.flags.of(k_state).is_partial();
    return left_of<kPredecessor>(tasks, left).may_be_partial();
  }
  // Whether the block is the last of its task.
  template <Predecessor kPredecessor> __device__ bool is_last(const Tasks &tasks, const BlocksLeft &left) const {
    if constexpr (Pipeline::kHasBlockFlags) return uniform(shared.pipeline.flags.of(k_state).last);
    return left_of<kPredecessor>(tasks, left).count == 1;
  }

  // Returns whether the block is the last of its task.
  template <Predecessor kPredecessor> __device__ bool step(const Tasks &tasks, const BlocksLeft &left) {
    Pipeline &pipeline = shared.pipeline;
    Roles::consumer_wait<Pipeline::kFenced>(pipeline.k_full[k_state.index], k_state.phase);
    Roles::take_turn(group);
    start_scores(tasks);
    if constexpr (kPredecessor != Predecessor::none) start_output();
    Roles::pass_turn(group);
    ptx::warpgroup_wait<kPredecessor == Predecessor::none ? 0 : 1>(rows.scores[0]);
    if (is_last<kPredecessor>(tasks, left)) tasks.release(); // Q of the next tile may be loaded
    if constexpr (kPredecessor == Predecessor::previous_tile) save_sums();
    softmax<kPredecessor>(tasks, is_partial<kPredecessor>(tasks, left));
    Roles::consumer_release(pipeline.k_empty[k_state.index]);
    ++k_state;
    pack_left<Element>(probabilities, rows.scores[0]);
    if constexpr (kPredecessor == Predecessor::previous_tile) write_previous(tasks.previous());
    if constexpr (kPredecessor != Predecessor::same_tile) clear(rows.out);
    if constexpr (Pipeline::kHasBlockFlags) return uniform(shared.pipeline.flags.previous(k_state).last);
    return is_last<kPredecessor>(tasks, left);
  }

  // Turns products into probabilities, and finishes the current product with V.
  //
  // The first block of a tile gives the maximum of its rows. It mostly stays; other blocks search it only if their
  // sums show that it does not. That branch also keeps the wait for the product with V behind the probabilities.
  // Without it, ptxas computes them after the wait.
  template <Predecessor kPredecessor> __device__ void softmax(const Tasks &tasks, bool partial) {
    const auto &facts = shared.pipeline.facts[k_state.index];
    const bool linear = params.bias_factor != 0.0f;
    if (linear) {
      const float scale = params.factors.scale;
      if (partial) rows.drop_columns(facts);
      if constexpr (kPredecessor != Predecessor::same_tile) {
        reference = tasks.current().reference;
        rows.find_maximum(scale, reference);
      }
      float added[2];
      rows.quick_softmax(scale, reference, added);
      if (__all_sync(0xffffffffu, added[0] <= Rows::kSumLimit && added[1] <= Rows::kSumLimit)) {
        if constexpr (kPredecessor != Predecessor::none) finish_output<0>();
#pragma unroll
        for (int half = 0; half < 2; ++half)
          rows.sum[0][half] = kPredecessor == Predecessor::same_tile ? rows.sum[0][half] + added[half] : added[half];
        return;
      }
    }
    if constexpr (kPredecessor != Predecessor::none) finish_output<1>();
    if (linear) recompute_scores(tasks.current());
    rows.finish_scores(facts, partial);
    if constexpr (kPredecessor != Predecessor::same_tile) rows.start_sums();
    const float factors[2] = {rows.softmax(0, 0), rows.softmax(0, 1)};
    if constexpr (kPredecessor == Predecessor::same_tile) {
      rows.rescale(0, 0, factors[0]);
      rows.rescale(0, 1, factors[1]);
    }
  }

  // Recomputes the products of this warp's rows and the keys, without the bias. Q comes from global memory, since its
  // tile may have been released.
  __device__ void recompute_scores(const ForwardTask &task) {
    const fdm_tensor &q = params.p.q;
    const uint32_t sK = ptx::shared_address(shared.pipeline.sK[k_state.index]);
    const int head_dim = int(params.p.head_dim);
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
      warp_add_transposed<Element, KeyTile>(rows.scores[0], left, sK, d / 8);
    }
  }

  __device__ float4 &own_sums() { return shared.sums[ptx::thread_index()]; }
  __device__ void save_sums() { own_sums() = {rows.maximum[0][0], rows.maximum[0][1], rows.sum[0][0], rows.sum[0][1]}; }

  // The epilogue of the previous task, whose sums were put aside.
  __device__ void write_previous(const ForwardTask &task) {
    const float4 sums = own_sums();
    save_sums();
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
    rows.write_aligned();
  }

  // Goes through all tasks.
  __device__ void run() {
    Tasks tasks(shared.tasks);
    while (tasks.wait()) {
      if (blocks_of(tasks.current()).count > 0) {
        run_stream(tasks);
        continue;
      }
      tasks.release();
      rows.task = &tasks.current();
      rows.start();
      rows.write_aligned();
      tasks.advance();
    }
  }

  // Goes through tasks up to one without columns.
  __device__ void run_stream(Tasks &tasks) {
    bool last = step<Predecessor::none>(tasks, {});
    for (;;) {
      BlocksLeft left = blocks_of(tasks.current());
      while (!last) {
        --left.count;
        last = step<Predecessor::same_tile>(tasks, left);
      }
      tasks.advance();
      if (!tasks.wait()) break;
      if (blocks_of(tasks.current()).count == 0) break;
      last = step<Predecessor::previous_tile>(tasks, {});
    }
    start_output();
    finish_output<0>();
    write(tasks.previous());
  }

  __device__ static BlocksLeft blocks_of(const ForwardTask &task) {
    const int count = uniform(task.columns.count), full = uniform(task.columns.full);
    const int blocks = int(uint32_t(count + kColumns - 1) / kColumns);
    const int whole = int(uint32_t(full) / kColumns); // full blocks
    return {blocks, task.columns.walk_begin >= 0 ? ~(whole + 1) : blocks - whole};
  }
};

} // namespace fdm::cuda
