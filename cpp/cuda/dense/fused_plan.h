// SPDX-License-Identifier: BSD-3-Clause
// How the work of sm90/fused.cuh is divided: the batch into launches, and a launch over blocks of threads.
#pragma once

#include <algorithm>

#include "wide_plan.h"

namespace fdm::cuda {

// Sums of the fused kernel for so many bytes at a time: about what L2 holds. Those of a sequence may take more, and those
// of dbias are beside them where the batch shares it. Where they take no more, all are in the workspace.
constexpr int64_t kMostFusedBytes = int64_t(64) << 20;
// A block of threads takes the time of so many steps before its first and after its last.
constexpr int64_t kFusedTaskSteps = 3;

inline int64_t fused_dbias_bytes(const FusedWork &work) {
  return int64_t(work.units) * work.row_tiles * work.key_tiles * kWideTileQuads * 16;
}

// The launches of the fused kernel, each with some of the batch.
struct FusedPlan {
  FusedWork work;  // of the first launch
  bool shares;     // the batch shares the bias, so all launches add to the same sums of dbias
  bool sums_dbias; // there may be such sums: blocks of threads may share a tile
  // The second halves of sums lie in the gradients of sequences to come, or in the memory of so many that are spare. Else
  // the workspace has both halves of the sums of a launch.
  bool in_gradients;
  int64_t spare;
  int64_t query_bytes, key_bytes; // of a half, for a sequence
  int64_t delta_bytes;            // for a sequence, of the deltas that are not kept for the next launch; else 0
  int64_t dbias_bytes;
  bool deltas_in_dq; // they lie where dq will be
  int64_t dim;       // columns of the sums

