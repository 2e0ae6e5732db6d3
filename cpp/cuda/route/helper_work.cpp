// SPDX-License-Identifier: BSD-3-Clause
#include "helper_work.h"

#include <algorithm>

#include "workspaces.h"

namespace fdm::cuda {

FillWork fill_work(const fdm_tensor &t, bool aligned) {
  const bool vectors = aligned && (t.dtype == FDM_FLOAT16 || t.dtype == FDM_BFLOAT16);
  const int64_t elements = t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3];
  return {vectors, ceil_div(vectors ? elements / 8 : elements, kFillThreads)};
}

CombineWork combine_work(const fdm_problem &p, const RouteTable &table, const Alignment &alignment, int64_t splits) {
  const int32_t lanes = p.head_dim <= 64 ? 16 : p.head_dim <= 128 ? 32 : 64;
  return {lanes, int32_t(splits <= table.few_splits ? table.few_splits : table.max_splits),
          ceil_div(partial_rows(p), kCombineThreads / lanes), alignment.out};
}

int64_t StatisticsDivision::rows_at_once() const { return kStatisticsThreads / lanes; }
int64_t StatisticsDivision::units(int64_t batches) const {
  return ceil_div(batches * batch_rows, rows_at_once() * kStatisticsRows);
}
int64_t StatisticsDivision::blocks(int64_t batches) const {
  return std::max(std::min(units(batches), wanted_blocks), units(batches) / max_units);
}

// The lanes of a row read up to 128 elements at once.
StatisticsDivision statistics_division(const fdm_problem &p, const RouteTable &table) {
  const int32_t lanes = p.head_dim <= 32 ? 4 : p.head_dim <= 64 ? 8 : 16;
  const int64_t batches = is_varlen(p) ? 1 : p.batch;
  return {lanes, batches, total_rows(p) * p.heads, table.statistics_blocks, table.statistics_units};
}

ReductionWork reduction_work(int64_t elements, bool by_block) {
  return {by_block, by_block ? elements : ceil_div(elements, kReduceThreads)};
}

KeepParts keep_parts(const fdm_selection &s, int64_t all_rows, int64_t blocks) {
  constexpr int64_t kWarps = kKeepThreads / 32, kMinKeys = kWarps * kWarpKeys;
  KeepParts parts{};
  parts.rows = kept_rows(s);
  parts.keys = round_up(ceil_div(s.keys, max64(1, blocks / max64(1, all_rows))), kMinKeys);
  parts.count = ceil_div(s.keys, parts.keys);
  const double rank = sampled_rank(s, s.keys);
  if (rank > kSampledKeys / 8.0) return parts;
  // 1.5 times the estimate of the sample plus 24, because warps do not have equal numbers.
  parts.list_capacity = round_up(int64_t(1.5 * rank / kSampledKeys * double(parts.keys / kWarps)) + 24, 8);
  return parts;
}

SelectionChunks selection_chunks(const fdm_selection &s, const RouteTable &table) {
  const int64_t min_keys = table.select_chunk_keys, wanted = round_up(ceil_div(s.keys, table.select_chunks), min_keys);
  const int64_t keys = max64(min_keys, min64(kChunkRoom, wanted));
  if (!is_varlen(s)) return {keys, ceil_div(s.keys, keys)};
  return {keys, s.batch == 0 ? 0 : max64(s.bias.shape[3], s.mask.shape[3]) / keys + s.batch};
}

} // namespace fdm::cuda
