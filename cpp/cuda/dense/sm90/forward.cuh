// SPDX-License-Identifier: BSD-3-Clause
// Forward pass of dense blocks with Hopper's wgmma, for several sources of a bias at a time.
//
// A block of threads has 128 rows, 64 of each consumer warpgroup, of kSources sources. For 128 keys, a warpgroup loads its
// part of the bias into registers, and then the sources go by: S = Q K', the softmax, O += P V. So the bias is read once
// for all of them. A producer warpgroup copies the bias, and K and V of each source, a pipeline stage for each.
#pragma once

#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/roles.cuh"
#include "../softmax.cuh"
#include "row_copy.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kSourceCount, bool kWideBias> struct WideForwardConfig {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kTile = kWideTile;
  static constexpr bool kWide = kWideBias; // the bias is float32
  using Pair = TilePair<kHeadDim>;
  static constexpr int kSources = kSourceCount;
  static constexpr int kStages = kHeadDim == 32 ? 4 : 3;
  // Elements of 16 bits lie so that ldmatrix reads accumulators; the pitch of words lets pairs meet all banks.
  using Bias = SmemTile<kTile, kTile>;
  static constexpr int kPitch = kTile + 8;
  static constexpr int kBiasBytes = kWide ? kTile * kPitch * 4 : Bias::kBytes;
};

template <class Config> struct WideForwardShared {
  alignas(1024) char sQ[(Config::kSources + 1) / 2][Config::Pair::kBytes]; // Q of two sources in each
  char sKV[Config::kStages][Config::Pair::kBytes];
  char bias[Config::kBiasBytes]; // in registers while the next is copied
  DroppedKeys dropped[Config::kStages];
  uint32_t live[Config::kTile / 32]; // of an exact run: keys that a row of the tile keeps
  uint64_t q_full, full[Config::kStages], empty[Config::kStages];
  uint64_t bias_full, bias_empty;

  // One thread of the block calls this, before the others use the barriers.
  __device__ void init() {
    ptx::init_barrier(q_full, 2 * Roles::kProducerThreads);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads);
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
    ptx::init_barrier(bias_full, 2 * Roles::kProducerThreads);
    ptx::init_barrier(bias_empty, Roles::kConsumerThreads);
  }
};

// The rows and sources of a block of threads, and how many blocks of keys it sees.
struct WideForwardTask {
  int unit, first_source, first_row, blocks;

  __device__ WideForwardTask(const DenseForward &work, int sources) {
    const fdm_problem &p = work.call.p;
    // The tiles of rows go fastest: they share K and V. The last, which a causal mask makes the longest, come first.
    const int number = int(blockIdx.x), tile = work.tiles - 1 - number % work.tiles;
    first_row = tile * kWideTile;
    first_source = number / work.tiles % work.groups * sources;
    unit = number / work.tiles / work.groups;
    const int64_t last_row = min64(int64_t(first_row) + kWideTile, p.queries) - 1;
    const int64_t visible = is_causal(p) ? clamp64(last_row + p.keys - p.queries + 1, 0, p.keys) : p.keys;
    blocks = int(ceil_div(visible, kWideTile));
  }
};

