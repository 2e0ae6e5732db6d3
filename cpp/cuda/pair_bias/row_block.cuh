// SPDX-License-Identifier: BSD-3-Clause
// The mainloop of the forward pass and dq. A thread block has a row tile of `slots` sources side by side, and loops
// over their keys, kPairBiasKeys at a time. Copies of K, V, the bias and the row mask bytes of the next step overlap
// with the products. Each warp has rows of one source.
#pragma once

#include "scores.cuh"
#include "tile_sizes.cuh"

namespace fdm::cuda {

// kRowTensors tensors have rows of the tile: q, and dout in the backward pass.
template <class ElementType, int kHeadDimension, int kRowTensorCount, class WorkType> struct RowBlockConfig {
  using Element = ElementType;
  using Work = WorkType;
  static constexpr int kHeadDim = kHeadDimension, kRowTensors = kRowTensorCount;
  static constexpr PairBiasTileChoice kChoice =
      kRowTensors == 1 ? pair_bias_forward_tile(kHeadDim) : pair_bias_dq_tile(kHeadDim);
  static constexpr int kWarps = kChoice.warps, kThreads = 32 * kWarps, kBlocks = kChoice.blocks;
  static constexpr int kRowTiles = kChoice.tiles, kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kPitch = RowBlockSizes::kPitch;
  using Tile = SmemTile<kHeadDim>;
  using Bias = ScoreTile<Element, kThreads, kPitch>;
  static_assert(Tile::kRowBytes == pair_bias_row_bytes(kHeadDim));

  static constexpr int kRowBytes = RowBlockSizes{FDM_TILE_ARCH, kHeadDim, kRowTensors}.row_bytes(); // of a tensor
  FDM_MEMBER static RowBlockSizes sizes(const Work &work) {
    const fdm_problem &p = work.call.p;
    return {FDM_TILE_ARCH, kHeadDim, kRowTensors, work.slots, p.bias.dtype == FDM_FLOAT32, has_query_rows(p.mask)};
  }
};

template <class Config> struct RowBlockShared {
  KeptBits<Config::kWarps> kept;
  SlotTable<Config::kWarps, 2 + Config::kRowTensors> slots; // of k, v and the row tensors
};

// The row tile of a thread block, and its split of the keys.
struct RowBlockTask {
  int plane, group, split;
  int first_row;
  int begin, end; // key blocks
};

template <class Config>
__device__ __forceinline__ RowBlockTask row_block_task(const typename Config::Work &work, int splits) {
  const fdm_problem &p = work.call.p;
  // Row tiles vary fastest, because they share K and V. The last come first, because a causal mask makes them the
  // longest.
  int number = int(blockIdx.x);
  const int tile = work.tiles - 1 - number % work.tiles;
  number /= work.tiles;
  RowBlockTask task;
  task.split = number % splits;
  number /= splits;
  task.plane = number / work.groups;
  task.group = number % work.groups;
  const int rows = Config::kRows / work.slots;
  task.first_row = tile * rows;
  const int64_t last_row = min64(int64_t(task.first_row) + rows, p.queries) - 1;
  const int64_t visible = is_causal(p) ? clamp64(last_row + p.keys - p.queries + 1, 0, p.keys) : p.keys;
  const int64_t blocks = ceil_div(visible, kPairBiasKeys);
  task.begin = int(blocks * task.split / splits);
  task.end = int(blocks * (task.split + 1) / splits);
  return task;
}

template <class Config> struct RowBlock {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kHeadDim = Config::kHeadDim, kRowTiles = Config::kRowTiles, kWarpRows = Config::kWarpRows;
  using Scores = float[kRowTiles][kSubTiles][4];

  const typename Config::Work &work;
  RowBlockShared<Config> &shared;
  const PairBiasFactors factors;
  char *const memory;
  const int slots, rows, slot, warp_row; // warp_row: the warp's first row in its source's tile
  const int first_row;
  const int stage_bytes, stages;
  const bool float32_bias, causal;

  __device__ RowBlock(const typename Config::Work &own_work, RowBlockShared<Config> &small, char *tiles, int row)
      : work(own_work), shared(small), factors(own_work.call.p), memory(tiles), slots(own_work.slots),
        rows(Config::kRows / own_work.slots), slot(int(threadIdx.x) / 32 * kWarpRows / rows),
        warp_row(int(threadIdx.x) / 32 * kWarpRows - slot * rows), first_row(row),
        stage_bytes(Config::sizes(own_work).stage_bytes()), stages(Config::sizes(own_work).stages()),
        float32_bias(own_work.call.p.bias.dtype == FDM_FLOAT32), causal(is_causal(own_work.call.p)) {}

  __device__ const fdm_problem &problem() const { return work.call.p; }
  __device__ const Source &source() const { return shared.slots.source[slot]; } // of this warp
  __device__ int row(int m, int half) const { return first_row + warp_row + 16 * m + accumulator_row(half); }
  __device__ bool exists(int m, int half) const { return source().exists && row(m, half) < int(problem().queries); }

  // Shared memory holds the row tensors, then the stages, each with K, V and the bias.
  __device__ uint32_t rows_at(int which) const { return ptx::shared_address(memory) + which * Config::kRowBytes; }
  __device__ uint32_t warp_rows_at(int which) const {
    return Tile::left(rows_at(which), int(threadIdx.x) / 32 * kWarpRows);
  }
  __device__ int stage(int block) const {
    return Config::kRowTensors * Config::kRowBytes + (stages == 1 ? 0 : (block & 1) * stage_bytes);
  }
  __device__ uint32_t keys_at(int block) const { return ptx::shared_address(memory) + stage(block); }
  __device__ uint32_t values_at(int block) const { return keys_at(block) + Tile::bytes(slots * kPairBiasKeys); }
  __device__ typename Config::Bias bias_at(int block) const {
    const int bias = stage(block) + 2 * Tile::bytes(slots * kPairBiasKeys);
    return {work.call, memory, bias, bias + Config::Bias::bytes(rows, float32_bias), float32_bias};
  }

  __device__ void load_rows(int which, const fdm_tensor &t) const {
    const int there = min(rows, int(problem().queries) - first_row);
#pragma unroll 1
    for (int n = 0; n < slots; ++n)
      copy_tile_rows<Tile, Config::kThreads>(rows_at(which), n * rows,
                                             shared.slots.first[2 + which][n] + first_row * t.stride[1], rows,
                                             shared.slots.source[n].exists ? there : 0, t, problem().head_dim);
  }

  // The source addresses of this thread at the first key. They are set if all row tiles are complete.
  static constexpr int kThreadsPerRow = Tile::kRowBytes / 16; // threads that copy a row
  const uint16_t *own_keys = nullptr, *own_values = nullptr;
  const char *own_bias = nullptr;
  bool whole = false; // the addresses are set

  __device__ void find_own_addresses() {
    const fdm_problem &p = problem();
    whole = slots == 1 && work.call.bias_chunks && first_row + rows <= int(p.queries) &&
            kThreadsPerRow * 8 == int(p.head_dim) && !has_query_rows(p.mask);
    if (!whole) return;
    const int row = threadIdx.x / kThreadsPerRow, chunk = threadIdx.x % kThreadsPerRow;
    own_keys = shared.slots.first[0][0] + row * p.k.stride[1] + chunk * 8;
    own_values = shared.slots.first[1][0] + row * p.v.stride[1] + chunk * 8;
    own_bias = Config::Bias::own_chunk(work.call, source(), first_row, float32_bias);
  }
  __device__ void copy_whole(const uint16_t *thread_row, int64_t stride, uint32_t tile, int block) const {
    constexpr int kRowsAtOnce = Config::kThreads / kThreadsPerRow;
    static_assert(kRowsAtOnce % 8 == 0, "the chunks of a thread lie alike in their rows");
    const uint16_t *source = thread_row + block * kPairBiasKeys * stride;
    const uint32_t address = Tile::chunk_address(tile, threadIdx.x / kThreadsPerRow, threadIdx.x % kThreadsPerRow);
#pragma unroll
    for (int r = 0; r < kPairBiasKeys; r += kRowsAtOnce) {
      ptx::cp_async_16(address + r * Tile::kRowBytes, source, true);
      source += kRowsAtOnce * stride;
    }
  }

  __device__ void load_keys(int block) const {
    if (whole && (block + 1) * kPairBiasKeys <= int(problem().keys)) {
      copy_whole(own_keys, problem().k.stride[1], keys_at(block), block);
      copy_whole(own_values, problem().v.stride[1], values_at(block), block);
      bias_at(block).template copy_whole<Config::kRows>(own_bias, block * kPairBiasKeys);
      return;
    }
    const int first_key = block * kPairBiasKeys, there = min(kPairBiasKeys, int(problem().keys) - first_key);
    const auto copy = [&](int which, const fdm_tensor &t, uint32_t tile) {
#pragma unroll 1
      for (int n = 0; n < slots; ++n)
        copy_tile_rows<Tile, Config::kThreads>(tile, n * kPairBiasKeys,
                                               shared.slots.first[which][n] + first_key * t.stride[1], kPairBiasKeys,
                                               shared.slots.source[n].exists ? there : 0, t, problem().head_dim);
    };
    copy(0, problem().k, keys_at(block));
    copy(1, problem().v, values_at(block));
    bias_at(block).copy(shared.slots.source[0], rows, first_row, first_key);
  }
  __device__ uint32_t fetch_kept(int block) const {
    return KeptBits<Config::kWarps>::fetch(problem(), slots, kPairBiasKeys / 32, block * kPairBiasKeys, shared.slots);
  }

  // A warp's view of half a key block.
  struct Half {
    uint32_t word;    // bits of the keys that its source keeps
    int limit;        // row r of the warp sees the keys up to limit + r
    int key;          // the first key, as a row of the K and V tiles
    int key_of_block; // the first key, within the block
    __device__ bool empty() const { return word == 0 || limit + kWarpRows <= 0; }
    __device__ bool full() const { return word == ~0u && limit >= kSubKeys - 1; }
  };
  __device__ Half half_of(int block, int n) const {
    Half half;
    half.word = shared.kept.word[block & 1][slot * (kPairBiasKeys / kSubKeys) + n];
    half.key_of_block = n * kSubKeys;
    half.key = slot * kPairBiasKeys + half.key_of_block;
    half.limit = kSubKeys;
    if (causal) {
      const int first_key = block * kPairBiasKeys + half.key_of_block;
      const int behind = int(problem().keys - problem().queries) + first_row + warp_row - first_key;
      half.limit = max(-kWarpRows, min(behind, kSubKeys));
    }
    return half;
  }
  // Turns products into scores: applies scale, softcap and bias, and sets dropped pairs to -inf.
  __device__ void finish_scores(Scores &scores, int block, const Half &half, bool exact) const {
    add_bias<ScoreRows::queries>(scores, factors, bias_at(block), warp_row, half.key_of_block, exact);
    if (!half.full()) drop_keys(scores, half.word, half.limit);
  }

  // The mainloop over the key blocks [begin, end). start() starts the copies of the rows, and ready() runs once they
  // have arrived. add() runs for each half of a block, skip() for halves that keep no pair.
  template <class Start, class Ready, class Add, class Skip>
  __device__ __forceinline__ void run(int begin, int end, const Start &start, const Ready &ready, const Add &add,
                                      const Skip &skip) {
    // The first iteration only starts the copies of the first block.
#pragma unroll 1
    for (int block = begin - 1; block < end; ++block) {
      ptx::cp_async_wait<0>();
      __syncthreads(); // this block has arrived; no thread still reads the one before
      const bool another = block + 1 < end;
      if (block < begin) {
        find_own_addresses();
        start();
      }
      if (stages > 1 && another) load_keys(block + 1);
      ptx::cp_async_fence();
      const uint32_t next_kept = another ? fetch_kept(block + 1) : 0;
      if (block == begin) ready();
      if (block >= begin && folds_mask(problem())) {
        bias_at(block).fold(shared.slots.source[0], rows, first_row, block * kPairBiasKeys);
        __syncthreads();
      }
#pragma unroll 1
      for (int n = 0; n < kPairBiasKeys / kSubKeys && block >= begin; ++n) {
        const Half half = half_of(block, n);
        if (half.empty())
          skip(block, half);
        else
          add(block, half);
      }
      shared.kept.store((block + 1) & 1, slots * (kPairBiasKeys / 32), next_kept);
      if (stages == 1 && another) {
        __syncthreads();
        load_keys(block + 1);
        ptx::cp_async_fence();
      }
    }
    ptx::cp_async_wait<0>();
  }
};

// Fills in the sources of a task. The caller synchronizes the block afterwards.
template <class Config>
__device__ __forceinline__ void set_slots(RowBlockShared<Config> &shared, const typename Config::Work &work,
                                          const RowBlockTask &task, const fdm_tensor *dout) {
  const int slot = int(threadIdx.x);
  if (slot >= work.slots) return;
  const fdm_problem &p = work.call.p;
  const Source source = source_of(work.call, task.plane, task.group * work.slots + slot);
  shared.slots.source[slot] = source;
  shared.slots.set_kept(slot, p);
  shared.slots.set(0, slot, p.k, kv_head_of(p, source.head));
  shared.slots.set(1, slot, p.v, kv_head_of(p, source.head));
  shared.slots.set(2, slot, p.q, source.head);
  if constexpr (Config::kRowTensors > 1) shared.slots.set(3, slot, *dout, source.head);
}

} // namespace fdm::cuda