  int64_t sequence_bytes() const { return query_bytes + 2 * key_bytes; }
  // Whether the deltas are kept for the kernels of fixed order.
  bool keeps_deltas() const { return delta_bytes == 0 && !deltas_in_dq; }
  // What one launch needs beside the sums.
  int64_t deltas_bytes() const { return align_256(work.batches * delta_bytes); }
  int64_t bytes() const {
    return deltas_bytes() + (in_gradients ? spare : 2 * int64_t(work.batches)) * sequence_bytes() + dbias_bytes;
  }
  // The sequences of a launch, where so many are left.
  int64_t next_batches(int64_t left) const {
    return std::min<int64_t>({work.batches, left, in_gradients ? (left + spare) / 2 : left});
  }
};

// Returns FusedWork::splits that take the least time.
inline int32_t choose_splits(const FusedWork &work, bool sums_dbias, bool causal, int64_t sms) {
  const int64_t tiles = work.tiles(), sources = work.sources;
  const auto time_of = [&](int64_t splits) {
    return ceil_div(tiles * splits, sms) * (ceil_div(sources, splits) + kFusedTaskSteps);
  };
  int32_t best = 1;
  for (int32_t splits = 2; sums_dbias && splits <= std::min<int64_t>(sources, sms); ++splits)
    if (time_of(splits) < time_of(best)) best = splits;
  // A block's equal share begins and ends within a tile. With a causal mask, some of the shares would have tiles that no
  // row sees. A block counts steps in 32 bits.
  const int64_t steps = tiles * sources, share = ceil_div(steps, sms), parts = ceil_div(share, sources) + 1;
  return sums_dbias && !causal && steps < INT32_MAX && share + parts * kFusedTaskSteps < time_of(best) ? 0 : best;
}

// The plan with windows (FusedEpilogue): a task for each SM, with as many of the sources of a head of the bias as another.
inline FusedPlan plan_windows(const DenseCall &call, int sms) {
  const fdm_problem &p = call.p;
  FusedPlan plan{};
  FusedWork &work = plan.work;
  work.windows = plan.shares = plan.sums_dbias = true;
  work.row_tiles = work.key_tiles = 1;
  work.units = int32_t(p.bias.shape[1]);
  work.batches = int32_t(p.batch);
  work.sources = p.batch * call.heads;
  work.splits = int32_t(std::clamp<int64_t>(sms / work.units, 1, work.sources));
  plan.dbias_bytes = fused_dbias_bytes(work);
  return plan;
}

// The plan of clusters (FusedEpilogue::exchange), which has the deltas in dq until that is written. Only a bias that the batch shares is
// worth sums of dbias. How many clusters run at the same time is known where they are launched, which then chooses `splits`.
inline FusedPlan plan_clusters(const DenseCall &call) {
  const fdm_problem &p = call.p;
  FusedPlan plan{};
  FusedWork &work = plan.work;
  work.clusters = plan.deltas_in_dq = true;
  plan.shares = plan.sums_dbias = call.batches > 1;
  work.row_tiles = int32_t(ceil_div(p.queries, kWideTile));
  work.key_tiles = int32_t(ceil_div(p.keys, kWideTile));
  work.units = int32_t(units_of(p));
  work.batches = int32_t(p.batch);
  work.sources = sources_of(call);
  work.splits = plan.shares ? 0 : 1;
  plan.dbias_bytes = plan.sums_dbias ? fused_dbias_bytes(work) : 0;
  return plan;
}
// Returns FusedWork::splits that take the least time.
inline int32_t choose_cluster_splits(const FusedWork &work, int64_t clusters) {
  const auto time_of = [&](int64_t splits) {
    return ceil_div(work.units * splits, clusters) * (ceil_div(work.sources, splits) + kFusedTaskSteps);
  };
  int32_t best = 1;
  for (int32_t splits = 2; splits <= std::min<int64_t>(work.sources, 4 * clusters); ++splits)
    if (time_of(splits) < time_of(best)) best = splits;
  return best;
}

// Gives a launch so many sequences.
inline void set_batches(FusedWork *work, const FusedPlan &plan, const DenseCall &call, int64_t batches, bool sums_dbias,
                        int sms) {
  const fdm_problem &p = call.p;
  work->batches = int32_t(batches);
  work->units = int32_t(p.bias.shape[1] * (plan.shares ? 1 : batches));
  work->sources = (plan.shares ? batches : 1) * call.heads;
  work->splits = choose_splits(*work, sums_dbias, is_causal(p), sms);
}

// Returns the most sequences of a launch. What the workspace has for their deltas, and for the second halves of sums that
// find no gradient to come, takes less than half of the memory of lse, unless a quarter of the batch and one spare sequence
// take more.
inline int64_t plan_in_gradients(FusedPlan *plan, int64_t batch, int64_t most) {
  const int64_t sequence = plan->sequence_bytes(), deltas = plan->delta_bytes;
  const int64_t room = std::max(batch * deltas * 9 / 20, sequence + std::min(most, ceil_div(batch, 4)) * deltas);
  plan->spare = std::clamp<int64_t>((room - most * deltas) / sequence, 1, batch);
  return std::clamp<int64_t>((room - plan->spare * sequence) / deltas, 1, most);
}

inline FusedPlan plan_fused(const DenseCall &call, int sms) {
  const fdm_problem &p = call.p;
  FusedPlan plan{};
  FusedWork &work = plan.work;
  plan.shares = call.batches > 1;
  plan.dim = wide_head_dim(p);
  work.row_tiles = int32_t(ceil_div(p.queries, kWideTile));
  work.key_tiles = int32_t(ceil_div(p.keys, kWideTile));
  work.units = int32_t(p.bias.shape[1]);
  // Sums of a large dbias would take more memory than all else. Its tiles are so many that blocks need not share them; and
  // all of the batch is in one launch where its sums take less than those of dbias. Else launches have as many sequences as
  // take no more than dbias.
  const int64_t dbias_bytes = fused_dbias_bytes(work), half_row = plan.dim * int64_t(sizeof(float)) / 2;
  plan.query_bytes = p.heads * work.row_tiles * kWideTile * half_row;
  plan.key_bytes = p.kv_heads * work.key_tiles * kWideTile * half_row;
  plan.sums_dbias = dbias_bytes <= kMostFusedBytes;
  const int64_t sums_bytes = 2 * plan.sequence_bytes();
  const int64_t room = plan.shares ? max64(kMostFusedBytes, dbias_bytes) : kMostFusedBytes;
  const int64_t most = room / (sums_bytes + (plan.shares || !plan.sums_dbias ? 0 : dbias_bytes));
  int64_t batches = ceil_div(p.batch, ceil_div(p.batch, std::clamp<int64_t>(most, 1, p.batch)));
  if (plan.shares && !plan.sums_dbias && batches < p.batch) {
    plan.sums_dbias = (p.batch - batches) * sums_bytes > dbias_bytes;
    if (!plan.sums_dbias) batches = p.batch;
  }
  plan.in_gradients = batches < p.batch && p.head_dim == plan.dim;
  if (plan.in_gradients) {
    plan.query_bytes = p.heads * p.queries * half_row;
    plan.key_bytes = p.kv_heads * p.keys * half_row;
    plan.delta_bytes = p.heads * p.queries * int64_t(sizeof(float));
    batches = plan_in_gradients(&plan, p.batch, std::clamp<int64_t>(most, 1, ceil_div(p.batch, 2)));
  }
  set_batches(&work, plan, call, batches, plan.sums_dbias, sms);
  // One block of threads for each tile writes it itself.
  const bool adds_dbias = work.splits != 1 || (plan.shares && work.batches < p.batch);
  plan.dbias_bytes = adds_dbias ? fused_dbias_bytes(work) : 0;
  return plan;
}

} // namespace fdm::cuda
