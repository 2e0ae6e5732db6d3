// SPDX-License-Identifier: BSD-3-Clause
// The producer warpgroup of the fused kernel. It copies Q, dO, K and V of each source, and the row statistics and
// kept keys.
#pragma once

#include "fused_tasks.cuh"

namespace fdm::cuda {

template <class Config> struct PairBiasFusedProducer {
  using Rows = TileRowCopy<typename Config::Pair>;

  const PairBiasBackward &work;
  PairBiasFusedShared<Config> &shared;
  const PairBiasFusedTask &task;
  const int first_row, first_key;
  const Rows q, dout, k, v;
  const uint32_t used; // bits of this warp's existing rows

  __device__ PairBiasFusedProducer(const PairBiasBackward &own_work, PairBiasFusedShared<Config> &memory,
                                   const PairBiasFusedTask &own_task)
      : work(own_work), shared(memory), task(own_task),
        first_row(own_task.row_tile * Config::kTile - own_source() * Config::kSourceTile),
        first_key(own_task.key_tile * Config::kTile - own_source() * Config::kSourceTile),
        q(own_work.call.p.q, own_work.call.p.head_dim, first_row),
        dout(own_work.a.dout, own_work.call.p.head_dim, first_row),
        k(own_work.call.p.k, own_work.call.p.head_dim, first_key),
        v(own_work.call.p.v, own_work.call.p.head_dim, first_key),
        used(__ballot_sync(0xffffffffu, first_row + thread() < own_work.call.p.queries)) {}

  // What this thread loads for its row and its key, a step ahead, unconverted.
  struct Facts {
    RowStatistics row;
    uint8_t kept;
  };

  __device__ static int thread() { return Roles::producer_thread(); }
  // The source of the tile whose rows and keys this thread's warp loads.
  __device__ static int own_source() { return Config::kSmallTiles ? thread() / Config::kSourceTile : 0; }

  __device__ Facts fetch(const SourceWalk &source) const {
    const fdm_problem &p = work.call.p;
    Facts facts{{INFINITY, 0.0f}, 0};
    if (first_row + thread() < p.queries)
      facts.row = fetch_statistics(work, {source.batch, source.head, true}, first_row + thread());
    if (first_key + thread() < p.keys) {
      const uint8_t *kept = kept_key(p, source.batch, source.head, first_key + thread());
      facts.kept = kept ? *kept : 1;
    }
    return facts;
  }

  // Stores the places, row statistics and kept keys of a source. Returns the kept keys of this warp as bits.
  __device__ uint32_t store_facts(int stage, const SourceWalk &source, const Facts &facts) const {
    const fdm_problem &p = work.call.p;
    const FusedWork &division = work.fused;
    if (!Config::kSmallTiles && thread() == 0) {
      const int64_t batch = source.batch - division.first_batch, kv_head = kv_head_of(p, source.head);
      shared.places[stage] = {halves_of(division.dq, batch, source.head, first_row),
                              halves_of(division.dk, batch, kv_head, first_key),
                              halves_of(division.dv, batch, kv_head, first_key)};
    }
    shared.known.set_row(stage, thread(), facts.row, p.scale);
    return shared.known.set_key(stage, thread(), facts.kept != 0);
  }

  __device__ void load(const PipelineState<Config::kStages> &state, const SourceWalk &source, bool exists,
                       const Facts &facts) const {
    const int stage = state.index;
    const uint32_t used_rows = Config::kSmallTiles && !exists ? 0 : used;
    const int64_t kv_head = kv_head_of(work.call.p, source.head);
    Roles::producer_acquire(shared.empty[stage], state.phase);
    const uint32_t kept = store_facts(stage, source, facts);
    q.copy(shared.sRows[stage], 0, q.row_of(source.batch, source.head), used_rows);
    k.copy(shared.sKeys[stage], 0, k.row_of(source.batch, kv_head), kept);
    dout.copy(shared.sRows[stage], 1, dout.row_of(source.batch, source.head), used_rows);
    v.copy(shared.sKeys[stage], 1, v.row_of(source.batch, kv_head), kept);
    Roles::producer_commit(shared.full[stage]);
  }

  // Copies each operand as soon as the previous step has released it.
  __device__ void load_in_turn(uint32_t phase, const SourceWalk &source, const Facts &facts) const {
    const int64_t kv_head = kv_head_of(work.call.p, source.head);
    const uint32_t kept = __ballot_sync(0xffffffffu, facts.kept != 0);
    const auto copy = [&](FusedOperand operand, const Rows &rows, const char *pair, int which, int64_t head,
                          uint32_t there) {
      Roles::producer_acquire(shared.empty[operand], phase);
      if (operand == kQuery) store_facts(0, source, facts);
      rows.copy(pair, which, rows.row_of(source.batch, head), there);
      Roles::producer_commit(shared.full[operand]);
    };
    copy(kValue, v, shared.sKeys[0], 1, kv_head, kept);
    copy(kDout, dout, shared.sRows[0], 1, source.head, used);
    copy(kQuery, q, shared.sRows[0], 0, source.head, used);
    copy(kKey, k, shared.sKeys[0], 0, kv_head, kept);
  }

  __device__ void run(PipelineState<Config::kStages> &state) const {
    if (task.first >= task.past) return;
    SourceWalk source(work.call, task.plane, task.first + own_source());
    bool exists = task.first + own_source() < task.past;
    Facts facts{{INFINITY, 0.0f}, 0};
    if (!Config::kSmallTiles || exists) facts = fetch(source);
    for (int64_t index = task.first; index < task.past; index += Config::kSources, ++state) {
      SourceWalk after = source;
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) ++after;
      const bool next_exists = index + Config::kSources + own_source() < task.past;
      Facts next{{INFINITY, 0.0f}, 0};
      if (next_exists) next = fetch(after);
      if constexpr (Config::kInTurn)
        load_in_turn(state.phase, source, facts);
      else
        load(state, source, exists, facts);
      source = after;
      facts = next;
      exists = next_exists;
    }
  }
};

} // namespace fdm::cuda
