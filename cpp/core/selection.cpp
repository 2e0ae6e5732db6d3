// SPDX-License-Identifier: BSD-3-Clause
#include "selection.h"

#include <algorithm>

#include "error.h"

namespace fdm {

Selection::Selection(const fdm_pack &pack, const SelectionRecord &record, const Execution &execution)
    : pack_(pack), selection_{}, extents_{} {
  selection_.struct_size = sizeof(fdm_selection);
  selection_.start = selection_.end = selection_.keep = absent_tensor();
  require_at_least(execution.threads, "threads", 1);
  read_sizes(record);
  const TensorView &bias = read_argument(record.bias, "attn_bias", float_dtypes | (pack_.dtypes & only(FDM_FLOAT64)));
  require_pack_device(bias, "attn_bias", pack_);
  device_ = bias.device;
  read_sequences(record);
  read_scores(record, bias);
  selection_.flags = record.causal ? uint32_t{FDM_CAUSAL} : 0;
  selection_.context = {device_.index, execution.threads, reinterpret_cast<void *>(execution.stream)};
}

void Selection::read_sizes(const SelectionRecord &record) {
  require_at_least(record.batch, "batch", 0);
  const bool varlen = !is_absent(record.cu_seqlens.q);
  require_at_least(record.queries, varlen ? "max_seqlen_q" : "query_length", 0);
  require_at_least(record.keys, varlen ? "max_seqlen_k" : "key_length", 0);
  require_at_least(record.window, "window_size", 0);
  require_at_least(record.keep_last, "keep_last", 0);
  require_at_least(record.keep_first, "keep_first", 0);
  require_heads(record.heads, record.kv_heads);
  extents_.batch = selection_.batch = record.batch;
  extents_.heads = selection_.heads = record.heads;
  extents_.kv_heads = selection_.kv_heads = record.kv_heads;
  extents_.queries = extents_.total_queries = selection_.queries = record.queries;
  extents_.keys = extents_.total_keys = selection_.keys = record.keys;
  selection_.window = record.window;
  selection_.keep_last = std::min(record.keep_last, record.keys); // at most all keys
  selection_.keep_first = std::min(record.keep_first, record.keys);
}

void Selection::read_sequences(const SelectionRecord &record) {
  selection_.cu_seqlens_q = selection_.cu_seqlens_k = absent_tensor();
  extents_.is_varlen = is_varlen(record.cu_seqlens);
  if (!extents_.is_varlen) return;
  const auto [queries, keys] = read_cu_seqlens(record.cu_seqlens, device_);
  if (queries.batch != record.batch)
    value_error(queries.name, " has shape (", queries.batch + 1, ",), but must have shape (", record.batch + 1,
                ",) for a batch of ", record.batch);
  require_max_length(queries, record.queries);
  require_max_length(keys, record.keys);
  extents_.total_queries = queries.total;
  extents_.total_keys = keys.total;
  selection_.cu_seqlens_q = queries.tensor;
  selection_.cu_seqlens_k = keys.tensor;
}

void Selection::read_scores(const SelectionRecord &record, const TensorView &bias) {
  selection_.bias = map_scores(bias, "attn_bias", extents_);
  if (!extents_.is_varlen && selection_.bias.shape[3] != extents_.keys)
    value_error("attn_bias has shape ", shape_of(bias), ", but its last size must be the number of keys, ",
                extents_.keys);
  std::copy_n(selection_.bias.shape, 4, result_shape_);
  selection_.mask = absent_tensor();
  if (is_absent(record.mask)) return;
  const TensorView &mask = read_argument(record.mask, "attn_mask", only(FDM_BOOL), device_);
  selection_.mask = map_scores(mask, "attn_mask", extents_);
  const int64_t *shape = selection_.mask.shape;
  // If both are per query, or neither, their shapes differ only by sizes of 1 and by the two head counts. A varlen
  // per-query row spans the longest sequence, a per-key row the packed keys.
  if (shape[0] != 1) result_shape_[0] = shape[0];
  if (result_shape_[1] == 1 || shape[1] == extents_.heads) result_shape_[1] = shape[1];
  if (result_shape_[2] == 1 && shape[2] != 1) {
    result_shape_[2] = shape[2];
    if (extents_.is_varlen) result_shape_[3] = shape[3];
  }
}

int64_t Selection::workspace_bytes(const fdm_selection &selection) const {
  return bytes_of_pack(pack_, "selection_workspace_bytes", pack_.selection_workspace_bytes, &selection);
}

void Selection::require_result_shape(const fdm_tensor &result, const char *name) const {
  if (!std::equal(result_shape_, result_shape_ + 4, result.shape))
    value_error(name, " has in 4 dimensions the shape ", shape_of(result), ", but must have the broadcast shape ",
                Sizes{result_shape_, 4}, " of attn_bias and attn_mask");
  require_distinct_elements(result, name);
}

// An empty result has no address, and a pack infers the requested form from the addresses.
bool Selection::has_elements() const { return std::count(result_shape_, result_shape_ + 4, 0) == 0; }

bool Selection::select(fdm_selection selection, Workspace &workspace) const {
  if (!has_elements()) return true;
  fdm_buffer memory;
  if (!workspace.take(workspace_bytes(selection), device_, selection.context.stream, memory)) return false;
  call_pack<Gil::release>(pack_, "select", pack_.select, &selection, memory);
  return true;
}

bool Selection::write_intervals(const TensorField &start, const TensorField &end, Workspace &&workspace) const {
  if ((selection_.flags & FDM_CAUSAL) == 0)
    value_error("start and end are wanted, but causal is False; without a causal limit only keep holds a selection");
  if (result_shape_[2] != 1)
    value_error("start and end are wanted, but attn_bias or attn_mask has a row for each of ", result_shape_[2],
                " queries; only keep can hold that");
  fdm_selection selection = selection_;
  selection.start = map_intervals(read_argument(start, "start", only(FDM_INT32), device_), "start", extents_);
  selection.end = map_intervals(read_argument(end, "end", only(FDM_INT32), device_), "end", extents_);
  require_result_shape(selection.start, "start");
  require_result_shape(selection.end, "end");
  return select(selection, workspace);
}

bool Selection::write_keep(const TensorField &keep, Workspace &&workspace) const {
  fdm_selection selection = selection_;
  selection.keep = map_scores(read_argument(keep, "keep", only(FDM_BOOL), device_), "keep", extents_);
  require_result_shape(selection.keep, "keep");
  return select(selection, workspace);
}

} // namespace fdm
