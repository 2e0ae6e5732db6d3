// SPDX-License-Identifier: BSD-3-Clause
// The tasks and the shared memory of the forward kernel of pair biases for sm_90.
#pragma once

#include "../../tile/block_scan.cuh"
#include "../../tile/sm90/bias_operand.cuh"
#include "../../tile/tile_sizes.cuh"
#include "exact_tasks.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

// The part of a task that each of the two consumer warpgroups has. rows: half of its rows. heads: one of two query
// heads that share K and V and the rows of the bias. keys: half of the keys of each block; the results are merged at
// the end. sources: one of two small tiles of at most kSmallTile rows and keys (forward_windows.cuh).
enum class TaskParts { rows, heads, keys, sources };

// Whether the mask has a row for each query: no, yes, or known at run time only.
enum class MaskRows { none, each_query, either };

// kSourceCount: the sources that a consumer loops over for each key block.
template <class ElementType, int kHeadDimension, int kSourceCount, BiasType kBias, MaskRows kMaskRows, TaskParts kParts>
struct PairBiasForwardConfigSm90 {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kTile = kPairBiasTileSm90;
  static constexpr bool kFloat32Bias = kBias == BiasType::float32;
  static constexpr int kBiasSize = kFloat32Bias ? 4 : 2;
  using Pair = TilePair<kHeadDim>;
  static constexpr bool kMasks = kMaskRows != MaskRows::none; // shared memory has room for a row mask
  static constexpr bool kSplitsHeads = kParts == TaskParts::heads, kSplitsKeys = kParts == TaskParts::keys;
  static constexpr bool kSmallTiles = kParts == TaskParts::sources;
  __device__ static bool folds_mask(const fdm_problem &p) {
    return kMaskRows == MaskRows::each_query || (kMaskRows == MaskRows::either && has_query_rows(p.mask));
  }
  static constexpr bool kHalfRows =
      kSplitsHeads || kSplitsKeys || kSmallTiles;               // each consumer warpgroup has all rows of a task
  static constexpr bool kHalfKeys = kSplitsKeys || kSmallTiles; // and half of a stage's keys
  static constexpr bool kSharesWork =
      kMasks || kSplitsHeads || kSplitsKeys; // thread blocks may have equal shares of the work
  static_assert(kSourceCount == 1 || !kSharesWork);
  static constexpr int kSources = kSourceCount,
                       kTaskSources = kSplitsHeads || kSmallTiles ? 2 : kSources; // per consumer, and per task
  static constexpr int kRows = kHalfRows ? kTile / 2 : kTile;                     // of a task
  static constexpr int kOwnKeys = kHalfKeys ? kTile / 2 : kTile;                  // of a key block, per consumer
  static constexpr int kStages = kHeadDim == 32 ? 4 : (kHeadDim == 64 ? 3 : 2);
  // The products themselves add -inf for dropped keys.
  static constexpr bool kDropsByProduct = kHeadDim == 32;
  // A consumer holds its part of the bias in registers for all sources, unless the results of one source with 128
  // columns fill them. It reads that part while S is under way (kReadsBiasBeside) if registers suffice.
  static constexpr bool kHoldsBias = kHeadDim <= 64;
  // With 64 columns and one source it holds 16-bit pairs packed. With two sources that gains nothing: the compiler
  // keeps the values that it unpacks for the first source for the second.
  static constexpr bool kHoldsPairs = !kFloat32Bias && kHeadDim == 64 && kSources == 1;
  static_assert(kHoldsBias || kSources == 1);
  static constexpr bool kReadsBias = !kSmallTiles; // from shared memory, for each key block
  static constexpr bool kReadsBiasBeside = kHeadDim == 32 || (kHoldsPairs && kSharesWork);
  // Producers have the registers that consumers leave. They need more if thread blocks share the work.
  using Registers =
      std::conditional_t<kHeadDim == 32 || kHoldsPairs,
                         std::conditional_t<kSharesWork || kSmallTiles, RoleRegisters<208, 88>, RoleRegisters<216, 72>>,
                         std::conditional_t<kSourceCount == 1, RoleRegisters<224, 56>, RoleRegisters<232, 40>>>;
  // Shared memory has no room for two stages of Q with 64 columns and a float32 bias, nor with 128 columns and a mask
  // or stages of the bias. Q of small tiles has the stages of K and V.
  static constexpr int kQueryStages = kSmallTiles                                                          ? kStages
                                      : kHeadDim >= 64 && (kFloat32Bias || (kSharesWork && kHeadDim > 64)) ? 1
                                                                                                           : 2;
  // Q of one source if it has panels of its own, else of two.
  static constexpr int kQueryBytes = kSources == 1 && !Pair::kPaired ? Pair::Tile::kBytes : Pair::kBytes;
  // 16-bit elements lie as ldmatrix reads accumulators. 32-bit elements lie in rows whose 16-byte chunks are
  // swizzled, so that the pairs that half a warp reads cover all banks.
  using Bias = SmemTile<kTile, kRows>;
  static constexpr int kBiasBytes = kReadsBias ? kRows * kTile * kBiasSize : 16;
  __device__ static __forceinline__ uint32_t bias_chunk(uint32_t base, int row, int chunk) {
    if constexpr (kFloat32Bias) return base + row * kTile * 4 + (chunk ^ row % 4 * 2) * 16;
    return Bias::chunk_address(base, row, chunk);
  }
  // A row mask has a byte per key, and as many stages as the bias: one, or if kSharesWork those of the keys that fit.
  static constexpr int kMaskBytes = kMasks ? kRows * kTile : 0;
  static constexpr int kSmallBytes = (kDropsByProduct ? 14 : 4) * 1024; // upper bound of all else
  static constexpr int kBiasRoom = shared_limit(90) - kSmallBytes - kQueryStages * kQueryBytes - kStages * Pair::kBytes;
  static constexpr int kBiasStageRoom = kBiasRoom / (kBiasBytes + kMaskBytes);
  static constexpr int kBiasStages =
      !kSharesWork || kBiasStageRoom < 2 ? 1 : (kBiasStageRoom < kStages ? kBiasStageRoom : kStages);
};

