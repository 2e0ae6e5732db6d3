// SPDX-License-Identifier: BSD-3-Clause
// Forward pass for few query rows (decode) with mma.sync: the rows of all heads of a GQA group share one tile of 16
// rows.
//
// Decode computes little and loads much, so warps work independently. Each takes blocks of 16 columns and gathers
// their rows of K and V two blocks ahead, without a barrier in its loop. Blocks of columns are dealt in turns to the
// warps of all splits. Only the device knows their number, and this order gives the first splits work for any number.
// Without a plan of the mask, each warp lists the kept keys of its part.
//
// The warps of a thread block merge their results in shared memory. Splits of a cluster are merged there too.
// combine.cu merges other splits.
#pragma once

#include "../tile/copy_rows.cuh"
#include "decode.h"
#include "decode_keys.cuh"
#include "forward_rows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {

template <class ElementType, int kHeadDimension, int kWarpCount, int kBlockCount> struct DecodeConfig {
  using Element = ElementType;
  using Tile = SmemTile<kHeadDimension>;
  static constexpr int kHeadDim = kHeadDimension, kWarps = kWarpCount, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kBlockCount;      // of an SM
  static constexpr int kColumns = 16, kStages = 2; // columns of a block, and stages, of each warp
  static constexpr int kKeyBytes = Tile::bytes(kColumns);
  // The row pitch of results in shared memory. With it, the writes of a warp cover all banks.
  static constexpr int kMergePitch = kHeadDim + 8;
  static_assert(kDecodeRows * kMergePitch * int(sizeof(float)) <= kStages * 2 * kKeyBytes);
};

template <class Config> struct DecodeShared {
  alignas(1024) char sQ[Config::Tile::bytes(kDecodeRows)];
  char sKV[Config::kWarps][Config::kStages][2][Config::kKeyBytes]; // K and V; later the results of the warp
  KeyRing<Config::kColumns, 32> ring[Config::kWarps];
  float maximum[Config::kWarps][kDecodeRows], sum[Config::kWarps][kDecodeRows];
  float block_maximum[kDecodeRows], block_sum[kDecodeRows]; // of all warps, for the other blocks of a cluster
  ForwardTask task;
  TileColumns listed[Config::kWarps]; // of each warp, if there is no plan
  ListedKeys kept[Config::kWarps];

  __device__ float *results(int warp) { return reinterpret_cast<float *>(sKV[warp]); }
};

// A bias per query, read from global memory for the few rows of a warp. It replaces RowBiasReader.
template <class Warp> struct LoadedRowBias {
  const Warp &warp;
  const int32_t *keys;

  __device__ __forceinline__ int2 shifts(int column) const { return {keys[column], keys[column + 1]}; }
  __device__ __forceinline__ float2 elements(int m, int half, int, int2 pair) const {
    const int r = warp.row(m, half);
    if (!warp.exists(r)) return {0.0f, 0.0f};
    const auto load = [&](int32_t key) { return key < 0 ? 0.0f : warp.task->bias.load(warp.query(r), key); };
    return {load(pair.x), load(pair.y)};
  }
};

