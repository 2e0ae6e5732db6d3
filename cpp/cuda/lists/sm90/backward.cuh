// SPDX-License-Identifier: BSD-3-Clause
// Backward pass with wgmma for queries that list their keys, with many heads per list. A thread block processes one
// tile: its rows are query heads of one query, its columns are the listed keys.
//
// A producer warpgroup gathers K and V. Each of two consumer warpgroups processes 64 rows. In a step of columns, each
// computes P and dS of its rows, stores them in smem, and adds dS K to its rows of dQ. Warpgroup 0 multiplies P' with
// all rows of dO, warpgroup 1 dS' with all rows of Q. The products are the tile's contributions to dV and dK, one row
// per key. Bulk reductions add these rows to float32 sums in global memory, in no fixed order.
#pragma once

#include "../../tile/sm90/products.cuh"
#include "../../tile/sm90/row_gather.cuh"
#include "../row_gradients.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension> struct ListBackwardConfigSm90 {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kColumns = kListColumnsSm90, kStages = 2;
  using RowTile = SmemTile<kHeadDim, kRows>;
  using KeyTile = SmemTile<kHeadDim, kColumns>;
  using ScoreTile = SmemTile<kColumns, kRows>;
  using Registers = RoleRegisters<224, 56>;
  static_assert(kRows == 64 * Roles::kConsumerGroups && kColumns == 64);
};

template <class Config> struct ListBackwardSharedSm90 {
  alignas(1024) char sQ[Config::RowTile::kBytes];
  char sdO[Config::RowTile::kBytes];
  char sK[Config::kStages][Config::KeyTile::kBytes], sV[Config::kStages][Config::KeyTile::kBytes];
  char sP[Config::ScoreTile::kBytes], sdS[Config::ScoreTile::kBytes];
  // The rows that each consumer warpgroup adds to the sums of a step's keys.
  alignas(16) float staged_rows[Roles::kConsumerGroups][Config::kColumns][Config::kHeadDim];
  alignas(16) float bias[Config::kStages][Config::kColumns];   // to base 2; -inf: no key
  alignas(16) int32_t keys[Config::kStages][Config::kColumns]; // each at its RowGather::list_index(); -1: none
  ListTask task;
  uint64_t loaded; // Q and dO
  uint64_t full[Config::kStages], empty[Config::kStages];

  // One thread calls this before the block synchronizes.
  __device__ void init(const ListBackwardParams &params) {
    ptx::init_barrier(loaded, Roles::kProducerThreads);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::init_barrier(full[stage], 2 * Roles::kProducerThreads); // the copies; the stores of keys and biases
      ptx::init_barrier(empty[stage], Roles::kConsumerThreads);
    }
    task.set(params.p, params.tiles, blockIdx.x);
  }
  __device__ int steps() const { return (task.length + Config::kColumns - 1) / Config::kColumns; }
};

// The producer warpgroup. It loads the indices and biases of keys before it waits for an empty stage: the loads overlap
// the wait.
template <class Config>
__device__ void produce_list_gradients(const ListBackwardParams &params, ListBackwardSharedSm90<Config> &shared) {
  constexpr int kColumns = Config::kColumns;
  using Gather = RowGather<typename Config::KeyTile, kColumns>;
  using RowsGather = RowGather<typename Config::RowTile, Config::kRows>;
  const fdm_problem &p = params.p;
  const ListTask &task = shared.task;
  const int thread = Roles::producer_thread(), head_dim = int(p.head_dim);
  const auto load_rows = [&](const fdm_tensor &t, const char *tile) {
    const auto *first = static_cast<const uint16_t *>(t.data) + row_offset(t, task.s, task.query, task.head);
    const auto sources =
        RowsGather::consecutive(reinterpret_cast<const char *>(first), int32_t(2 * t.stride[2]), task.heads);
    RowsGather::copy(ptx::shared_address(tile), sources, head_dim);
  };
  load_rows(p.q, shared.sQ);
  load_rows(params.backward.dout, shared.sdO);
  Roles::producer_commit_copies(shared.loaded);
  const auto load_keys = [&](const fdm_tensor &t, const uint16_t *first, const char *tile, int stage) {
    const auto sources =
        Gather::listed(reinterpret_cast<const char *>(first), int32_t(2 * t.stride[1]), shared.keys[stage]);
    Gather::copy(ptx::shared_address(tile), sources, head_dim);
  };
  PipelineState<Config::kStages> state;
#pragma unroll 1
  for (int step = 0; step < shared.steps(); ++step, ++state) {
    const int stage = state.index;
    int32_t key = -1;
    float bias = -INFINITY;
    if (thread < kColumns) bias = task.column(step * kColumns + thread, p.indices.stride[3], &key);
    Roles::producer_acquire(shared.empty[stage], state.phase);
    if (thread < kColumns) {
      shared.bias[stage][thread] = bias;
      shared.keys[stage][Gather::list_index(thread)] = key;
    }
    Roles::sync_producers();
    load_keys(p.k, task.k, shared.sK[stage], stage);
    load_keys(p.v, task.v, shared.sV[stage], stage);
    Roles::producer_commit(shared.full[stage]);
  }
}

