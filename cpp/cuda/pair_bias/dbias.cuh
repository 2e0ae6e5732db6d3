// SPDX-License-Identifier: BSD-3-Clause
// The gradient of a bias with several sources, with mma.sync. A tile of it stays in registers while the block loops
// over the sources, `slots` of them side by side.
//
// Copies of Q, dO, K, V and the statistics of the next step overlap with the products; the bias tile stays in shared
// memory. A thread block has a range of the steps of all tiles. If it shares a tile with other blocks, its sums go to
// a part, and dbias_sum.cu adds the parts.
#pragma once

#include "dbias_tiles.cuh"
#include "launch.cuh"
#include "tile_sizes.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension> struct DbiasConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kWarps = dbias_warps(FDM_TILE_ARCH, kHeadDim), kThreads = 32 * kWarps;
  static constexpr bool kHoldsRows = false;
  static constexpr int kPitch = DbiasSizes::kPitch;
  using Tile = SmemTile<kHeadDim>;
  using Bias = ScoreTile<Element, kThreads, kPitch>;

  static_assert(Tile::kRowBytes == pair_bias_row_bytes(kHeadDim));
  static constexpr DbiasSizes sizes() { return {FDM_TILE_ARCH, kHeadDim}; }
  static constexpr int stage_bytes(const DbiasWork &work) {
    return sizes().stage_bytes(work.slots, work.tile_rows, work.tile_keys);
  }
  static constexpr int panel_bytes(const DbiasWork &work, bool float32_bias, bool mask) {
    return sizes().panel_bytes(work.tile_rows, float32_bias, mask);
  }
  static constexpr int shared_bytes(const DbiasWork &work, bool float32_bias, bool mask) {
    return sizes().shared_bytes(work.slots, work.tile_rows, work.tile_keys, work.stages, float32_bias, mask);
  }
};

template <class Config> struct DbiasShared {
  KeptBits<Config::kWarps> kept;
  SlotTable<Config::kWarps, 4> slots[2]; // of a step and the next: q, dout, k and v
};

