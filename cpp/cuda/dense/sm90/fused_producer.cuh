// SPDX-License-Identifier: BSD-3-Clause
// The producer warpgroup of the fused kernel: it copies Q, dO, K and V of each source, and what belongs to rows and keys.
#pragma once

#include "fused_tasks.cuh"

namespace fdm::cuda {

template <class Config> struct DenseFusedProducer {
  using Rows = WideRows<typename Config::Pair>;

  const DenseBackward &work;
  DenseFusedShared<Config> &shared;
  const DenseFusedTask &task;
  const int first_row, first_key;
  const Rows q, dout, k, v;
  const uint32_t used; // the rows of this warp that exist

  __device__ DenseFusedProducer(const DenseBackward &own_work, DenseFusedShared<Config> &memory,
                                const DenseFusedTask &own_task)
      : work(own_work), shared(memory), task(own_task), first_row(own_task.row_tile * Config::kTile),
        first_key(own_task.key_tile * Config::kTile), q(own_work.call.p.q, own_work.call.p.head_dim, first_row),
        dout(own_work.a.dout, own_work.call.p.head_dim, first_row),
        k(own_work.call.p.k, own_work.call.p.head_dim, first_key),
        v(own_work.call.p.v, own_work.call.p.head_dim, first_key),
        used(__ballot_sync(0xffffffffu, first_row + own() < own_work.call.p.queries)) {}

  // What this thread knows of its row and its key, fetched a step ahead, as it lies in memory.
  struct Facts {
    RowStatistics row;
    uint8_t kept;
  };

  __device__ static int own() { return Roles::producer_thread(); }

  __device__ Facts fetch(const SourceWalk &source) const {
    const fdm_problem &p = work.call.p;
    Facts facts{{INFINITY, 0.0f}, 0};
    if (first_row + own() < p.queries)
      facts.row = fetch_statistics(work, {source.batch, source.head, true}, first_row + own());
    if (first_key + own() < p.keys) {
      const uint8_t *kept = kept_key(p, source.batch, source.head, first_key + own());
      facts.kept = kept ? *kept : 1;
    }
    return facts;
  }

  __device__ void load(int stage, const SourceWalk &source, const Facts &facts) const {
    const fdm_problem &p = work.call.p;
    const FusedWork &division = work.fused;
    shared.known.set_row(stage, own(), facts.row, p.scale);
    const uint32_t kept = shared.known.set_key(stage, own(), facts.kept != 0);
    const int64_t kv_head = kv_head_of(p, source.head), batch = source.batch - division.first_batch;
    if (own() == 0) {
      shared.places[stage].first_row = (batch * p.heads + source.head) * division.sum_rows() + first_row;
      shared.places[stage].first_key = (batch * p.kv_heads + kv_head) * division.sum_keys() + first_key;
    }
    q.copy(shared.sRows[stage], 0, q.row_of(source.batch, source.head), used);
    k.copy(shared.sKeys[stage], 0, k.row_of(source.batch, kv_head), kept);
    dout.copy(shared.sRows[stage], 1, dout.row_of(source.batch, source.head), used);
    v.copy(shared.sKeys[stage], 1, v.row_of(source.batch, kv_head), kept);
  }

  __device__ void run(PipelineState<Config::kStages> &state) const {
    if (task.first >= task.past) return;
    SourceWalk source(work.call, task.unit, task.first);
    Facts facts = fetch(source);
    for (int64_t index = task.first; index < task.past; ++index, ++state) {
      SourceWalk after = source;
      ++after;
      Facts next{};
      if (index + 1 < task.past) next = fetch(after);
      Roles::producer_acquire(shared.empty[state.index], state.phase);
      load(state.index, source, facts);
      Roles::producer_commit(shared.full[state.index]);
      source = after;
      facts = next;
    }
  }
};

} // namespace fdm::cuda
