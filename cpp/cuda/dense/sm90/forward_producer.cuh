// SPDX-License-Identifier: BSD-3-Clause
// The tasks and the shared memory of the dense forward kernel for sm_90, and its producer warpgroup: it copies Q of a task,
// and for each block of keys the bias, and K and V of each source.
#pragma once

#include "../../tile/sm90/bias_operand.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

// kMaskRows: there is a mask of rows.
template <class ElementType, int kHeadDimension, int kSourceCount, bool kWideBias, bool kMaskRows>
struct WideForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kTile = kWideTile;
  static constexpr bool kWide = kWideBias; // the bias is float32
  using Pair = TilePair<kHeadDim>;
  static constexpr int kSources = kSourceCount;
  static constexpr int kStages = kHeadDim == 32 ? 4 : (kHeadDim == 64 ? 3 : 2);
  // The products add -inf for keys that are dropped.
  static constexpr bool kDropsByProduct = kHeadDim == 32;
  // A consumer holds its part of the bias in registers while the sources go by, unless results of 128 columns of the only
  // source fill them. It reads that part while S is under way, unless results of 64 columns of two sources do.
  static constexpr bool kHoldsBias = kHeadDim <= 64, kReadsBiasBeside = kHeadDim == 32;
  // Beside results of 64 columns it holds pairs of 16 bits as they are. With two sources that gains nothing: the compiler
  // keeps what the first has unpacked for the second.
  static constexpr bool kHoldsPairs = !kWide && kHeadDim == 64 && kSources == 1;
  static_assert(kHoldsBias || kSources == 1);
  // Producers have what the sums of consumers leave them.
  using Registers =
      std::conditional_t<kHeadDim == 32 || kHoldsPairs, RoleRegisters<216, 72>,
                         std::conditional_t<kSourceCount == 1, RoleRegisters<224, 56>, RoleRegisters<232, 40>>>;
  // Tiles of 64 columns beside a wide bias leave no room for two, nor do those of 128 beside a mask.
  static constexpr int kQueryStages = kHeadDim >= 64 && (kWide || (kMaskRows && kHeadDim > 64)) ? 1 : 2;
  // Q of two sources, or of one where that has panels of its own.
  static constexpr int kQueryBytes = kSources == 1 && !Pair::kPaired ? Pair::Tile::kBytes : Pair::kBytes;
  // Elements of 16 bits lie so that ldmatrix reads accumulators. Those of 32 bits lie in rows whose chunks of 16 bytes are
  // swizzled, so that the pairs which half a warp reads meet all banks.
  using Bias = SmemTile<kTile, kTile>;
  static constexpr int kBiasBytes = kWide ? kTile * kTile * 4 : Bias::kBytes;
  __device__ static __forceinline__ uint32_t bias_chunk(uint32_t base, int row, int chunk) {
    if constexpr (kWide) return base + row * kTile * 4 + (chunk ^ row % 4 * 2) * 16;
    return Bias::chunk_address(base, row, chunk);
  }
  // Rows of a mask of rows, a byte for each key, begin so many bytes apart that eight of them meet all banks.
  static constexpr bool kMasks = kMaskRows;
  static constexpr int kMaskPitch = kTile + 16;
};

