// SPDX-License-Identifier: BSD-3-Clause
// dK and dV with a pair bias, with mma.sync. A thread block has a key tile of one KV head, of `slots` sequences side
// by side. It loops over the query heads of the group and their rows, kStepRows at a time.
//
// Products are transposed: an accumulator row is a key. S' = K Q', P' = exp(S' - lse), dV += P' dO, dP' = V dO',
// dS' = P' (dP' - delta), dK += scale dS' Q. So P' and dS' are left operands in the registers that hold them. Copies
// of Q, dO, the statistics and the bias of the next step overlap with the products. Each warp has keys of one
// sequence.
#pragma once

#include "launch.cuh"
#include "statistics.cuh"
#include "tile_sizes.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension> struct PairBiasDkdvConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr PairBiasTileChoice kChoice = pair_bias_dkdv_tile(kHeadDim);
  static constexpr int kWarps = kChoice.warps, kThreads = 32 * kWarps, kBlocks = kChoice.blocks;
  static constexpr int kKeyTiles = kChoice.tiles, kWarpKeys = 16 * kKeyTiles, kKeys = kWarps * kWarpKeys;
  static constexpr bool kHoldsKeys = false; // K and V in registers
  static constexpr int kSubRows = kHeadDim <= 32 ? 16 : kHeadDim <= 64 ? 32 : 16;
  static constexpr int kPitch = KeyTileSizes::kPitch;
  using Tile = SmemTile<kHeadDim>;
  using Bias = ScoreTile<Element, kThreads, kPitch>;

  static_assert(Tile::kRowBytes == pair_bias_row_bytes(kHeadDim));
  static constexpr int kKeyBytes = KeyTileSizes{FDM_TILE_ARCH, kHeadDim}.key_bytes(); // of K or V
  FDM_MEMBER static KeyTileSizes sizes(const PairBiasBackward &work) {
    const fdm_problem &p = work.call.p;
    return {FDM_TILE_ARCH, kHeadDim, work.slots, p.bias.dtype == FDM_FLOAT32, has_query_rows(p.mask)};
  }
};

template <class Config> struct PairBiasDkdvShared {
  SlotTable<Config::kWarps, 2> slots; // of k and v
};

