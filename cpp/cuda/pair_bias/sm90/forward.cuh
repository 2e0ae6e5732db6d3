// SPDX-License-Identifier: BSD-3-Clause
// Forward pass with a pair bias, with Hopper's wgmma, for several sources of a bias at a time.
//
// The kernel is persistent. A task has 128 rows of kSources sources, 64 per consumer warpgroup (TaskParts has other
// divisions). For each 128 keys, a warpgroup loads its part of the bias into registers and loops over the sources:
// S = Q K', the softmax, O += P V. So the bias is read once for all sources. A producer warpgroup copies Q, the bias,
// and K and V of each source into pipeline stages. It runs ahead by these stages, so the first tiles of the next task
// arrive while the results of one are written.
#pragma once

#include "../../tile/sm90/products.cuh"
#include "forward_producer.cuh"
#include "forward_rows.cuh"
#include "forward_windows.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class Config> struct PairBiasForwardConsumerSm90 {
  using Element = typename Config::Element;
  using Tile = typename Config::Pair::Tile;
  using Pair = typename Config::Pair;
  using Task = ForwardTaskOf<Config>;
  static constexpr int kTiles = Config::kOwnKeys / 8, kOutTiles = Config::kHeadDim / 8, kSources = Config::kSources;
  static constexpr int kExactBarrier = 4, kMergeBarrier = 5;

  const PairBiasForward &work;
  PairBiasForwardSharedSm90<Config> &shared;
  const Task &task;
  PairBiasForwardStatesSm90<Config> &states;
  const int own_key; // this warpgroup's first key in a block
  PairBiasSoftmax<1, kTiles> softmax[kSources];
  float out[kSources][1][kOutTiles][4];
  using Scores = float[kTiles][4];
  using Pairs = uint32_t[kTiles / 2][4];
  struct None {};
  using Bias = std::conditional_t<Config::kHoldsPairs, Pairs, std::conditional_t<Config::kHoldsBias, Scores, None>>;
  Bias &bias; // in registers

  __device__ PairBiasForwardConsumerSm90(const PairBiasForward &own_work, PairBiasForwardSharedSm90<Config> &memory,
                                         const Task &own_task, PairBiasForwardStatesSm90<Config> &own_states,
                                         Bias &own_bias)
      : work(own_work), shared(memory), task(own_task), states(own_states),
        own_key(Config::kHalfKeys ? Config::kOwnKeys * Roles::consumer_group() : 0), bias(own_bias) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  // The first row of this warp in a tile of the bias, and the first source of a task that its warpgroup has.
  __device__ static int bias_row() { return 16 * (Config::kRows < Config::kTile ? warp() % 4 : warp()); }
  __device__ static int own_source() {
    return Config::kSplitsHeads || Config::kSmallTiles ? Roles::consumer_group() : 0;
  }
  // With small tiles, Q has the stage of K and V.
  __device__ int query_stage() const { return Config::kSmallTiles ? states.keys.index : states.queries.index; }
  __device__ Source source(int n) const {
    return source_of(work.call, task.plane, task.first_source + own_source() + n);
  }
  __device__ int row(int half) const { return task.first_row + bias_row() + accumulator_row(half); }
  __device__ bool exists(int n, int half) const { return source(n).exists && row(half) < work.call.p.queries; }

  // Loads this thread's part of a 16-bit bias for two tiles of 8 keys, 2 * k and 2 * k + 1.
  __device__ void load_pairs(int k, uint32_t (&pairs)[4]) const {
    ptx::ldmatrix(pairs,
                  Config::bias_chunk(ptx::shared_address(shared.bias[states.bias.index]), bias_row() + threadIdx.x % 16,
                                     own_key / 8 + 2 * k + threadIdx.x % 32 / 16));
  }
  __device__ static void unpack_pairs(const uint32_t (&pairs)[4], float (&low)[4], float (&high)[4]) {
    ptx::unpack<Element>(pairs[0], low[0], low[1]);
    ptx::unpack<Element>(pairs[1], low[2], low[3]);
    ptx::unpack<Element>(pairs[2], high[0], high[1]);
    ptx::unpack<Element>(pairs[3], high[2], high[3]);
  }

  // Loads this thread's part of the bias, of either type, for the same two tiles.
  __device__ void load_bias(int k, float (&low)[4], float (&high)[4]) const {
    if constexpr (Config::kFloat32Bias) {
      const auto pair_of = [&](int half, int n) {
        const int pair = threadIdx.x % 4;
        const uint32_t place =
            Config::bias_chunk(0, bias_row() + accumulator_row(half), own_key / 4 + 2 * n + pair / 2);
        return *reinterpret_cast<const float2 *>(shared.bias[states.bias.index] + place + pair % 2 * 8);
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 first = pair_of(half, 2 * k), second = pair_of(half, 2 * k + 1);
        low[2 * half] = first.x;
        low[2 * half + 1] = first.y;
        high[2 * half] = second.x;
        high[2 * half + 1] = second.y;
      }
    } else {
      uint32_t pairs[4];
      load_pairs(k, pairs);
      unpack_pairs(pairs, low, high);
    }
  }
  __device__ void wait_for_bias() const {
    Roles::consumer_wait<true>(shared.bias_full[states.bias.index], states.bias.phase);
  }
  __device__ void release_bias() {
    ptx::arrive(shared.bias_empty[states.bias.index]);
    ++states.bias;
  }
  __device__ void read_bias() {
    wait_for_bias();
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) {
      if constexpr (Config::kHoldsPairs)
        load_pairs(k, bias[k]);
      else
        load_bias(k, bias[2 * k], bias[2 * k + 1]);
    }
    release_bias();
  }

  // Turns products into scores with their part of the bias.
  template <bool kExact> __device__ void add_bias(float (&scores)[4], const float (&column_bias)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float score = fmaf(scores[i], work.call.p.scale, column_bias[i]);
      scores[i] = !kExact ? score : (column_bias[i] == -INFINITY ? -INFINITY : ptx::max_or_nan(score, kLowestBias));
    }
  }

  // Turns products into scores: -inf for dropped pairs.
  template <bool kExact> __device__ void finish_scores(float (&scores)[kTiles][4], int block) {
    if constexpr (Config::kHoldsPairs) {
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
        float low[4], high[4];
        unpack_pairs(bias[k], low, high);
        add_bias<kExact>(scores[2 * k], low);
        add_bias<kExact>(scores[2 * k + 1], high);
      }
    } else if constexpr (Config::kHoldsBias) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) add_bias<kExact>(scores[n], bias[n]);
    } else {
      wait_for_bias();
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
        float low[4], high[4];
        load_bias(k, low, high);
        add_bias<kExact>(scores[2 * k], low);
        add_bias<kExact>(scores[2 * k + 1], high);
      }
      release_bias();
    }
    const DroppedKeys &dropped = shared.dropped[states.keys.index];
    if ((!Config::kDropsByProduct || kExact) && dropped.any())
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float drop[2];
        dropped.read(own_key / 8 + n, drop);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores[n][i] = kExact && drop[i % 2] != 0.0f ? drop[i % 2] : scores[n][i] + drop[i % 2];
      }
    if (Config::kSmallTiles || !is_causal(work.call.p)) return; // the bias of small tiles includes it
    const int limit =
        int(work.call.p.keys - work.call.p.queries) + task.first_row + bias_row() - (block * Config::kTile + own_key);
    if (limit >= Config::kOwnKeys - 1) return;
    for_accumulators(scores, [&](int n, int i) {
      if (8 * n + accumulator_column() + i % 2 > limit + accumulator_row(i / 2)) scores[n][i] = -INFINITY;
    });
  }

  // Zeroes V of keys that no row of the tile keeps: 0 times NaN is NaN.
  __device__ void clear_dead_values(const float (&scores)[1][kTiles][4], int n) {
    // With small tiles each warpgroup has keys of its own.
    constexpr int kSourceThreads = Roles::kConsumerThreads / (Config::kSmallTiles ? 2 : 1),
                  kKeys = Config::kTile / (Config::kSmallTiles ? 2 : 1);
    const int first_key = Config::kSmallTiles ? own_key : 0,
              thread = Config::kSmallTiles ? int(threadIdx.x) % kSourceThreads : int(threadIdx.x);
    const auto sync = [] {
      ptx::sync_threads<kSourceThreads>(kExactBarrier + (Config::kSmallTiles ? Roles::consumer_group() : 0));
    };
    if (thread < kKeys / 32) shared.live[first_key / 32 + thread] = 0;
    sync();
    const uint32_t columns = live_columns(scores, -INFINITY, [&](int, int half) { return exists(n, half); });
    const int first_column = own_key + accumulator_column();
    if (threadIdx.x % 32 < 4)
#pragma unroll 1
      for (int bit = 0; bit < 32; ++bit) {
        const int column = first_column + bit / 2 * 8 + bit % 2;
        if (columns >> bit & 1) atomicOr(&shared.live[column / 32], 1u << column % 32);
      }
    sync();
    const int key = first_key + thread;
    if (thread < kKeys && !(shared.live[key / 32] >> key % 32 & 1))
#pragma unroll 1
      for (int chunk = 0; chunk < Config::kHeadDim / 8; ++chunk)
        for (int word = 0; word < 4; ++word)
          ptx::store_shared(
              Pair::chunk_address(ptx::shared_address(shared.sKV[states.keys.index]), 1, key, chunk) + 4 * word, 0);
    ptx::fence_async_proxy();
    sync();
  }

  template <bool kExact> __device__ void step(int block, int n) {
    const int stage = states.keys.index;
    if constexpr (Config::kReadsBias && Config::kHoldsBias && !Config::kReadsBiasBeside)
      if (n == 0) read_bias();
    Roles::consumer_wait(shared.full[stage], states.keys.phase);
    const uint64_t half = Tile::offset(64, 0) * Roles::consumer_group(), own_keys = Config::kHalfKeys ? half : 0;
    const uint64_t keys = Pair::descriptor(ptx::shared_address(shared.sKV[stage]), 0) + own_keys;
    const uint64_t values = Pair::descriptor(ptx::shared_address(shared.sKV[stage]), 1) + own_keys;
    const uint64_t queries =
        Pair::descriptor(ptx::shared_address(shared.sQ[query_stage()]), n) + (Config::kSplitsKeys ? 0 : half);
    float scores[1][kTiles][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(scores[0], queries, keys, false);
    if constexpr (Config::kDropsByProduct)
      ptx::wgmma_ss<Element, ptx::Major::k, ptx::Major::k>(scores[0], shared.drops.ones_descriptor(),
                                                           shared.drops.descriptor(stage, own_key), true);
    ptx::warpgroup_commit_batch();
    if constexpr (Config::kReadsBias && Config::kReadsBiasBeside)
      if (n == 0) read_bias();
    ptx::warpgroup_wait<0>(scores[0]);
    finish_scores<kExact>(scores[0], block);
    if constexpr (kExact) clear_dead_values(scores, n);
    softmax[n].apply(scores, out[n], kExact);
    uint32_t p[kTiles / 2][4];
    pack_left<Element>(p, scores[0]);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, Tile>(out[n][0], p, values);
    ptx::warpgroup_commit_batch();
    if constexpr (Config::kSmallTiles) softmax[n].finish(); // this is the only block
    ptx::warpgroup_wait<0>(out[n][0], p);
    Roles::consumer_release(shared.empty[stage]);
    ++states.keys;
  }

  // Returns whether a result needs an exact run.
  template <bool kExact> __device__ bool run() {
#pragma unroll
    for (int n = 0; n < kSources; ++n) {
      softmax[n].start();
      clear(out[n]);
    }
    if constexpr (!Config::kSmallTiles) Roles::consumer_wait(shared.q_full[states.queries.index], states.queries.phase);
    LiveBlocks<Config, Task> live(task);
#pragma unroll 1
    for (int block = live.next(task.begin); block < task.end; block = live.next(block + 1))
#pragma unroll
      for (int n = 0; n < kSources; ++n) step<kExact>(block, n);
    if constexpr (!Config::kSmallTiles) {
#pragma unroll
      for (int n = 0; n < kSources; ++n) softmax[n].finish();
      if constexpr (Config::kSplitsKeys) merge();
      Roles::consumer_release(shared.q_empty[states.queries.index]);
      ++states.queries;
    }
    if (Config::kSplitsKeys && Roles::consumer_group() == 1) return false;
    // The test includes absent sources and rows: these are non-finite only if existing ones are.
    bool exact = false;
#pragma unroll
    for (int n = 0; n < kSources; ++n)
      exact |= !is_finite(out[n][0]) || softmax[n].needs_exact([](int, int) { return true; });
    return exact;
  }

  // Adds the sums of the second warpgroup to those of the first. The memory of Q is free: no product follows.
  __device__ void merge() {
    static_assert(kOutTiles * sizeof(float4) * (Roles::kConsumerThreads / 2) <= Config::kQueryBytes);
    constexpr int kThreads = Roles::kConsumerThreads / 2;
    auto *const other = reinterpret_cast<float4 *>(shared.sQ[states.queries.index]) + threadIdx.x % kThreads;
    auto &merged = softmax[0];
    ptx::sync_threads<kMergeBarrier, Roles::kConsumerThreads>();
    if (Roles::consumer_group() == 1) {
#pragma unroll
      for (int d = 0; d < kOutTiles; ++d) {
        const float (&sums)[4] = out[0][0][d];
        other[d * kThreads] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared.parts.rows[half][threadIdx.x % kThreads] = {merged.maximum[0][half], merged.sum[0][half]};
    }
    ptx::sync_threads<kMergeBarrier, Roles::kConsumerThreads>();
    if (Roles::consumer_group() == 1) return;
    float factor[2][2]; // of the own results, and of the other warpgroup's
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 part = shared.parts.rows[half][threadIdx.x];
      const float before = merged.maximum[0][half], largest = fmaxf(before, part.x);
      factor[half][0] = merged.factor_of(before, largest);
      factor[half][1] = merged.factor_of(part.x, largest);
      merged.maximum[0][half] = largest;
      merged.shift[0][half] = merged.shift_of(largest);
      merged.sum[0][half] = merged.sum[0][half] * factor[half][0] + part.y * factor[half][1];
    }
#pragma unroll
    for (int d = 0; d < kOutTiles; ++d) {
      const float4 part = other[d * kThreads];
      const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) out[0][0][d][i] = out[0][0][d][i] * factor[i / 2][0] + parts[i] * factor[i / 2][1];
    }
  }

  __device__ void write() const {
    if (Config::kSplitsKeys && Roles::consumer_group() == 1) return;
    const int first_source = task.first_source + own_source();
    SourceWalk source = task.source(work, own_source());
    const int sources = work.call.batches * work.call.heads - first_source;
#pragma unroll
    for (int n = 0; n < kSources; ++n, ++source)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = n < sources && row(half) < work.call.p.queries;
        if (!Config::kSmallTiles && work.splits > 1) {
          if (there) write_part(n, source, half);
        } else if (Config::kSmallTiles || work.out_aligned) {
          write_aligned_row<Element>(work, source, row(half), there, out[n][0], half, softmax[n].sum[0][half],
                                     softmax[n].shift[0][half]);
        } else {
          write_pair_bias_row<Element>(work, {source.batch, source.head, true}, row(half), there, out[n][0], half,
                                       softmax[n].sum[0][half], softmax[n].shift[0][half]);
        }
      }
  }
  // Writes a row of a split. The last split of a row tile also writes empty rows for the further splits of other
  // tiles.
  __device__ void write_part(int n, const SourceWalk &source, int half) const {
    const fdm_problem &p = work.call.p;
    write_partial_row(work, {source.batch, source.head, true}, row(half), task.split, out[n][0], half,
                      softmax[n].sum[0][half], softmax[n].shift[0][half]);
    if (!task.last || threadIdx.x % 4 != 0) return;
#pragma unroll 1
    for (int split = task.split + 1; split < work.splits; ++split) {
      const int64_t i = ((split * p.batch + source.batch) * p.heads + source.head) * p.queries + row(half);
      work.partials.max[i] = -INFINITY;
      work.partials.sum[i] = 0.0f;
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    pair_bias_forward_kernel_sm90(const __grid_constant__ PairBiasForward work) {
  auto &shared = dynamic_memory<PairBiasForwardSharedSm90<Config>>();
  shared.init(work.call.p);
  __syncthreads();
  ptx::wait_for_kernel_ahead();
  ptx::start_dependents();
  PairBiasForwardStatesSm90<Config> states;
  using Task = ForwardTaskOf<Config>;
  using Walk = std::conditional_t<Config::kSmallTiles, SmallTileWalk<Config>, PairBiasForwardWalkSm90<Config>>;
  using Registers = typename Config::Registers;
  if (Roles::is_producer()) {
    Registers::produce();
    using Producer =
        std::conditional_t<Config::kSmallTiles, SmallTileProducer<Config>, PairBiasForwardProducersSm90<Config>>;
    Producer producer{work, shared, states};
    Walk::for_each(work, [&](const Task &task, int) { producer.run(task); });
    if (shared.exact_tasks.any())
      Walk::for_each(work, [&](const Task &task, int turn) {
        if (shared.exact_tasks.has(turn)) producer.run(task);
      });
  } else {
    Registers::consume();
    using Consumer = PairBiasForwardConsumerSm90<Config>;
    typename Consumer::Bias small_tile_bias;
    if constexpr (Config::kSmallTiles) load_small_tile_bias<Config>(work, small_tile_bias);
    Walk::for_each(work, [&](const Task &task, int turn) {
      typename Consumer::Bias own_bias;
      Consumer consumer(work, shared, task, states, Config::kSmallTiles ? small_tile_bias : own_bias);
      if (consumer.template run<false>()) shared.exact_tasks.mark(turn);
      consumer.write();
    });
    shared.exact_tasks.finish();
    if (shared.exact_tasks.any())
      Walk::for_each(work, [&](const Task &task, int turn) {
        if (!shared.exact_tasks.has(turn)) return;
        typename Consumer::Bias own_bias;
        Consumer consumer(work, shared, task, states, Config::kSmallTiles ? small_tile_bias : own_bias);
        consumer.template run<true>();
        consumer.write();
      });
  }
}

} // namespace fdm::cuda