template <class Config> struct WideForwardShared {
  static constexpr int kOddWords = 16;

  alignas(1024) char sQ[Config::kQueryStages][Config::kQueryBytes]; // Q of the sources
  char sKV[Config::kStages][Config::Pair::kBytes];
  char bias[Config::kBiasBytes]; // in registers while the next is copied
  struct None {};
  struct Mask {
    alignas(16) char rows[Config::kTile][Config::kMaskPitch];
  };
  std::conditional_t<Config::kMasks, Mask, None> mask; // beside the bias
  DroppedKeys dropped[Config::kStages];
  // -inf of keys that are dropped.
  std::conditional_t<Config::kDropsByProduct, BiasOperand<typename Config::Element, Config::kTile, Config::kStages>,
                     None>
      drops;
  uint32_t live[Config::kTile / 32]; // of an exact run: keys that a row of the tile keeps
  uint32_t odd[kOddWords];           // a bit for each task that is to be run again, exact; some share one
  uint64_t q_full[Config::kQueryStages], q_empty[Config::kQueryStages];
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint64_t bias_full, bias_empty;

  // All threads of the block call this, before they are synchronized.
  __device__ void init() {
    if constexpr (Config::kDropsByProduct) drops.init();
    if (threadIdx.x > 0) return;
    for (uint32_t &word : odd) word = 0;
    for (int stage = 0; stage < Config::kQueryStages; ++stage) {
      ptx::init_barrier(q_full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(q_empty[stage], Roles::kConsumerThreads);
    }
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
    ptx::init_barrier(bias_full, 2 * Roles::kProducerThreads);
    ptx::init_barrier(bias_empty, Roles::kConsumerThreads);
  }

  // `turn` counts the tasks of this block of threads.
  __device__ bool is_odd(int turn) const { return odd[turn / 32 % kOddWords] >> turn % 32 & 1; }
  __device__ void mark_odd(int turn) { atomicOr(&odd[turn / 32 % kOddWords], 1u << turn % 32); }
};

// Where a role is in each pipeline, from task to task.
template <class Config> struct WideForwardStates {
  PipelineState<Config::kQueryStages> queries;
  PipelineState<Config::kStages> keys;
  PipelineState<1> bias;
};

// The rows and sources of a task, and the blocks of keys of its split.
template <class Config> struct WideForwardTask {
  static constexpr int kSources = Config::kSources;
  static constexpr bool kMasks = Config::kMasks;

  int unit, first_source, first_row, split, begin, end;
  bool last;            // of the splits of its rows
  const uint32_t *live; // of LiveTiles

  __device__ WideForwardTask(const DenseForward &work, int number) {
    const fdm_problem &p = work.call.p;
    // The tiles of rows go fastest: they share K and V. The last, which a causal mask makes the longest, come first.
    // Sources that read the same rows of a mask follow each other.
    const int group = kMasks ? number % work.groups : number / work.row_splits % work.groups;
    const int place = kMasks ? number / work.groups % work.row_splits : number % work.row_splits;
    first_source = group * kSources;
    unit = number / work.row_splits / work.groups;
    int row_tile = work.tiles - 1;
    split = place;
    if (work.splits == 1) {
      row_tile -= place;
      split = 0;
    } else {
      for (int count; split >= (count = splits_of(work, row_tile)); --row_tile) split -= count;
    }
    first_row = row_tile * kWideTile;
    const int blocks = visible_key_tiles(p, row_tile);
    begin = split * work.split_tiles;
    end = min(blocks, begin + work.split_tiles);
    last = end == blocks;
    live = work.live.row(unit, row_tile);
  }
  // A tile of rows has one split even if it sees no key.
  __device__ static int splits_of(const DenseForward &work, int row_tile) {
    return max(1, (visible_key_tiles(work.call.p, row_tile) + work.split_tiles - 1) / work.split_tiles);
  }

  // The first live block from `block` on, or `end`.
  __device__ __forceinline__ int next(int block) const {
    if constexpr (kMasks)
      while (block < end && !LiveTiles::is_live(live, block)) ++block;
    return block;
  }

  // Calls function(task, turn) for the tasks of this block of threads.
  template <class Function> __device__ static void for_each(const DenseForward &work, const Function &function) {
    const fdm_problem &p = work.call.p;
    const int count = int(p.bias.shape[0] * p.bias.shape[1]) * work.groups * work.row_splits;
#pragma unroll 1
    for (int number = int(blockIdx.x), turn = 0; number < count; number += int(gridDim.x), ++turn)
      function(WideForwardTask(work, number), turn);
  }
};

template <class Config> struct WideForwardProducer {
  using Pair = typename Config::Pair;

  using Rows = WideRows<Pair>;

  const DenseForward &work;
  WideForwardShared<Config> &shared;
  const WideForwardTask<Config> &task;
  const SourceWalk first_source;
  const Rows k, v;
  // For each source this thread has its first row of K and V, and its first byte of a mask of keys, where there is one.
  const uint16_t *k_row[Config::kSources], *v_row[Config::kSources];
  const uint8_t *kept[Config::kSources];
  int sources; // that exist
  WideForwardStates<Config> &states;

  __device__ WideForwardProducer(const DenseForward &own_work, WideForwardShared<Config> &memory,
                                 const WideForwardTask<Config> &own_task, WideForwardStates<Config> &own_states)
      : work(own_work), shared(memory), task(own_task),
        first_source(own_work.call, own_task.unit, own_task.first_source),
        k(own_work.call.p.k, own_work.call.p.head_dim, 0), v(own_work.call.p.v, own_work.call.p.head_dim, 0),
        sources(own_work.call.batches * own_work.call.heads - own_task.first_source), states(own_states) {
    const fdm_problem &p = work.call.p;
    SourceWalk source = first_source;
#pragma unroll
    for (int n = 0; n < Config::kSources; ++n, ++source) {
      const int64_t head = kv_head_of(p, source.head);
      k_row[n] = k.row_of(source.batch, head);
      v_row[n] = v.row_of(source.batch, head);
      kept[n] = kept_key(p, source.batch, source.head, own());
    }
  }

  __device__ static int own() { return Roles::producer_thread(); }

  __device__ void load_queries() const {
    const fdm_problem &p = work.call.p;
    const Rows q(p.q, p.head_dim, task.first_row);
    SourceWalk source = first_source;
    auto &state = states.queries;
    Roles::producer_acquire(shared.q_empty[state.index], state.phase);
#pragma unroll 1
    for (int n = 0; n < Config::kSources; ++n, ++source)
      q.copy(shared.sQ[state.index], n, q.row_of(source.batch, source.head),
             __ballot_sync(0xffffffffu, n < sources && task.first_row + own() < p.queries));
    Roles::producer_commit(shared.q_full[state.index]);
    ++state;
  }

  __device__ void load_bias(int block) {
    const fdm_problem &p = work.call.p;
    constexpr int kSize = Config::kWide ? 4 : 2, kAcross = Config::kTile * kSize / 16;
    constexpr int kDown = Roles::kProducerThreads / kAcross;
    const Matrix m = score_matrix(p, p.bias, dense_sequence(p, first_source.batch), first_source.head, kSize);
    const int chunk = own() % kAcross, own_row = own() / kAcross, key = block * Config::kTile;
    const int rows = int(p.queries) - task.first_row;
    const int bytes = max(0, min(16, (int(p.keys) - key) * kSize - chunk * 16));
    const char *elements =
        static_cast<const char *>(m.base) + ((task.first_row + own_row) * m.row + key) * kSize + chunk * 16;
    Roles::producer_acquire(shared.bias_empty, states.bias.phase);
    const uint32_t base = ptx::shared_address(shared.bias);
#pragma unroll 4
    for (int r = own_row; r < Config::kTile; r += kDown) {
      ptx::cp_async_up_to_16(Config::bias_chunk(base, r, chunk), elements, r < rows ? bytes : 0);
      elements += kDown * m.row * kSize;
    }
    if constexpr (Config::kMasks) load_mask(key);
    Roles::producer_commit(shared.bias_full);
    ++states.bias;
  }

  // Copies the bytes of a mask of rows, of the keys from `key` on. There are none where rows and keys do not exist.
  __device__ void load_mask(int key) const {
    const fdm_problem &p = work.call.p;
    constexpr int kAcross = Config::kTile / 16, kDown = Roles::kProducerThreads / kAcross;
    const Matrix m = score_matrix(p, p.mask, dense_sequence(p, first_source.batch), first_source.head, 1);
    const int chunk = own() % kAcross, own_row = own() / kAcross, rows = int(p.queries) - task.first_row;
    const int bytes = max(0, min(16, int(p.keys) - key - chunk * 16));
    const char *kept_chunk = static_cast<const char *>(m.base) + (task.first_row + own_row) * m.row + key + chunk * 16;
    const uint32_t base = ptx::shared_address(shared.mask.rows) + chunk * 16;
#pragma unroll 4
    for (int r = own_row; r < Config::kTile; r += kDown) {
      ptx::cp_async_up_to_16(base + r * Config::kMaskPitch, kept_chunk, r < rows ? bytes : 0);
      kept_chunk += kDown * m.row;
    }
  }

  // Returns the byte of the mask as it lies in memory: not 0 if the source keeps this thread's key of a block.
  __device__ uint8_t fetch_kept(int n, int block) const {
    const fdm_problem &p = work.call.p;
    const int key = block * Config::kTile;
    if (n >= sources || key + own() >= p.keys) return 0;
    return kept[n] ? kept[n][p.mask.shape[3] == 1 ? 0 : key * p.mask.stride[3]] : 1;
  }

  __device__ void load_keys(int n, int block, bool keeps) {
    const fdm_problem &p = work.call.p;
    const int stage = states.keys.index;
    Roles::producer_acquire(shared.empty[stage], states.keys.phase);
    const uint32_t there = shared.dropped[stage].set(keeps);
    if constexpr (Config::kDropsByProduct) shared.drops.drop(stage, own(), !keeps);
    k.copy(shared.sKV[stage], 0, k_row[n] + block * Config::kTile * p.k.stride[1], there);
    v.copy(shared.sKV[stage], 1, v_row[n] + block * Config::kTile * p.v.stride[1], there);
    Roles::producer_commit(shared.full[stage]);
    ++states.keys;
  }

  __device__ void run() {
    load_queries();
    int block = task.next(task.begin);
    uint8_t fetched = fetch_kept(0, block);
#pragma unroll 1
    while (block < task.end) {
      const int after = task.next(block + 1);
      if constexpr (Config::kHoldsBias) load_bias(block);
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) {
        const bool last = n + 1 == Config::kSources;
        const uint8_t next = fetch_kept(last ? 0 : n + 1, last ? after : block);
        load_keys(n, block, fetched != 0);
        fetched = next;
      }
      // The consumers release the bias of the block before late, and K and V need not wait for that.
      if constexpr (!Config::kHoldsBias) load_bias(block);
      block = after;
    }
  }
};

} // namespace fdm::cuda