template <class Config> struct PairBiasDkdvBlock {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kHeadDim = Config::kHeadDim, kKeyTiles = Config::kKeyTiles, kWarpKeys = Config::kWarpKeys;
  static constexpr int kSubRows = Config::kSubRows, kRowTiles = kSubRows / 8;
  using Scores = float[kKeyTiles][kRowTiles][4];

  const PairBiasBackward &work;
  PairBiasDkdvShared<Config> &shared;
  const PairBiasFactors factors;
  char *const memory;
  const int slots, keys, slot, warp_key;           // warp_key: the warp's first key in its sequence's tile
  const int first_key, kv_head, first_tile, tiles; // tiles of kStepRows rows of a query head
  const int group, stage_bytes, stages, panel_bytes;
  // Query heads of the group have masks of their own. Otherwise write() zeroes the sums of dropped keys.
  const bool drops_keys;
  const bool float32_bias, causal;
  LeftOperand<Element, kHeadDim, kKeyTiles, Config::kHoldsKeys> key_operand, value_operand;
  uint32_t kept = 0; // bit 2 m + half: this thread's key of that accumulator row is kept
  float dk[kKeyTiles][kHeadDim / 8][4], dv[kKeyTiles][kHeadDim / 8][4];

  __device__ PairBiasDkdvBlock(const PairBiasBackward &own_work, PairBiasDkdvShared<Config> &small, char *tile_memory,
                               int key, int own_kv_head, int own_first_tile)
      : work(own_work), shared(small), factors(own_work.call.p), memory(tile_memory), slots(own_work.slots),
        keys(Config::kKeys / own_work.slots), slot(int(threadIdx.x) / 32 * kWarpKeys / keys),
        warp_key(int(threadIdx.x) / 32 * kWarpKeys - slot * keys), first_key(key), kv_head(own_kv_head),
        first_tile(own_first_tile), tiles(int(ceil_div(own_work.call.p.queries, kStepRows)) - own_first_tile),
        group(int(group_size(own_work.call.p))), stage_bytes(Config::sizes(own_work).stage_bytes()),
        stages(Config::sizes(own_work).stages()), panel_bytes(Config::sizes(own_work).panel_bytes()),
        drops_keys(mask_kind(own_work.call.p) == FDM_MASK_KEYS &&
                   own_work.call.p.mask.shape[1] > own_work.call.p.kv_heads),
        float32_bias(own_work.call.p.bias.dtype == FDM_FLOAT32), causal(is_causal(own_work.call.p)) {}

  __device__ const fdm_problem &problem() const { return work.call.p; }
  __device__ const Source &source() const { return shared.slots.source[slot]; }
  __device__ int key(int m, int half) const { return first_key + warp_key + 16 * m + accumulator_row(half); }
  __device__ bool exists(int m, int half) const { return source().exists && key(m, half) < int(problem().keys); }

  struct Step {
    int head;      // of the group
    int first_row; // of its tile
  };
  __device__ Step step_of(int number) const {
    const int head = group == 1 ? 0 : number / tiles;
    return {head, (first_tile + number - head * tiles) * kStepRows};
  }
  __device__ int query_head(const Step &step) const { return kv_head * group + step.head; }

  __device__ KeyTileSizes sizes() const {
    return {FDM_TILE_ARCH, kHeadDim, slots, float32_bias, has_query_rows(problem().mask)};
  }
  // Shared memory holds K and V, then the stages, each with Q, dO, the bias and the statistics.
  __device__ uint32_t keys_at(int which) const { return ptx::shared_address(memory) + which * Config::kKeyBytes; }
  __device__ int stage(int number) const {
    return 2 * Config::kKeyBytes + (stages == 1 ? 0 : (number & 1) * stage_bytes);
  }
  __device__ uint32_t rows_at(int number, int which) const {
    return ptx::shared_address(memory) + stage(number) + which * Tile::bytes(slots * kStepRows);
  }
  __device__ typename Config::Bias bias_at(int number, int panel) const {
    const int bias = stage(number) + 2 * Tile::bytes(slots * kStepRows) + panel * panel_bytes;
    return {work.call, memory, bias, bias + Config::Bias::bytes(kStepRows, float32_bias), float32_bias};
  }
  // The statistics of each slot are the shifts of its rows, -lse to base 2, then their deltas.
  __device__ float *statistics_at(int number) const {
    return reinterpret_cast<float *>(memory + stage(number) + stage_bytes - sizes().statistics_bytes());
  }

  __device__ void load_keys() const {
    const int there = min(keys, int(problem().keys) - first_key);
    const auto copy = [&](int which, const fdm_tensor &t) {
#pragma unroll 1
      for (int n = 0; n < slots; ++n)
        copy_tile_rows<Tile, Config::kThreads>(keys_at(which), n * keys,
                                               shared.slots.first[which][n] + first_key * t.stride[1], keys,
                                               shared.slots.source[n].exists ? there : 0, t, problem().head_dim);
    };
    copy(0, problem().k);
    copy(1, problem().v);
  }

  // Starts the copies of a step. Returns whether a row that this thread loads has a large lse.
  __device__ bool load(int number) const {
    const fdm_problem &p = problem();
    const Step step = step_of(number);
    const int there = min(kStepRows, int(p.queries) - step.first_row);
    const int head = query_head(step);
    const auto copy = [&](int which, const fdm_tensor &t) {
      const auto *first = static_cast<const uint16_t *>(t.data) + step.first_row * t.stride[1] + head * t.stride[2];
#pragma unroll 1
      for (int n = 0; n < slots; ++n) {
        const Source &source = shared.slots.source[n];
        copy_tile_rows<Tile, Config::kThreads>(rows_at(number, which), n * kStepRows,
                                               first + source.batch * t.stride[0], kStepRows, source.exists ? there : 0,
                                               t, p.head_dim);
      }
    };
    copy(0, p.q);
    copy(1, work.a.dout);
    bool large = false;
    float *statistics = statistics_at(number);
    for (int i = threadIdx.x; i < slots * kStepRows; i += Config::kThreads) {
      const int n = i / kStepRows, r = i % kStepRows;
      RowStatistics row{INFINITY, 0.0f};
      const Source &source = shared.slots.source[n];
      if (source.exists && r < there) row = statistics_of(work, {source.batch, head, true}, step.first_row + r);
      statistics[2 * kStepRows * n + r] = -row.lse;
      statistics[2 * kStepRows * n + kStepRows + r] = row.delta;
      large |= is_large(row);
    }
#pragma unroll 1
    for (int panel = 0; panel < sizes().panels(); ++panel)
      bias_at(number, panel)
          .copy({shared.slots.source[0].batch, head, true}, kStepRows, step.first_row,
                first_key + panel * kPairBiasKeys);
    return large;
  }

  __device__ void find_kept(int head) {
    const fdm_problem &p = problem();
    kept = 0;
    for_pairs<kKeyTiles>([&](int m, int half) {
      bool keeps = exists(m, half);
      if (keeps && mask_kind(p) == FDM_MASK_KEYS) {
        const Matrix mask = score_matrix(p, p.mask, pair_bias_sequence(p, source().batch), head, 1);
        keeps = static_cast<const uint8_t *>(mask.base)[key(m, half) * mask.col] != 0;
      }
      kept |= uint32_t(keeps) << (2 * m + half);
    });
  }

  // Adds a part of a step: kSubRows rows of its tile from `row` on.
  __device__ void add(int number, const Step &step, int row, bool exact) {
    const int behind = int(problem().keys - problem().queries) + step.first_row + row; // the last key its row 0 sees
    const int own_first = first_key + warp_key;
    if (causal && behind + kSubRows <= own_first) return;
    const int row_of_tile = slot * kStepRows + row;
    const uint32_t queries = Tile::fragment_address(Tile::right_rows(rows_at(number, 0)), row_of_tile, 0);
    Scores scores, gradients;
    clear(scores);
    key_operand.multiply(scores, queries);
    add_bias<ScoreRows::keys>(scores, factors, bias_at(number, warp_key / kPairBiasKeys), row, warp_key % kPairBiasKeys,
                              exact);
    if (drops_keys) drop_keys_of_head(scores);
    if (causal && behind < own_first + kWarpKeys - 1) drop_unseen(scores, behind - own_first);
    const float *statistics = statistics_at(number) + 2 * kStepRows * slot + row + accumulator_column();
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float2 shift = *reinterpret_cast<const float2 *>(statistics + 8 * n);
      const float2 delta = *reinterpret_cast<const float2 *>(statistics + kStepRows + 8 * n);
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[m][n][i] = fmaf(scores[m][n][i], kLog2E, i % 2 ? shift.y : shift.x);
          gradients[m][n][i] = i % 2 ? -delta.y : -delta.x;
        }
    }
    value_operand.multiply(gradients, Tile::fragment_address(Tile::right_rows(rows_at(number, 1)), row_of_tile, 0));
    uint32_t live = 0;
    if (exact) {
      drop_pairs(scores, gradients, [&](int, int n, int i) { return statistics[8 * n + i % 2]; });
      live = live_columns(scores, -INFINITY, [&](int m, int half) { return matters(m, half); });
    }
    for_accumulators(scores, [&](int m, int n, int i) {
      scores[m][n][i] = ptx::exp2_approximate(scores[m][n][i]);
      gradients[m][n][i] *= scores[m][n][i];
    });
    const uint32_t columns = Tile::fragment_address(Tile::right_columns(rows_at(number, 0)), row_of_tile, 0);
    const uint32_t dout = Tile::fragment_address(Tile::right_columns(rows_at(number, 1)), row_of_tile, 0);
    if (exact)
      gemm_rs_live<Element, kHeadDim>(dv, scores, dout, live);
    else
      gemm_rs<Element, kHeadDim>(dv, scores, dout);
    if (factors.cap > 0) {
      clear(scores);
      key_operand.multiply(scores, queries);
      multiply_slopes(gradients, scores, factors);
    }
    if (exact)
      gemm_rs_live<Element, kHeadDim>(dk, gradients, columns, live);
    else
      gemm_rs<Element, kHeadDim>(dk, gradients, columns);
  }

  // Sets the scores of dropped keys to -inf.
  __device__ void drop_keys_of_head(Scores &scores) const {
    for_pairs<kKeyTiles>([&](int m, int half) {
      if (!(kept >> (2 * m + half) & 1))
        for_pairs<kRowTiles>([&](int n, int i) { scores[m][n][2 * half + i] = -INFINITY; });
    });
  }
  // The same for keys beyond the causal limit: row r sees the warp's keys up to `limit` + r.
  __device__ void drop_unseen(Scores &scores, int limit) const {
    for_pairs<kKeyTiles>([&](int m, int half) {
      const int first =
          16 * m + accumulator_row(half) - limit - accumulator_column(); // the first row that sees the key
      for_pairs<kRowTiles>([&](int n, int i) {
        if (8 * n + i < first) scores[m][n][2 * half + i] = -INFINITY;
      });
    });
  }

  __device__ void step_of_rows(int number, bool exact) {
    const Step step = step_of(number);
    if (number == 0) {
      key_operand.load();
      value_operand.load();
    }
    if (number == 0 || (drops_keys && step.first_row == first_tile * kStepRows)) find_kept(query_head(step));
    if (folds_mask(problem())) {
      for (int panel = 0; panel < sizes().panels(); ++panel)
        bias_at(number, panel)
            .fold({shared.slots.source[0].batch, query_head(step), true}, kStepRows, step.first_row,
                  first_key + panel * kPairBiasKeys);
      __syncthreads();
    }
#pragma unroll 1
    for (int row = 0; row < kStepRows; row += kSubRows) add(number, step, row, exact);
  }

  __device__ void run(bool exact) {
    const int steps = tiles * group;
    clear(dk);
    clear(dv);
    const int first = int(threadIdx.x) / 32 * kWarpKeys;
    key_operand.left = Tile::left(keys_at(0), first);
    value_operand.left = Tile::left(keys_at(1), first);
    bool large = false;
    // The first iteration only starts the copies of K, V and the first step.
#pragma unroll 1
    for (int number = -1; number < steps; ++number) {
      ptx::cp_async_wait<0>();
      const bool step_large = __syncthreads_or(large); // this step has arrived; no thread still reads the one before
      const bool another = number + 1 < steps;
      if (number < 0) load_keys();
      if (stages > 1 && another) large = load(number + 1);
      ptx::cp_async_fence();
      if (number >= 0) step_of_rows(number, exact || step_large);
      if (stages == 1 && another) {
        __syncthreads();
        large = load(number + 1);
        ptx::cp_async_fence();
      }
    }
    ptx::cp_async_wait<0>();
  }

  __device__ bool needs_exact() const {
    const auto row_matters = [&](int m, int half) { return matters(m, half); };
    return has_nan(dk, row_matters) || has_nan(dv, row_matters);
  }

  // Whether the sums of a key are results. write() zeroes the others.
  __device__ bool matters(int m, int half) const {
    return exists(m, half) && (drops_keys || (kept >> (2 * m + half) & 1));
  }

  __device__ void write() {
    for_pairs<kKeyTiles>([&](int m, int half) {
      if (!matters(m, half))
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d)
          dk[m][d][2 * half] = dk[m][d][2 * half + 1] = dv[m][d][2 * half] = dv[m][d][2 * half + 1] = 0.0f;
    });
    const auto write_to = [&](const fdm_tensor &t, const float (&sums)[kKeyTiles][kHeadDim / 8][4], float factor) {
      if (!present(t)) return;
      const int64_t base = source().batch * t.stride[0] + kv_head * t.stride[2];
      for_pairs<kKeyTiles>([&](int m, int half) {
        write_row(static_cast<Element *>(t.data) + base + key(m, half) * t.stride[1], t.stride[3],
                  int(problem().head_dim), sums[m], half, factor, exists(m, half));
      });
    };
    write_to(work.a.dk, dk, problem().scale);
    write_to(work.a.dv, dv, 1.0f);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    pair_bias_dkdv_kernel(const __grid_constant__ PairBiasBackward work) {
  if (is_superseded(work)) return;
  extern __shared__ __align__(1024) char dynamic_shared[];
  __shared__ PairBiasDkdvShared<Config> shared;
  const fdm_problem &p = work.call.p;
  // Key tiles vary fastest, because they share Q and dO. A causal mask makes the first the longest.
  int number = int(blockIdx.x);
  const int tile = number % work.tiles;
  number /= work.tiles;
  const int kv_head = number % int(p.kv_heads), group = number / int(p.kv_heads);
  const int first_key = tile * (Config::kKeys / work.slots);
  const int64_t first_row = is_causal(p) ? clamp64(first_key - (p.keys - p.queries), 0, p.queries) : 0;
  if (int(threadIdx.x) < work.slots) {
    const int slot = int(threadIdx.x), batch = group * work.slots + slot;
    shared.slots.source[slot] = {batch, kv_head * group_size(p), batch < p.batch};
    shared.slots.set(0, slot, p.k, kv_head);
    shared.slots.set(1, slot, p.v, kv_head);
  }
  __syncthreads();
  PairBiasDkdvBlock<Config> block(work, shared, dynamic_shared, first_key, kv_head, int(first_row / kStepRows));
  bool exact = false;
  do block.run(exact);
  while (!exact && (exact = __syncthreads_or(block.needs_exact())));
  block.write();
}

template <class Element, int kHeadDim>
cudaError_t launch_pair_bias_dkdv(const PairBiasBackward &work, cudaStream_t stream) {
  using Config = PairBiasDkdvConfig<Element, kHeadDim>;
  return launch_pair_bias<pair_bias_dkdv_kernel<Config>>(work, work.call.p.kv_heads * work.groups * work.tiles,
                                                         Config::kThreads, Config::sizes(work).shared_bytes(), stream);
}

} // namespace fdm::cuda
