// SPDX-License-Identifier: BSD-3-Clause
// Small tiles in the forward kernel of pair biases for sm_90: problems with at most 64 rows and keys, whose batch
// shares a bias. Each consumer warpgroup has a source of its own. It holds its part of the bias in registers for all
// sources of a thread block.
#pragma once

#include "forward_tasks.cuh"

namespace fdm::cuda {

// Two sources of a head of the bias. All rows and keys of a source form one block.
template <class Config> struct SmallTileTask {
  static constexpr int first_row = 0, begin = 0, end = 1, split = 0;
  static constexpr bool last = true;
  static constexpr const uint32_t *live = nullptr;
  int plane, first_source;
  SourceWalk first;

  __device__ SourceWalk source(const PairBiasForward &, int n) const {
    SourceWalk walk = first;
    if (n == 1) ++walk;
    return walk;
  }
};

template <class Config>
using ForwardTaskOf = std::conditional_t<Config::kSmallTiles, SmallTileTask<Config>, PairBiasForwardTaskSm90<Config>>;

// Goes through the tasks of this thread block, which are consecutive.
template <class Config> struct SmallTileWalk {
  __device__ static int plane(const PairBiasForward &work) { return int(blockIdx.x) / work.groups; }

  template <class Function> __device__ static void for_each(const PairBiasForward &work, const Function &function) {
    const int sources = work.call.batches * work.call.heads, group = int(blockIdx.x) % work.groups;
    const int64_t tasks = (sources + Config::kTaskSources - 1) / Config::kTaskSources;
    const int first = int(tasks * group / work.groups), past = int(tasks * (group + 1) / work.groups);
    SmallTileTask<Config> task{
        plane(work), first * Config::kTaskSources, {work.call, plane(work), first * Config::kTaskSources}};
#pragma unroll 1
    for (int number = first; number < past; ++number, task.first_source += Config::kTaskSources) {
      function(task, number - first);
#pragma unroll
      for (int n = 0; n < Config::kTaskSources; ++n) ++task.first;
    }
  }
};

template <class Config> struct SmallTileProducer {
  using Rows = TileRowCopy<typename Config::Pair>;
  static constexpr int kSourceTile = Config::kRows;

  const PairBiasForward &work;
  PairBiasForwardSharedSm90<Config> &shared;
  PairBiasForwardStatesSm90<Config> &states;
  const Rows q, k, v;
  const uint32_t used; // bits of this warp's existing rows
  // The mask byte of this thread's key for the source of the next task, fetched ahead: nonzero if the key is kept. It
  // is fetched again if another task comes next.
  uint8_t fetched = 0;
  int fetched_for = -1; // the first source of that task

  __device__ SmallTileProducer(const PairBiasForward &own_work, PairBiasForwardSharedSm90<Config> &memory,
                               PairBiasForwardStatesSm90<Config> &own_states)
      : work(own_work), shared(memory), states(own_states),
        q(own_work.call.p.q, own_work.call.p.head_dim, -own_source() * kSourceTile),
        k(own_work.call.p.k, own_work.call.p.head_dim, -own_source() * kSourceTile),
        v(own_work.call.p.v, own_work.call.p.head_dim, -own_source() * kSourceTile),
        used(__ballot_sync(0xffffffffu, row() < own_work.call.p.queries)) {}

  __device__ static int own_source() { return Roles::producer_thread() / kSourceTile; }
  __device__ static int row() { return Roles::producer_thread() % kSourceTile; }

  __device__ bool exists(int first_source) const {
    return first_source + own_source() < work.call.batches * work.call.heads;
  }
  __device__ uint8_t fetch_kept(const SourceWalk &source, int first_source) const {
    const fdm_problem &p = work.call.p;
    if (!exists(first_source) || row() >= p.keys) return 0;
    const uint8_t *const kept = kept_key(p, source.batch, source.head, row());
    return kept ? *kept : 1;
  }

  __device__ void run(const SmallTileTask<Config> &task) {
    const SourceWalk source = task.source(work, own_source());
    SourceWalk after = source;
#pragma unroll
    for (int n = 0; n < Config::kTaskSources; ++n) ++after;
    const bool keeps = (fetched_for == task.first_source ? fetched : fetch_kept(source, task.first_source)) != 0;
    fetched_for = task.first_source + Config::kTaskSources;
    fetched = fetch_kept(after, fetched_for);
    auto &state = states.keys;
    const int stage = state.index;
    Roles::producer_acquire(shared.empty[stage], state.phase);
    const uint32_t there = shared.dropped[stage].set(keeps);
    shared.drops.drop(stage, Roles::producer_thread(), !keeps);
    q.copy(shared.sQ[stage], 0, q.row_of(source.batch, source.head), exists(task.first_source) ? used : 0);
    k.copy(shared.sKV[stage], 0, k.row_of(source.batch, source.head), there);
    v.copy(shared.sKV[stage], 1, v.row_of(source.batch, source.head), there);
    Roles::producer_commit(shared.full[stage]);
    ++state;
  }
};

// Loads this thread's part of the bias, with -inf for dropped pairs.
template <class Config, int kTiles>
__device__ void load_small_tile_bias(const PairBiasForward &work, float (&bias)[kTiles][4]) {
  const fdm_problem &p = work.call.p;
  const SourceWalk source(work.call, SmallTileWalk<Config>::plane(work), 0);
  const Sequence s = pair_bias_sequence(p, source.batch);
  const Matrix m = score_matrix(p, p.bias, s, source.head, Config::kBiasSize);
  const int first_row = int(threadIdx.x) / 32 % (Config::kRows / 16) * 16;
  for_accumulators(bias, [&](int n, int i) {
    const int r = first_row + accumulator_row(i / 2), k = 8 * n + accumulator_column() + i % 2;
    const int64_t offset = r * m.row + k * m.col;
    bias[n][i] = -INFINITY;
    if (!is_kept_pair(p, s, source.head, r, k)) return;
    if constexpr (Config::kFloat32Bias)
      bias[n][i] = static_cast<const float *>(m.base)[offset];
    else
      bias[n][i] = float(static_cast<const typename Config::Element *>(m.base)[offset]);
  });
}

} // namespace fdm::cuda
