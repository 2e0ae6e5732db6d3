// SPDX-License-Identifier: BSD-3-Clause
#include "window.h"

#include <algorithm>
#include <limits>

namespace fdm {

namespace {

// Batch elements or heads that alias the same memory have the same selection; one list serves them.
fdm_tensor without_expansion(fdm_tensor tensor) {
  for (int i = 0; i < 2; ++i)
    if (tensor.stride[i] == 0) tensor.shape[i] = 1;
  return tensor;
}

int64_t larger_of(int64_t bias, int64_t mask, int64_t full) {
  if (bias == full || mask == full) return full;
  return std::max(bias, mask);
}

} // namespace

fdm_selection selection_of(const fdm_problem &problem, const Extents &extents, const AttentionRecord &record) {
  fdm_selection selection{};
  selection.struct_size = sizeof selection;
  selection.flags = FDM_CAUSAL;
  selection.context = problem.context;
  selection.batch = problem.batch;
  selection.heads = problem.heads;
  selection.kv_heads = problem.kv_heads;
  selection.queries = problem.queries;
  selection.keys = problem.keys;
  selection.window = record.window;
  selection.keep_last = std::min(record.keep_last, problem.keys); // at most all keys
  selection.keep_first = std::min(record.keep_first, problem.keys);
  selection.bias = without_expansion(problem.bias);
  selection.mask = without_expansion(problem.mask);
  selection.cu_seqlens_q = problem.cu_seqlens_q;
  selection.cu_seqlens_k = problem.cu_seqlens_k;
  selection.keep = absent_tensor();
  if (selection.bias.shape[3] == 1 && !extents.is_varlen) {
    selection.bias.shape[3] = extents.keys; // equal biases: the selection keeps the first of them
    selection.bias.stride[3] = 0;
  }
  const int64_t batch = larger_of(selection.bias.shape[0], selection.mask.shape[0], problem.batch);
  const int64_t heads = larger_of(selection.bias.shape[1], selection.mask.shape[1], problem.heads);
  const int64_t keys = selection.bias.shape[3];
  selection.start = {nullptr, {batch, heads, 1, keys}, {heads * keys, keys, keys, 1}, FDM_INT32, 0};
  selection.end = selection.start;
  return selection;
}

int64_t max_kept_keys(const fdm_selection &selection) {
  const int64_t by_position = selection.keep_last + selection.keep_first;
  return std::max<int64_t>(1,
                           std::min(selection.window, std::numeric_limits<int64_t>::max() - by_position) + by_position);
}

int64_t bound_bytes(const fdm_selection &selection) {
  const int64_t *shape = selection.start.shape;
  return padded(shape[0] * shape[1] * shape[3] * static_cast<int64_t>(sizeof(int32_t)));
}

} // namespace fdm