template <class Config> struct WideForwardProducer {
  using Pair = typename Config::Pair;

  using Rows = WideRows<Pair>;

  const DenseForward &work;
  WideForwardShared<Config> &shared;
  const WideForwardTask &task;
  const SourceWalk first_source;
  const Rows k, v;
  // For each source this thread has its first row of K and V, and its first byte of a mask of keys, where there is one.
  const uint16_t *k_row[Config::kSources], *v_row[Config::kSources];
  const uint8_t *kept[Config::kSources];
  int sources; // that exist
  PipelineState<Config::kStages> state;
  PipelineState<1> bias_state;

  __device__ WideForwardProducer(const DenseForward &own_work, WideForwardShared<Config> &memory,
                                 const WideForwardTask &own_task)
      : work(own_work), shared(memory), task(own_task),
        first_source(own_work.call, own_task.unit, own_task.first_source),
        k(own_work.call.p.k, own_work.call.p.head_dim, 0), v(own_work.call.p.v, own_work.call.p.head_dim, 0),
        sources(own_work.call.batches * own_work.call.heads - own_task.first_source) {
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
#pragma unroll 1
    for (int n = 0; n < Config::kSources; ++n, ++source)
      q.copy(shared.sQ[n / 2], n % 2, q.row_of(source.batch, source.head),
             __ballot_sync(0xffffffffu, n < sources && task.first_row + own() < p.queries));
    Roles::producer_commit(shared.q_full);
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
    Roles::producer_acquire(shared.bias_empty, bias_state.phase);
    const uint32_t base = ptx::shared_address(shared.bias);
#pragma unroll 4
    for (int r = own_row; r < Config::kTile; r += kDown) {
      const uint32_t address =
          Config::kWide ? base + (r * Config::kPitch) * 4 + chunk * 16 : Config::Bias::chunk_address(base, r, chunk);
      ptx::cp_async_up_to_16(address, elements, r < rows ? bytes : 0);
      elements += kDown * m.row * kSize;
    }
    Roles::producer_commit(shared.bias_full);
    ++bias_state;
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
    const int stage = state.index;
    Roles::producer_acquire(shared.empty[stage], state.phase);
    const uint32_t there = shared.dropped[stage].set(keeps);
    k.copy(shared.sKV[stage], 0, k_row[n] + block * Config::kTile * p.k.stride[1], there);
    v.copy(shared.sKV[stage], 1, v_row[n] + block * Config::kTile * p.v.stride[1], there);
    Roles::producer_commit(shared.full[stage]);
    ++state;
  }

  __device__ void run() {
    uint8_t fetched = fetch_kept(0, 0);
#pragma unroll 1
    for (int block = 0; block < task.blocks; ++block) {
      load_bias(block);
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) {
        const bool last = n + 1 == Config::kSources;
        const uint8_t next = fetch_kept(last ? 0 : n + 1, block + last);
        load_keys(n, block, fetched != 0);
        fetched = next;
      }
    }
  }
};