template <class Config> struct PairBiasForwardSharedSm90 {
  static constexpr int kExactWords = 16;

  alignas(1024) char sQ[Config::kQueryStages][Config::kQueryBytes]; // Q of the sources
  char sKV[Config::kStages][Config::Pair::kBytes];
  char bias[Config::kBiasStages][Config::kBiasBytes];
  struct None {};
  struct Masks {
    char bytes[Config::kBiasStages][Config::kMaskBytes];
  };
  std::conditional_t<Config::kMasks, Masks, None> masks;
  DroppedKeys dropped[Config::kStages];
  // -inf for dropped keys, as an operand of the products.
  std::conditional_t<Config::kDropsByProduct, BiasOperand<typename Config::Element, Config::kTile, Config::kStages>,
                     None>
      drops;
  uint32_t live[Config::kTile / 32]; // in exact runs: bits of the keys that a row of the tile keeps
  struct Parts {
    float2 rows[2][Roles::kConsumerThreads / 2]; // the row maxima and sums of the second consumer warpgroup
  };
  std::conditional_t<Config::kSplitsKeys, Parts, None> parts;
  ExactTasks<kExactWords> exact_tasks;
  uint64_t q_full[Config::kQueryStages], q_empty[Config::kQueryStages];
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint64_t bias_full[Config::kBiasStages], bias_empty[Config::kBiasStages];

  // All threads of the block call this, before they are synchronized.
  __device__ void init(const fdm_problem &p) {
    if constexpr (Config::kDropsByProduct) drops.init();
    if (threadIdx.x > 0) return;
    exact_tasks.init();
    for (int stage = 0; stage < Config::kQueryStages; ++stage) {
      ptx::init_barrier(q_full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(q_empty[stage], Roles::kConsumerThreads);
    }
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
    for (int stage = 0; stage < Config::kBiasStages; ++stage) {
      ptx::init_barrier(bias_full[stage], (Config::folds_mask(p) ? 1 : 2) * Roles::kProducerThreads);
      ptx::init_barrier(bias_empty[stage], Roles::kConsumerThreads);
    }
  }
};

// A role's position in each pipeline, kept from task to task.
template <class Config> struct PairBiasForwardStatesSm90 {
  PipelineState<Config::kQueryStages> queries;
  PipelineState<Config::kStages> keys;
  PipelineState<Config::kBiasStages> bias;
};

// The rows and sources of a task, and the key blocks of its split.
template <class Config> struct PairBiasForwardTaskSm90 {
  int plane, first_source, first_row, split, begin, end;
  bool last;            // of the splits of its rows
  const uint32_t *live; // words of LiveTiles

  // Source n of the task.
  __device__ SourceWalk source(const PairBiasForward &work, int n) const {
    return SourceWalk(work.call, plane, first_source + n);
  }
};

// Finds the live key blocks of a task in order. It reads each word of LiveTiles once, because the mainloop would wait
// for a load from global memory in each step.
template <class Config, class Task = PairBiasForwardTaskSm90<Config>> class LiveBlocks {
  const Task &task;
  int number = -1; // of the word
  uint32_t word = 0;

public:
  __device__ explicit LiveBlocks(const Task &own_task) : task(own_task) {}

  // The first live block from `block` on, or the end of the task.
  __device__ __forceinline__ int next(int block) {
    if (!Config::kMasks || !task.live) return block;
    while (block < task.end) {
      if (block / 32 != number) {
        number = block / 32;
        word = task.live[number];
      }
      const uint32_t left = word >> block % 32;
      if (left) return min(block + __ffs(int(left)) - 1, task.end);
      block = 32 * (number + 1);
    }
    return task.end;
  }
};

// Goes through the tasks of this thread block. All lanes of a warp call its functions.
//
// Without splits a task is a row tile. The last tiles come first, because a causal mask makes them the longest. Row
// tiles vary fastest, because they share K and V. If kSharesWork, sources that read the same rows of the bias follow
// each other instead, and the block order alternates from turn to turn: a thread block with much work in one turn has
// little in the next.
//
// With splits each thread block has an equal share of all steps. A row tile has a step for each key tile, and before
// them a step for the fixed cost of a task. The last tiles come first. The parts of a row tile belong to consecutive
// thread blocks.
template <class Config> class PairBiasForwardWalkSm90 {
  using Task = PairBiasForwardTaskSm90<Config>;

  const PairBiasForward &work;
  const int groups; // of sources, of all planes
  // `turn`: the next turn, for whole tiles. `step`, `past`: the next step of all groups, and the end of this block's
  // share.
  int turn = 0, step = 0, past = 0;
  // The place of that step: a group, a row tile, counted from the last, and a step of the tile.
  int group = 0, place = 0, own_step = 0;

public:
  __device__ explicit PairBiasForwardWalkSm90(const PairBiasForward &own_work)
      : work(own_work), groups(int(own_work.call.p.bias.shape[0] * own_work.call.p.bias.shape[1]) * own_work.groups) {
    if (!has_parts()) return;
    step = all_steps() * int(blockIdx.x) / int(gridDim.x);
    past = all_steps() * int(blockIdx.x + 1) / int(gridDim.x);
    group = step / work.steps;
    own_step = step - group * work.steps;
    find_place();
  }

  // Calls function(task, number) for each task.
  template <class Function> __device__ static void for_each(const PairBiasForward &work, const Function &function) {
    PairBiasForwardWalkSm90 walk(work);
    Task task;
#pragma unroll 1
    for (int number = 0; walk.next(&task); ++number) function(task, number);
  }

private:
  __device__ bool has_parts() const { return Config::kSharesWork && work.splits > 1; }
  __device__ int all_steps() const { return groups * work.steps; }
  __device__ int visible(int own_place) const {
    return visible_key_tiles(work.call.p, work.tiles - 1 - own_place, Config::kRows);
  }

  // Returns false if no task is left.
  __device__ bool next(Task *task) { return has_parts() ? next_part(task) : next_tile(task); }

  __device__ bool next_tile(Task *task) {
    const int blocks = int(gridDim.x), block = int(blockIdx.x);
    const int number = turn * blocks + (Config::kSharesWork && turn % 2 == 1 ? blocks - 1 - block : block);
    if (number >= groups * work.tiles) return false;
    ++turn;
    const int own_place = Config::kSharesWork ? number / groups : number % work.tiles;
    const int keys = visible(own_place);
    *task = make_task(Config::kSharesWork ? number % groups : number / work.tiles, own_place, 0, 0, keys, keys);
    return true;
  }

  __device__ bool next_part(Task *task) {
    bool skipped = true;
    while (skipped && step < past) {
      const int keys = visible(place), steps = min(keys + 1 - own_step, past - step);
      const int begin = max(own_step - 1, 0), end = own_step + steps - 1;
      // Split 0 belongs to the thread block with the first key.
      const int first_key = step - own_step + 1;
      const int split = own_step <= 1 ? 0 : int(blockIdx.x) - ((first_key + 1) * int(gridDim.x) - 1) / all_steps();
      // Tasks without keys are skipped, unless their rows see no key.
      skipped = end <= begin && keys > 0;
      if (!skipped) *task = make_task(group, place, split, begin, end, keys);
      step += steps;
      own_step = 0;
      if (++place == work.tiles) {
        place = 0;
        ++group;
      }
    }
    return !skipped;
  }

  __device__ Task make_task(int own_group, int own_place, int split, int begin, int end, int keys) const {
    const int plane = own_group / work.groups, first_row = (work.tiles - 1 - own_place) * Config::kRows;
    return {plane,       (own_group - plane * work.groups) * Config::kTaskSources, first_row, split, begin, end,
            end == keys, work.live.row(plane, first_row / kPairBiasTileSm90)};
  }

  // Finds the row tile of a group's step, own_step, and makes own_step relative to that tile.
  __device__ void find_place() {
#pragma unroll 1
    for (;; place += 32) {
      const int lane_tile = place + lane_id(), steps = lane_tile < work.tiles ? visible(lane_tile) + 1 : 0;
      const int end = int(warp_inclusive_sum(uint32_t(steps)));
      const uint32_t beyond = __ballot_sync(kAllLanes, end > own_step);
      const int lane = beyond ? __ffs(int(beyond)) - 1 : 31;
      const int before = __shfl_sync(kAllLanes, beyond ? end - steps : end, lane);
      own_step -= before;
      if (!beyond) continue;
      place += lane;
      return;
    }
  }
};

} // namespace fdm::cuda