template <class Config>
struct DecodeWarp
    : ForwardRows<typename Config::Element, 1, Config::kColumns / 8, Config::kHeadDim / 8, RowLayout::decode> {
  using Rows = ForwardRows<typename Config::Element, 1, Config::kColumns / 8, Config::kHeadDim / 8, RowLayout::decode>;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using Ring = KeyRing<Config::kColumns, 32>;
  static constexpr int kColumns = Config::kColumns, kHeadDim = Config::kHeadDim, kStages = Config::kStages;
  static_assert(Ring::kBlocksAtOnce == kStages, "entries of the ring are made as many steps ahead as keys are fetched");
  using Rows::out, Rows::params, Rows::scores, Rows::task;

  DecodeShared<Config> &shared;
  Ring &ring;
  int warp, lane;
  const TileColumns *columns;
  int workers, worker; // warps that share the columns, and the number of this one
  int steps;           // blocks of columns of this warp

  __device__ DecodeWarp(const ForwardParams &parameters, DecodeShared<Config> &memory)
      : Rows(parameters, memory.task), shared(memory), ring(memory.ring[threadIdx.x / 32]), warp(threadIdx.x / 32),
        lane(threadIdx.x % 32), columns(&task->columns) {}

  __device__ void divide_columns(int all, int worker_number) {
    const int blocks = (columns->count + kColumns - 1) / kColumns;
    workers = all;
    worker = worker_number;
    steps = worker < blocks ? (blocks - worker + workers - 1) / workers : 0;
  }

  __device__ int row_count() const { return int(task->s.q_count) * params.heads_per_tile; }

  __device__ void load_queries() const {
    const fdm_tensor &q = params.p.q;
    copy_any_rows<Tile, kDecodeRows, Config::kThreads>(
        ptx::shared_address(shared.sQ), params.aligned, int(params.p.head_dim), q, [&](int r) -> const uint16_t * {
          if (!this->exists(r)) return kZeroRow;
          return static_cast<const uint16_t *>(q.data) + row_offset(q, task->s, this->query(r), this->head(r));
        });
  }

  // The first column of a step; and of the two steps from `step` on, the step and column of this thread.
  __device__ int first_column(int step) const { return (worker + step * workers) * kColumns; }
  __device__ int own_step(int step) const { return step + lane / kColumns; }
  __device__ int own_column(int step) const { return first_column(own_step(step)) + lane % kColumns; }

  __device__ int32_t fetch_own_key(int step) const {
    return own_step(step) < steps ? fetch_key(*columns, own_column(step)) : -1;
  }
  __device__ ColumnEntry fetch_own_column(int step, int32_t key) const {
    return fetch_column(*columns, task->bias, own_column(step), key);
  }
  __device__ void store(int step, const ColumnEntry &entry) {
    if (own_step(step) < steps)
      store_column<kColumns>(ring.slot(own_step(step)), params.p, task->s, task->sequence_index, task->kv_head,
                             *columns, task->bias, own_column(step), entry);
    __syncwarp();
  }

  __device__ uint32_t stage(int step, int values) const {
    return ptx::shared_address(shared.sKV[warp][step % kStages][values]);
  }

  // Starts the copies of the rows of K and V of a step.
  __device__ void load_keys(int step) {
    constexpr int kChunks = kColumns * Tile::kChunks / 32; // chunks that each thread copies
    const int head_dim = int(params.p.head_dim);
    const typename Ring::Slot &slot = ring.slot(step);
    const uint32_t k = stage(step, 0), v = stage(step, 1);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int r = (32 * i + lane) / Tile::kChunks, chunk = (32 * i + lane) % Tile::kChunks;
      const uint32_t k_address = Tile::chunk_address(k, r, chunk), v_address = Tile::chunk_address(v, r, chunk);
      const uint16_t *k_row = slot.k_row[r], *v_row = slot.v_row[r];
      if (params.aligned) {
        ptx::cp_async_16(k_address, k_row + chunk * 8, chunk * 8 < head_dim);
        ptx::cp_async_16(v_address, v_row + chunk * 8, chunk * 8 < head_dim);
      } else {
        const bool none = k_row == kZeroRow;
        copy_chunk_by_elements(k_address, k_row, chunk * 8, head_dim, none ? 1 : params.p.k.stride[3]);
        copy_chunk_by_elements(v_address, v_row, chunk * 8, head_dim, none ? 1 : params.p.v.stride[3]);
      }
    }
  }

  // Zeroes V in columns that no row keeps, which only a bias per query can cause: 0 * NaN is NaN.
  __device__ void clear_dead_values(int step) {
    uint32_t kept_columns = 0; // bits of this thread's columns, then of all
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (this->exists(this->row(0, i / 2)) && scores[0][n][i] != -INFINITY)
          kept_columns |= 1u << (8 * n + accumulator_column() + i % 2);
    kept_columns = __reduce_or_sync(0xffffffffu, kept_columns);
    for (int i = lane; i < kColumns * Tile::kChunks; i += 32) {
      const int r = i / Tile::kChunks;
      if (!(kept_columns >> r & 1))
        ptx::store_shared(Tile::chunk_address(stage(step, 1), r, i % Tile::kChunks), uint4{});
    }
    __syncwarp();
  }

  __device__ void attend(int step) {
    clear(scores);
    gemm_ss<Element, kHeadDim>(scores, Tile::left(ptx::shared_address(shared.sQ), 0), Tile::right_rows(stage(step, 0)));
    this->finish_scores(ring.slot(step), first_column(step) + kColumns > columns->full,
                        LoadedRowBias<DecodeWarp>{*this, ring.slot(step).key});
    if (task->bias.per_query) clear_dead_values(step);
#pragma unroll
    for (int half = 0; half < 2; ++half) this->rescale(0, half, this->softmax(0, half));
    gemm_rs<Element, kHeadDim>(out, scores, Tile::right_columns(stage(step, 1)));
  }

  // Makes the next kept keys of a scan the columns of this warp.
  __device__ void list_keys(KeyScan &scan) {
    ListedKeys &kept = shared.kept[warp];
    const int32_t count = kept.list(scan);
    TileColumns &listed = shared.listed[warp];
    if (lane == 0) {
      listed = {};
      listed.count = listed.full = count;
      listed.column_keys = kept.keys;
    }
    __syncwarp();
    columns = &listed;
    divide_columns(1, 0);
  }

  __device__ void run(KeyScan &scan) {
    this->start();
    load_queries();
    ptx::cp_async_fence();
    bool queries_are_there = false;
#pragma unroll 1
    do {
      if (params.finds_keys)
        list_keys(scan);
      else
        divide_columns(params.splits * Config::kWarps, task->split * Config::kWarps + warp);
      const int32_t next_key = start_columns();
      if (!queries_are_there) {
        ptx::cp_async_wait<kStages>();
        __syncthreads();
        queries_are_there = true;
      }
      attend_columns(next_key);
    } while (params.finds_keys && scan.has_more());
    this->finish();
  }

  // Starts the copies of the first steps. Returns the key that this thread fetches next.
  __device__ int32_t start_columns() {
    store(0, fetch_own_column(0, fetch_own_key(0)));
    const int32_t next_key = fetch_own_key(kStages);
#pragma unroll
    for (int step = 0; step < kStages; ++step) {
      if (step < steps) load_keys(step);
      ptx::cp_async_fence();
    }
    return next_key;
  }

  __device__ void attend_columns(int32_t next_key) {
    for (int step = 0; step < steps; ++step) {
      ptx::cp_async_wait<kStages - 1>();
      __syncwarp();
      const bool fetch_ahead = step % kStages == 0;
      ColumnEntry entry;
      if (fetch_ahead) {
        entry = fetch_own_column(step + kStages, next_key);
        next_key = fetch_own_key(step + 2 * kStages);
      }
      attend(step);
      __syncwarp(); // all reads of the stage are complete
      if (fetch_ahead) store(step + kStages, entry);
      if (step + kStages < steps) load_keys(step + kStages);
      ptx::cp_async_fence();
    }
    ptx::cp_async_wait<0>();
    __syncwarp();
  }

  __device__ void store_results() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = this->row(0, half);
      float *warp_row = shared.results(warp) + r * Config::kMergePitch + accumulator_column();
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d)
        *reinterpret_cast<float2 *>(warp_row + 8 * d) = make_float2(out[0][d][2 * half], out[0][d][2 * half + 1]);
      if (lane % 4 == 0) {
        shared.maximum[warp][r] = this->maximum[0][half];
        shared.sum[warp][r] = this->sum[0][half];
      }
    }
  }

  // An element of an unnormalized result, with the base-2 maximum and the sum of its row.
  struct Part {
    float value, maximum, sum;
  };

  // Merges parts in order.
  template <int kParts> __device__ __forceinline__ static Part merge(const Part (&parts)[kParts]) {
    Part merged{0.0f, -INFINITY, 0.0f};
#pragma unroll
    for (const Part &part : parts) merged.maximum = fmaxf(merged.maximum, part.maximum);
    const float shift = merged.maximum == -INFINITY ? 0.0f : merged.maximum;
#pragma unroll
    for (const Part &part : parts) {
      const float factor = ptx::exp2_approximate(part.maximum - shift);
      merged.sum += part.sum * factor;
      merged.value += part.value * factor;
    }
    return merged;
  }

  // Calls write(r, d) for the elements of all rows, which `blocks` thread blocks share.
  template <class Write> __device__ void for_elements(int block, int blocks, const Write &write) const {
    const int rows = row_count(), head_dim = int(params.p.head_dim);
    for (int i = block * Config::kThreads + int(threadIdx.x); i < rows * kHeadDim; i += blocks * Config::kThreads)
      if (i % kHeadDim < head_dim) write(i / kHeadDim, i % kHeadDim);
  }

  // The epilogue sums over the warps in order.
  __device__ void write_merged() const {
    for_elements(0, 1, [&](int r, int d) {
      Part parts[Config::kWarps];
#pragma unroll
      for (int w = 0; w < Config::kWarps; ++w)
        parts[w] = {shared.results(w)[result_index(r, d)], shared.maximum[w][r], shared.sum[w][r]};
      const Part merged = merge(parts);
      if (params.merges_in_cluster)
        store_for_cluster(r, d, merged);
      else if (params.splits > 1)
        write_partial(r, d, merged);
      else
        write(r, d, merged);
    });
  }

  __device__ static int result_index(int r, int d) { return r * Config::kMergePitch + d; }

  // The merged element overwrites that of warp 0, which only this thread reads.
  __device__ void store_for_cluster(int r, int d, const Part &merged) const {
    shared.results(0)[result_index(r, d)] = merged.value;
    if (d > 0) return;
    shared.block_maximum[r] = merged.maximum;
    shared.block_sum[r] = merged.sum;
  }

  // Sums over the thread blocks of a cluster, in the order of the splits. All threads of the cluster call this.
  __device__ void write_cluster_merged() const {
    ptx::sync_cluster();
    for_elements(task->split, params.splits, [&](int r, int d) {
      Part parts[kClusterSplits];
#pragma unroll
      for (int split = 0; split < kClusterSplits; ++split) {
        parts[split] = {0.0f, -INFINITY, 0.0f};
        if (split < params.splits)
          parts[split] = {ptx::load_remote(&shared.results(0)[result_index(r, d)], split),
                          ptx::load_remote(&shared.block_maximum[r], split),
                          ptx::load_remote(&shared.block_sum[r], split)};
      }
      write(r, d, merge(parts));
    });
    ptx::leave_cluster(); // the other blocks have read
  }

  __device__ void write(int r, int d, const Part &x) const {
    const fdm_tensor &t = params.a.out;
    store_out(params.a, row_offset(t, task->s, this->query(r), this->head(r)) + d * t.stride[3],
              x.sum == 0.0f ? 0.0f : x.value * row_normalizer(this->sink(r), x.maximum, x.sum));
    if (d == 0)
      static_cast<float *>(params.a.lse.data)[head_major_offset(params.a.lse, task->s, this->query(r), this->head(r))] =
          x.sum == 0.0f ? -INFINITY : (x.maximum + log2f(x.sum)) / kLog2E;
  }

  __device__ void write_partial(int r, int d, const Part &x) const {
    const fdm_problem &p = params.p;
    const int64_t rows = partial_rows(p);
    const int64_t partial_row =
        task->split * rows + (task->sequence_index * p.heads + this->head(r)) * p.queries + this->query(r);
    params.partials.out[partial_row * p.head_dim + d] = x.value;
    if (d == 0) {
      params.partials.max[partial_row] = x.maximum;
      params.partials.sum[partial_row] = x.sum;
    }
  }

  // A split without columns writes sums of 0, so combine.cu reads no results of it.
  __device__ void write_empty_partial() const {
    if (int(threadIdx.x) < row_count()) write_partial(threadIdx.x, 0, {0.0f, -INFINITY, 0.0f});
  }
};