template <class Config> struct WideForwardConsumer {
  using Element = typename Config::Element;
  using Tile = typename Config::Pair::Tile;
  using Pair = typename Config::Pair;
  static constexpr int kTiles = Config::kTile / 8, kOutTiles = Config::kHeadDim / 8, kSources = Config::kSources;
  static constexpr int kExactBarrier = 4;

  const DenseForward &work;
  WideForwardShared<Config> &shared;
  const WideForwardTask &task;
  PipelineState<Config::kStages> state;
  PipelineState<1> bias_state;
  DenseSoftmax<1, kTiles> softmax[kSources];
  float out[kSources][1][kOutTiles][4];
  float bias[kTiles][4];

  __device__ WideForwardConsumer(const DenseForward &own_work, WideForwardShared<Config> &memory,
                                 const WideForwardTask &own_task)
      : work(own_work), shared(memory), task(own_task) {}

  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ Source source(int n) const { return source_of(work.call, task.unit, task.first_source + n); }
  __device__ int row(int half) const { return task.first_row + 16 * warp() + accumulator_row(half); }
  __device__ bool exists(int n, int half) const { return source(n).exists && row(half) < work.call.p.queries; }

  __device__ void read_bias() {
    Roles::consumer_wait(shared.bias_full, bias_state.phase);
    const char *tile = shared.bias;
    if constexpr (Config::kWide) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int place = (16 * warp() + accumulator_row(half)) * Config::kPitch + 8 * n + accumulator_column();
          const float2 pair = reinterpret_cast<const float2 *>(tile)[place / 2];
          bias[n][2 * half] = pair.x;
          bias[n][2 * half + 1] = pair.y;
        }
    } else {
      uint32_t pairs[kTiles / 2][4];
      load_left<typename Config::Bias>(pairs, ptx::shared_address(tile), 16 * warp());
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::unpack<Element>(pairs[n / 2][n % 2 * 2 + half], bias[n][2 * half], bias[n][2 * half + 1]);
    }
    ptx::arrive(shared.bias_empty);
    ++bias_state;
  }

  // Makes scores of products: -inf where a pair is dropped.
  template <bool kExact> __device__ void finish_scores(float (&scores)[kTiles][4], int block) const {
    const float scale = work.call.p.scale;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = fmaf(scores[n][i], scale, bias[n][i]);
    if constexpr (kExact)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores[n][i] = bias[n][i] == -INFINITY ? -INFINITY : ptx::max_or_nan(scores[n][i], kLowestBias);
    const DroppedKeys &dropped = shared.dropped[state.index];
    if (dropped.any())
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float own[2];
        dropped.read(n, own);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          scores[n][i] = kExact && own[i % 2] != 0.0f ? own[i % 2] : scores[n][i] + own[i % 2];
      }
    if (!is_causal(work.call.p)) return;
    const int limit =
        int(work.call.p.keys - work.call.p.queries) + task.first_row + 16 * warp() - block * Config::kTile;
    if (limit >= Config::kTile - 1) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (8 * n + accumulator_column() + i % 2 > limit + accumulator_row(i / 2)) scores[n][i] = -INFINITY;
  }

  // Makes zeros of V of keys that no row of the tile keeps: 0 times NaN is NaN.
  __device__ void clear_dead_values(const float (&scores)[1][kTiles][4], int n) {
    const auto sync = [] { ptx::sync_threads<kExactBarrier, Roles::kConsumerThreads>(); };
    if (threadIdx.x < Config::kTile / 32) shared.live[threadIdx.x] = 0;
    sync();
    const uint32_t columns = live_columns(scores, -INFINITY, [&](int, int half) { return exists(n, half); });
    if (threadIdx.x % 32 < 4)
#pragma unroll 1
      for (int bit = 0; bit < 32; ++bit) {
        const int column = bit / 2 * 8 + accumulator_column() + bit % 2;
        if (columns >> bit & 1) atomicOr(&shared.live[column / 32], 1u << column % 32);
      }
    sync();
    const int key = int(threadIdx.x);
    if (key < Config::kTile && !(shared.live[key / 32] >> key % 32 & 1))
#pragma unroll 1
      for (int chunk = 0; chunk < Config::kHeadDim / 8; ++chunk)
        for (int word = 0; word < 4; ++word)
          ptx::store_shared(Pair::chunk_address(ptx::shared_address(shared.sKV[state.index]), 1, key, chunk) + 4 * word,
                            0);
    ptx::fence_async_proxy();
    sync();
  }

  template <bool kExact> __device__ void step(int block, int n) {
    const int stage = state.index;
    Roles::consumer_wait(shared.full[stage], state.phase);
    const uint64_t keys = Pair::descriptor(ptx::shared_address(shared.sKV[stage]), 0);
    const uint64_t values = Pair::descriptor(ptx::shared_address(shared.sKV[stage]), 1);
    const uint64_t queries =
        Pair::descriptor(ptx::shared_address(shared.sQ[n / 2]), n % 2) + Tile::offset(64, 0) * Roles::consumer_group();
    float scores[1][kTiles][4];
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, Tile, Tile, Config::kHeadDim>(scores[0], queries, keys, false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(scores[0]);
    finish_scores<kExact>(scores[0], block);
    if constexpr (kExact) clear_dead_values(scores, n);
    softmax[n].apply(scores, out[n], kExact);
    uint32_t p[kTiles / 2][4];
    pack_left<Element>(p, scores[0]);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, Tile>(out[n][0], p, values);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_fence_operand(out[n][0]);
    ptx::warpgroup_fence_operand(p);
    Roles::consumer_release(shared.empty[stage]);
    ++state;
  }

  // Returns whether a result shows what only an exact run can compute.
  template <bool kExact> __device__ bool run() {
#pragma unroll
    for (int n = 0; n < kSources; ++n) {
      softmax[n].start();
      clear(out[n]);
    }
#pragma unroll 1
    for (int block = 0; block < task.blocks; ++block) {
      read_bias();
#pragma unroll
      for (int n = 0; n < kSources; ++n) step<kExact>(block, n);
    }
    bool odd = false;
#pragma unroll
    for (int n = 0; n < kSources; ++n) {
      softmax[n].finish();
      const auto there = [&](int, int half) { return exists(n, half); };
      odd |= has_nan(out[n], there) || softmax[n].is_odd(there);
    }
    return odd;
  }

  __device__ void write() const {
#pragma unroll
    for (int n = 0; n < kSources; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (exists(n, half))
          write_dense_row<Element>(work, source(n), row(half), out[n][0], half, softmax[n].sum[0][half],
                                   softmax[n].shift[0][half]);
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    dense_wide_forward_kernel(const __grid_constant__ DenseForward work) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  auto &shared = *reinterpret_cast<WideForwardShared<Config> *>(dynamic_shared);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const WideForwardTask task(work, Config::kSources);
  using Registers = RoleRegisters<232, 40>;
  if (Roles::is_producer()) {
    Registers::produce();
    WideForwardProducer<Config> producer(work, shared, task);
    producer.load_queries();
    producer.run();
    if (__syncthreads_or(false)) producer.run();
  } else {
    Registers::consume();
    WideForwardConsumer<Config> consumer(work, shared, task);
    Roles::consumer_wait(shared.q_full, 0);
    const bool odd = consumer.template run<false>();
    if (__syncthreads_or(odd)) consumer.template run<true>();
    consumer.write();
  }
}

} // namespace fdm::cuda
