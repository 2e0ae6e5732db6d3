// SPDX-License-Identifier: BSD-3-Clause
// How the work of sm90/fused.cuh is divided: the batch into launches, and a launch over blocks of threads.
#pragma once

#include <algorithm>

#include "wide_plan.h"

namespace fdm::cuda {

// Sums of the fused kernel for so many bytes at a time: about what L2 holds. Those of a sequence may take more, and those
// of dbias are beside them where the batch shares it.
constexpr int64_t kMostFusedBytes = int64_t(64) << 20;
// A block of threads takes the time of so many steps before its first and after its last.
constexpr int64_t kFusedTaskSteps = 3;

inline int64_t fused_dbias_bytes(const FusedWork &work) {
  return int64_t(work.units) * work.row_tiles * work.key_tiles * kWideTileQuads * 16;
}

// The launches of the fused kernel, each with an equal part of the batch; the last may have less.
struct FusedPlan {
  FusedWork work; // of the first launch
  int64_t dq_bytes, key_bytes, dbias_bytes;
  bool shares;     // the batch shares the bias, so all launches add to the same sums of dbias
  bool sums_dbias; // there may be such sums: blocks of threads may share a tile

  int64_t bytes() const { return dq_bytes + 2 * key_bytes + dbias_bytes; }
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

// The plan of sm90/fused_windows.cuh: a task for each SM, with as many of the sources of a head of the bias as another.
inline FusedPlan plan_windows(const DenseCall &call, int sms) {
  const fdm_problem &p = call.p;
  FusedPlan plan{};
  FusedWork &work = plan.work;
  work.windows = plan.shares = plan.sums_dbias = true;
  work.row_tiles = work.key_tiles = 1;
  work.dim = kWindowHeadDim;
  work.units = int32_t(p.bias.shape[1]);
  work.batches = int32_t(p.batch);
  work.sources = p.batch * call.heads;
  work.splits = int32_t(std::clamp<int64_t>(sms / work.units, 1, work.sources));
  plan.dbias_bytes = fused_dbias_bytes(work);
  return plan;
}

inline FusedPlan plan_fused(const DenseCall &call, int sms) {
  const fdm_problem &p = call.p;
  const int64_t bias_heads = p.bias.shape[1];
  FusedPlan plan{};
  FusedWork &work = plan.work;
  plan.shares = call.batches > 1;
  work.row_tiles = int32_t(ceil_div(p.queries, kWideTile));
  work.key_tiles = int32_t(ceil_div(p.keys, kWideTile));
  work.dim = wide_head_dim(p);
  const int64_t row_bytes = work.dim * int64_t(sizeof(float));
  work.units = int32_t(bias_heads);
  // Sums of a large dbias would take more memory than all else. Its tiles are so many that blocks need not share them; and
  // all of the batch is in one launch where its sums take less than those of dbias. Else launches have as many sequences as
  // take no more than dbias.
  const int64_t dbias_bytes = fused_dbias_bytes(work);
  plan.sums_dbias = dbias_bytes <= kMostFusedBytes;
  const int64_t sequence_bytes = (p.heads * work.sum_rows() + 2 * p.kv_heads * work.sum_keys()) * row_bytes;
  const int64_t batch_bytes = sequence_bytes + (plan.shares || !plan.sums_dbias ? 0 : dbias_bytes);
  const int64_t room = plan.shares ? max64(kMostFusedBytes, dbias_bytes) : kMostFusedBytes;
  const int64_t launches = ceil_div(p.batch, std::clamp<int64_t>(room / batch_bytes, 1, p.batch));
  work.batches = int32_t(ceil_div(p.batch, launches));
  if (plan.shares && !plan.sums_dbias && work.batches < p.batch) {
    plan.sums_dbias = (p.batch - work.batches) * sequence_bytes > dbias_bytes;
    if (!plan.sums_dbias) work.batches = int32_t(p.batch);
  }
  if (!plan.shares) work.units *= work.batches;
  work.sources = int64_t(plan.shares ? work.batches : 1) * call.heads;
  work.splits = choose_splits(work, plan.sums_dbias, is_causal(p), sms);
  plan.dq_bytes = work.batches * p.heads * work.sum_rows() * row_bytes;
  plan.key_bytes = work.batches * p.kv_heads * work.sum_keys() * row_bytes;
  // One block of threads for each tile writes it itself.
  const bool adds_dbias = work.splits != 1 || (plan.shares && work.batches < p.batch);
  plan.dbias_bytes = adds_dbias ? fused_dbias_bytes(work) : 0;
  return plan;
}

} // namespace fdm::cuda