template <class Config> struct ListConsumerSm90 {
  using Element = typename Config::Element;
  using Shared = ListBackwardSharedSm90<Config>;
  using RowTile = typename Config::RowTile;
  using KeyTile = typename Config::KeyTile;
  using ScoreTile = typename Config::ScoreTile;
  using State = PipelineState<Config::kStages>;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim;
  static constexpr int kColumnTiles = kColumns / 8, kDimTiles = kHeadDim / 8;

  const ListBackwardParams &params;
  Shared &shared;
  const ListTask &task;
  int group;
  ListRow rows[2];
  float dq[kDimTiles][4];

  __device__ ListConsumerSm90(const ListBackwardParams &parameters, Shared &memory)
      : params(parameters), shared(memory), task(memory.task), group(Roles::consumer_group()) {}

  __device__ static int warp_row() { return threadIdx.x / 32 * 16; }
  __device__ static int row(int half) { return warp_row() + accumulator_row(half); }
  __device__ static int group_thread() { return threadIdx.x % 128; }
  __device__ static void sync_consumers() { ptx::sync_threads<2, Roles::kConsumerThreads>(); }
  __device__ void sync_group() const { ptx::sync_threads<128>(3 + group); }

  __device__ void run() {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[half] = find_row(row(half));
    for_accumulators(dq, [&](int d, int i) { dq[d][i] = 0.0f; });
    Roles::consumer_wait(shared.loaded, 0);
    if (params.p.softcap > 0)
      run_steps<true>();
    else
      run_steps<false>();
    write();
    ptx::wait_for_bulk_reads();
  }

  // The four lanes that share an accumulator row compute its delta together.
  __device__ ListRow find_row(int r) const {
    const fdm_backward_args &a = params.backward;
    const int lane = threadIdx.x % 4;
    const bool exists = r < task.heads;
    float delta = 0.0f;
    if (exists) {
      const int64_t place = row_offset(a.out, task.s, task.query, task.head + r);
      const auto *out = static_cast<const uint16_t *>(a.out.data) + place;
      const auto *dout =
          static_cast<const uint16_t *>(a.dout.data) + row_offset(a.dout, task.s, task.query, task.head + r);
      const auto *rest = static_cast<const uint8_t *>(a.out_rest.data) + place; // with the strides of out
      const bool has_rest = present(a.out_rest);
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 32) {
        const int column = d + 8 * lane;
        if (column >= params.p.head_dim) continue;
        const uint4 x = *reinterpret_cast<const uint4 *>(out + column),
                    y = *reinterpret_cast<const uint4 *>(dout + column);
        const uint2 z = has_rest ? *reinterpret_cast<const uint2 *>(rest + column) : uint2{};
        const uint32_t left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
        const auto *rests = reinterpret_cast<const int8_t *>(&z);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float low[2], high[2];
          ptx::unpack<Element>(left[i], low[0], high[0]);
          ptx::unpack<Element>(right[i], low[1], high[1]);
          low[0] = with_rest<Element>(low[0], rests[2 * i]);
          high[0] = with_rest<Element>(high[0], rests[2 * i + 1]);
          delta = fmaf(low[0], low[1], fmaf(high[0], high[1], delta));
        }
      }
    }
    delta = ptx::row_sum(delta);
    return exists ? ListRow::find(params, task, task.head + r, delta, lane == 0) : ListRow::none();
  }

  template <bool kHasSoftcap> __device__ void run_steps() {
    State state;
#pragma unroll 1
    for (int step = 0; step < shared.steps(); ++step, ++state) run_step<kHasSoftcap>(step, state);
  }

  __device__ static uint64_t tile_of(const char *tile) { return KeyTile::descriptor(ptx::shared_address(tile)); }
  __device__ static uint64_t rows_of(const char *tile) { return RowTile::descriptor(ptx::shared_address(tile)); }

  template <bool kHasSoftcap> __device__ void run_step(int step, const State &state) {
    using Gather = RowGather<KeyTile, kColumns>;
    const int stage = state.index;
    uint32_t own_ds[kColumns / 16][4];
    Roles::consumer_wait(shared.full[stage], state.phase);
    compute_p_and_ds<kHasSoftcap>(step, stage, own_ds);
    float sums[kDimTiles][4];
    ptx::warpgroup_fence_operand(own_ds);
    ptx::warpgroup_fence_operand(dq);
    ptx::warpgroup_arrive();
    warpgroup_gemm_rs<Element, KeyTile>(dq, own_ds, tile_of(shared.sK[stage]));
    ptx::warpgroup_commit_batch();
    const uint64_t left = ScoreTile::descriptor(ptx::shared_address(uniform(group) ? shared.sdS : shared.sP));
    const uint64_t right = rows_of(uniform(group) ? shared.sQ : shared.sdO);
    warpgroup_gemm_ss_columns<Element, ScoreTile, ptx::Major::mn, RowTile, Config::kRows>(sums, left, right, false);
    ptx::warpgroup_commit_batch();
    const int c = group_thread();
    const int32_t key = c < kColumns ? shared.keys[stage][Gather::list_index(c)] : -1;
    ptx::warpgroup_wait<0>(dq, own_ds, sums);
    Roles::consumer_release(shared.empty[stage]);
    if (float *to = group ? params.sums.dk : params.sums.dv) add_rows(to, key, sums);
  }

  // Stores P and dS of the warpgroup's rows in smem, and adds dS to the bias gradients. own_ds returns the A fragments
  // of dS.
  template <bool kHasSoftcap>
  __device__ void compute_p_and_ds(int step, int stage, uint32_t (&own_ds)[kColumns / 16][4]) {
    float p[kColumnTiles][4], ds[kColumnTiles][4], slopes[kColumnTiles][4];
    const uint64_t own_rows = RowTile::offset(64 * uniform(group), 0);
    ptx::warpgroup_arrive();
    warpgroup_gemm_ss<Element, RowTile, KeyTile, kHeadDim>(p, rows_of(shared.sQ) + own_rows, tile_of(shared.sK[stage]),
                                                           false);
    ptx::warpgroup_commit_batch();
    warpgroup_gemm_ss<Element, RowTile, KeyTile, kHeadDim>(ds, rows_of(shared.sdO) + own_rows,
                                                           tile_of(shared.sV[stage]), false);
    ptx::warpgroup_commit_batch();
    ptx::warpgroup_wait<1>(p);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const float2 bias = *reinterpret_cast<const float2 *>(&shared.bias[stage][8 * n + accumulator_column()]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[n][i] = params.factors.score<kHasSoftcap>(p[n][i], i % 2 ? bias.y : bias.x, &slopes[n][i]);
        p[n][i] = rows[i / 2].unnormalized_p(p[n][i]);
      }
    }
    ptx::warpgroup_wait<0>(ds);
    // A column without a key has zeros, unless Q or dO of the row has non-finite numbers. Then all of the row's dQ is
    // NaN, or the row keeps no key and write() does not read its dQ.
    for_accumulators(p, [&](int n, int i) { rows[i / 2].finish(p[n][i], ds[n][i]); });
    if (params.sums.bias || params.sums.index) add_columns(step, stage, ds);
    if constexpr (kHasSoftcap) for_accumulators(ds, [&](int n, int i) { ds[n][i] *= slopes[n][i]; });
    uint32_t own_p[kColumns / 16][4];
    pack_left<Element>(own_p, p);
    pack_left<Element>(own_ds, ds);
    sync_consumers(); // the products of the previous step have read P and dS
    store_left<ScoreTile>(own_p, ptx::shared_address(shared.sP), warp_row(), 0);
    store_left<ScoreTile>(own_ds, ptx::shared_address(shared.sdS), warp_row(), 0);
    ptx::fence_async_proxy();
    sync_consumers();
  }

  // Adds the column sums of the warp's rows of dS to the bias gradients. Eight lanes hold partial sums of the same
  // columns. In each exchange, a lane passes on half of its columns; after three, it has two complete columns.
  __device__ void add_columns(int step, int stage, const float (&ds)[kColumnTiles][4]) const {
    float sums[kColumnTiles][2];
    for_pairs<kColumnTiles>([&](int n, int i) { sums[n][i] = ds[n][i] + ds[n][i + 2]; });
#pragma unroll
    for (int half = kColumnTiles / 2; half > 0; half /= 2) {
      const bool upper = threadIdx.x & (4 * half);
#pragma unroll
      for (int n = 0; n < half; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float passed = upper ? sums[n][i] : sums[n + half][i], kept = upper ? sums[n + half][i] : sums[n][i];
          sums[n][i] = kept + __shfl_xor_sync(0xffffffffu, passed, 4 * half);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = 2 * (threadIdx.x % 32) + i;
      const int32_t key = shared.keys[stage][RowGather<KeyTile, kColumns>::list_index(c)];
      if (key >= 0) add_bias_gradients(params, task, step * kColumns + c, key, sums[0][i]);
    }
  }

  // Starts the bulk reductions of the product rows to the sums of their keys. Each of the first kColumns threads has
  // the key of its row. Two accumulators of each of two column tiles form four consecutive sums, as round_sums.cu reads
  // them.
  __device__ void add_rows(float *to, int32_t key, const float (&sums)[kDimTiles][4]) {
    ptx::wait_for_bulk_reads();
    sync_group();
    const int row_of_group = warp_row() % 64, lane = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row_of_group + accumulator_row(half);
      const bool odd = r % 2; // odd rows store their upper 64 bytes first, to avoid bank conflicts
      auto *quads = reinterpret_cast<float4 *>(shared.staged_rows[group][r]) + lane;
#pragma unroll
      for (int n = 0; n < kDimTiles; n += 4) {
        const auto quad = [&](int first) {
          return make_float4(sums[first][2 * half], sums[first][2 * half + 1], sums[first + 1][2 * half],
                             sums[first + 1][2 * half + 1]);
        };
        const float4 low = quad(n), high = quad(n + 2);
        quads[2 * n + (odd ? 4 : 0)] = odd ? high : low;
        quads[2 * n + (odd ? 0 : 4)] = odd ? low : high;
      }
    }
    ptx::fence_async_proxy();
    sync_group();
    if (key < 0) return;
    const int64_t place =
        (task.s.batch * params.p.k.shape[1] + task.s.k_begin + key) * params.p.kv_heads + task.kv_head;
    ptx::add_global_bulk(to + place * kHeadDim, ptx::shared_address(shared.staged_rows[group][group_thread()]),
                         kHeadDim * sizeof(float));
  }

  __device__ void write() const {
    const fdm_tensor &t = params.backward.dq;
    if (!present(t)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row(half);
      const bool exists = r < task.heads;
      Element *to =
          exists ? static_cast<Element *>(t.data) + row_offset(t, task.s, task.query, task.head + r) : nullptr;
      write_row(to, t.stride[3], int(params.p.head_dim), dq, half, params.p.scale, exists, !rows[half].keeps());
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    list_backward_kernel_sm90(const __grid_constant__ ListBackwardParams params) {
  auto &shared = dynamic_memory<ListBackwardSharedSm90<Config>>();
  ptx::wait_for_kernel_ahead();
  if (threadIdx.x == 0) shared.init(params);
  __syncthreads();
  if (Roles::is_producer()) {
    Config::Registers::produce();
    produce_list_gradients<Config>(params, shared);
  } else {
    Config::Registers::consume();
    ListConsumerSm90<Config>(params, shared).run();
  }
}

} // namespace fdm::cuda