template <class Config> struct DbiasBlock {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kHeadDim = Config::kHeadDim, kRowTiles = kDbiasWarpRows / 16, kKeyTiles = kDbiasWarpKeys / 8;
  static constexpr int kTileRoom = 128; // of rows or keys of a tile

  const PairBiasBackward &work;
  const DbiasWork &division;
  DbiasShared<Config> &shared;
  const PairBiasFactors factors;
  char *const memory;
  const int slot, warp_row, warp_key; // the first row and key of the warp in its slot's tile
  const int stage_bytes;
  const bool float32_bias, causal;
  float sums[kRowTiles][kKeyTiles][4];

  __device__ DbiasBlock(const PairBiasBackward &own_work, DbiasShared<Config> &small, char *tiles)
      : work(own_work), division(own_work.dbias), shared(small), factors(own_work.call.p), memory(tiles),
        slot(int(threadIdx.x) / 32 / warps_of_slot()),
        warp_row(dbias_place(division, int(threadIdx.x) / 32 % warps_of_slot()).row),
        warp_key(dbias_place(division, int(threadIdx.x) / 32 % warps_of_slot()).key),
        stage_bytes(Config::stage_bytes(division)), float32_bias(own_work.call.p.bias.dtype == FDM_FLOAT32),
        causal(is_causal(own_work.call.p)) {}

  __device__ int warps_of_slot() const { return Config::kWarps / division.slots; }
  __device__ const fdm_problem &problem() const { return work.call.p; }

  __device__ int stage(int step) const { return division.stages == 1 ? 0 : (step & 1) * stage_bytes; }
  __device__ uint32_t rows_at(int step, int which) const {
    return ptx::shared_address(memory) + stage(step) + which * Tile::bytes(division.slots * division.tile_rows);
  }
  __device__ uint32_t keys_at(int step, int which) const {
    return rows_at(step, 2) + which * Tile::bytes(division.slots * division.tile_keys);
  }
  // The shifts, -lse to base 2, of the rows of all slots, then their deltas.
  __device__ float *statistics_at(int step) const {
    return reinterpret_cast<float *>(memory + stage(step) + stage_bytes -
                                     division.slots * division.tile_rows * 2 * int(sizeof(float)));
  }
  __device__ typename Config::Bias bias_at(int panel) const {
    const int bias = division.stages * stage_bytes +
                     panel * Config::panel_bytes(division, float32_bias, has_query_rows(problem().mask));
    return {work.call, memory, bias, bias + Config::Bias::bytes(division.tile_rows, float32_bias), float32_bias};
  }

  __device__ void set_sources(const DbiasTile &tile, int step) const {
    const int slot_of_thread = int(threadIdx.x);
    if (slot_of_thread >= division.slots) return;
    const fdm_problem &p = problem();
    SlotTable<Config::kWarps, 4> &table = shared.slots[step & 1];
    const Source source = source_of(work.call, tile.plane, int64_t(step) * division.slots + slot_of_thread);
    table.source[slot_of_thread] = source;
    table.set_kept(slot_of_thread, p);
    table.set(0, slot_of_thread, p.q, source.head);
    table.set(1, slot_of_thread, work.a.dout, source.head);
    table.set(2, slot_of_thread, p.k, kv_head_of(p, source.head));
    table.set(3, slot_of_thread, p.v, kv_head_of(p, source.head));
  }

  // Starts the copies of a step. Returns whether a row that this thread loads has a large lse.
  __device__ bool load(const DbiasTile &tile, int step) const {
    const fdm_problem &p = problem();
    const SlotTable<Config::kWarps, 4> &table = shared.slots[step & 1];
    const int first_row = tile.row_tile * division.tile_rows, first_key = tile.key_tile * division.tile_keys;
    const int rows = min(division.tile_rows, int(p.queries) - first_row);
    const int keys = min(division.tile_keys, int(p.keys) - first_key);
    const auto copy = [&](int which, uint32_t base, const fdm_tensor &t, int first, int count, int there) {
      if (Config::kWarps >= 8 && count == kTileRoom && division.slots == 1) // the loop over the rows is unrolled
        return copy_tile_rows<Tile, Config::kThreads>(base, 0, table.first[which][0] + first * t.stride[1], kTileRoom,
                                                      there, t, p.head_dim);
#pragma unroll 1
      for (int n = 0; n < division.slots; ++n)
        copy_tile_rows<Tile, Config::kThreads>(base, n * count, table.first[which][n] + first * t.stride[1], count,
                                               table.source[n].exists ? there : 0, t, p.head_dim);
    };
    copy(0, rows_at(step, 0), p.q, first_row, division.tile_rows, rows);
    copy(1, rows_at(step, 1), work.a.dout, first_row, division.tile_rows, rows);
    copy(2, keys_at(step, 0), p.k, first_key, division.tile_keys, keys);
    copy(3, keys_at(step, 1), p.v, first_key, division.tile_keys, keys);
    bool large = false;
    float *statistics = statistics_at(step);
    const int count = division.slots * division.tile_rows;
    for (int i = threadIdx.x; i < count; i += Config::kThreads) {
      const int n = division.slots == 1 ? 0 : i / division.tile_rows, r = i - n * division.tile_rows;
      RowStatistics row{INFINITY, 0.0f};
      if (table.source[n].exists && r < rows) row = statistics_of(work, table.source[n], first_row + r);
      statistics[i] = -row.lse;
      statistics[count + i] = row.delta;
      large |= is_large(row);
    }
    return large;
  }

  __device__ void load_bias(const DbiasTile &tile, int step) const {
    for (int panel = 0; panel < division.tile_keys / kPairBiasKeys; ++panel)
      bias_at(panel).copy(shared.slots[step & 1].source[0], division.tile_rows, tile.row_tile * division.tile_rows,
                          tile.key_tile * division.tile_keys + panel * kPairBiasKeys);
  }
  __device__ void fold_bias(const DbiasTile &tile, int step) const {
    for (int panel = 0; panel < division.tile_keys / kPairBiasKeys; ++panel)
      bias_at(panel).fold(shared.slots[step & 1].source[0], division.tile_rows, tile.row_tile * division.tile_rows,
                          tile.key_tile * division.tile_keys + panel * kPairBiasKeys);
  }

  __device__ uint32_t fetch_kept(const DbiasTile &tile, int step) const {
    return KeptBits<Config::kWarps>::fetch(problem(), division.slots, division.tile_keys / 32,
                                           tile.key_tile * division.tile_keys, shared.slots[step & 1]);
  }

  // Adds a step of the warp's slot.
  __device__ void add(const DbiasTile &tile, int step, bool exact) {
    const float *statistics = statistics_at(step) + slot * division.tile_rows + warp_row;
    const int count = division.slots * division.tile_rows;
    float shift[kRowTiles][2], delta[kRowTiles][2];
    for_pairs<kRowTiles>([&](int m, int half) {
      shift[m][half] = statistics[16 * m + accumulator_row(half)];
      delta[m][half] = statistics[count + 16 * m + accumulator_row(half)];
    });
    LeftOperand<Element, kHeadDim, kRowTiles, Config::kHoldsRows> queries, dout;
    queries.left = Tile::left(rows_at(step, 0), slot * division.tile_rows + warp_row);
    dout.left = Tile::left(rows_at(step, 1), slot * division.tile_rows + warp_row);
    queries.load();
    dout.load();
    const int behind = int(problem().keys - problem().queries) + tile.row_tile * division.tile_rows + warp_row -
                       tile.key_tile * division.tile_keys - warp_key;
#pragma unroll
    for (int part = 0; part < kDbiasWarpKeys / kSubKeys; ++part) {
      const int key = warp_key + part * kSubKeys;
      const uint32_t word = shared.kept.word[step & 1][slot * (division.tile_keys / 32) + key / 32];
      const int limit = causal ? max(-kDbiasWarpRows, min(behind - part * kSubKeys, kSubKeys)) : kSubKeys;
      if (word == 0 || limit + kDbiasWarpRows <= 0) continue;
      const uint32_t right = Tile::right_rows(0);
      const int row_of_keys = slot * division.tile_keys + key;
      float scores[kRowTiles][kSubTiles][4], gradients[kRowTiles][kSubTiles][4];
      clear(scores);
      queries.multiply(scores, Tile::fragment_address(keys_at(step, 0) + right, row_of_keys, 0));
      add_bias<ScoreRows::queries>(scores, factors, bias_at(key / kPairBiasKeys), warp_row, key % kPairBiasKeys, exact);
      if (word != ~0u || limit < kSubKeys - 1) drop_keys(scores, word, limit);
      start_gradients(scores, gradients, shift, delta);
      dout.multiply(gradients, Tile::fragment_address(keys_at(step, 1) + right, row_of_keys, 0));
      if (exact) drop_pairs(scores, gradients, [&](int m, int, int i) { return shift[m][i / 2]; });
      for_accumulators(scores, [&](int m, int n, int i) {
        sums[m][part * kSubTiles + n][i] =
            fmaf(ptx::exp2_approximate(scores[m][n][i]), gradients[m][n][i], sums[m][part * kSubTiles + n][i]);
      });
    }
  }

  // Adds the steps [begin, end) of a tile.
  __device__ void run(const DbiasTile &tile, int begin, int end, bool exact) {
    clear(sums);
    // If the sources do not share the mask, the bias with the mask folded in differs from step to step.
    const bool stays = work.call.shares_mask;
    bool large = false;
    // The first iteration only starts the copies of the first step.
#pragma unroll 1
    for (int step = begin - 1; step < end; ++step) {
      const bool another = step + 1 < end;
      ptx::cp_async_wait<0>();
      if (another) set_sources(tile, step + 1);
      const bool step_large = __syncthreads_or(large); // this step has arrived; no thread still reads the one before
      if (step < begin || !stays) {
        if (step < begin || step > begin) load_bias(tile, max(step, begin));
        ptx::cp_async_fence();
      }
      if (step >= begin && folds_mask(problem()) && (step == begin || !stays)) {
        if (!stays) {
          ptx::cp_async_wait<0>();
          __syncthreads();
        }
        fold_bias(tile, step);
        __syncthreads();
      }
      if (division.stages > 1 && another) large = load(tile, step + 1);
      ptx::cp_async_fence();
      const uint32_t next_kept = another ? fetch_kept(tile, step + 1) : 0;
      if (step >= begin) add(tile, step, exact || step_large);
      shared.kept.store((step + 1) & 1, division.slots * (division.tile_keys / 32), next_kept);
      if (division.stages == 1 && another) {
        __syncthreads();
        large = load(tile, step + 1);
        ptx::cp_async_fence();
      }
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    sum_slots();
  }

  // Adds the sums of the other slots to those of the first, in slot order.
  __device__ void sum_slots() {
    if (division.slots == 1) return;
    const int threads = warps_of_slot() * 32, thread = int(threadIdx.x) % threads;
    auto *others = reinterpret_cast<float4 *>(memory) + thread;
    constexpr int kSums = kRowTiles * kKeyTiles;
    if (slot > 0)
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const float (&accumulator)[4] = sums[i / kKeyTiles][i % kKeyTiles];
        others[((slot - 1) * kSums + i) * threads] = {accumulator[0], accumulator[1], accumulator[2], accumulator[3]};
      }
    __syncthreads();
    if (slot == 0)
#pragma unroll 1
      for (int n = 0; n < division.slots - 1; ++n)
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const float4 other = others[(n * kSums + i) * threads];
          float (&accumulator)[4] = sums[i / kKeyTiles][i % kKeyTiles];
          accumulator[0] += other.x;
          accumulator[1] += other.y;
          accumulator[2] += other.z;
          accumulator[3] += other.w;
        }
    __syncthreads();
  }

  __device__ bool needs_exact() const {
    return has_nan(sums, [](int, int) { return true; });
  }

  // Writes the tile to dbias, or its sums to `part` if that is not null.
  __device__ void write(const DbiasTile &tile, float *part) const {
    auto *pairs = reinterpret_cast<float2 *>(part ? part : reinterpret_cast<float *>(memory));
    const int threads = dbias_threads(division);
    if (slot == 0)
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles * kKeyTiles; ++i) {
        const float (&accumulator)[4] = sums[i / 2 / kKeyTiles][i / 2 % kKeyTiles];
        pairs[i * threads + int(threadIdx.x)] = {accumulator[i % 2 * 2], accumulator[i % 2 * 2 + 1]};
      }
    if (part) return;
    __syncthreads();
    store_dbias<Element>(work, tile, int(threadIdx.x), Config::kThreads, [&](int i) { return pairs[i]; });
  }

  // Zeroes the tiles after the last one of a row of tiles that has a visible key.
  __device__ void clear_behind(DbiasTile tile) const {
    for (++tile.key_tile; tile.key_tile < division.key_tiles; ++tile.key_tile)
      store_dbias<Element>(work, tile, int(threadIdx.x), Config::kThreads, [](int) { return float2{}; });
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads) dbias_kernel(const __grid_constant__ PairBiasBackward work) {
  if (is_superseded(work)) return;
  extern __shared__ __align__(1024) char dynamic_shared[];
  __shared__ DbiasShared<Config> shared;
  const DbiasWork &division = work.dbias;
  DbiasBlock<Config> block(work, shared, dynamic_shared);
  const int64_t begin = first_step(division, blockIdx.x), end = first_step(division, blockIdx.x + 1);
  for (int64_t step = begin; step < end;) {
    const int64_t number = step / division.groups, first = step - number * division.groups;
    const int64_t past = min64(division.groups, first + end - step);
    const DbiasTile tile(work, number);
    bool exact = false;
    do block.run(tile, int(first), int(past), exact);
    while (!exact && (exact = __syncthreads_or(block.needs_exact())));
    const bool whole = first == 0 && past == division.groups;
    const int64_t slot = 2 * int64_t(blockIdx.x) + (step == begin ? 0 : 1);
    block.write(tile, whole ? nullptr : division.parts + slot * division.tile_rows * division.tile_keys);
    if (past == division.groups && tile.is_last_of_row(work)) block.clear_behind(tile);
    step += past - first;
  }
}

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dbias(const PairBiasBackward &work, cudaStream_t stream) {
  using Config = DbiasConfig<Element, kHeadDim>;
  const fdm_problem &p = work.call.p;
  const int bytes = Config::shared_bytes(work.dbias, p.bias.dtype == FDM_FLOAT32, has_query_rows(p.mask));
  return launch_pair_bias<dbias_kernel<Config>>(work, work.dbias.blocks, Config::kThreads, bytes, stream);
}

} // namespace fdm::cuda