// The sequence and the first head of a thread block.
struct DecodePlace {
  int64_t sequence_index, head;

  __device__ __forceinline__ explicit DecodePlace(const ForwardParams &params) {
    const uint32_t groups = uint32_t(params.p.heads) / uint32_t(params.heads_per_tile);
    sequence_index = blockIdx.x / groups;
    head = blockIdx.x % groups * params.heads_per_tile;
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    decode_kernel(const __grid_constant__ ForwardParams params) {
  auto &shared = dynamic_memory<DecodeShared<Config>>();
  ptx::wait_for_kernel_ahead();
  ptx::start_dependents(); // not earlier, so that at most one kernel waits beside the running one
  const fdm_problem &p = params.p;
  const auto [sequence_index, head] = DecodePlace(params);
  const Sequence s = sequence(p, sequence_index);
  if (s.q_count == 0) return;
  // The loads of the mask overlap the creation of the task.
  KeyScan scan;
  if (params.finds_keys)
    scan.start({score_matrix(p, p.mask, s, head, 1), int32_t(s.k_count),
                int32_t(blockIdx.y) * Config::kWarps + int32_t(threadIdx.x) / 32, params.splits * Config::kWarps});
  if (threadIdx.x == 0) {
    const ScoreView bias = bias_view(p, s, sequence_index, head, 0);
    shared.task = {s,
                   sequence_index,
                   head,
                   kv_head_of(p, head),
                   0,
                   int(blockIdx.y),
                   params.finds_keys ? TileColumns{} : tile_columns(p, params.plan, s, sequence_index, head, 0),
                   bias,
                   sink_score(p, head, bias)};
  }
  __syncthreads();
  DecodeWarp<Config> warp(params, shared);
  const bool goes_alone = params.splits > 1 && !params.finds_keys && !params.merges_in_cluster;
  if (goes_alone && shared.task.split * Config::kWarps * Config::kColumns >= shared.task.columns.count) {
    warp.write_empty_partial();
    return;
  }
  warp.run(scan);
  warp.store_results();
  __syncthreads();
  warp.write_merged();
  if constexpr (kHasClusters)
    if (params.merges_in_cluster) warp.write_cluster_merged();
}

} // namespace fdm::cuda
