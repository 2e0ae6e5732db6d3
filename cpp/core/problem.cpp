// SPDX-License-Identifier: BSD-3-Clause
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "error.h"
#include "selection.h"

namespace fdm {

namespace {

constexpr const char *packed_form = "(total, heads, head_dim) with cu_seqlens";
constexpr const char *batch_form = "(batch, length, heads, head_dim)";
constexpr const char *paged_form = "(pages, page size, heads, head_dim) with block_table";

fdm_tensor contiguous_like(const fdm_tensor &t, void *data) {
  fdm_tensor result = t;
  int64_t stride = 1;
  for (int d = 3; d >= 0; stride *= result.shape[d--]) result.stride[d] = stride;
  result.data = data;
  return result;
}

fdm_tensor bytes_like(const fdm_tensor &t, void *data) {
  fdm_tensor result = contiguous_like(t, data);
  result.dtype = FDM_UINT8;
  return result;
}

bool same_strides(const fdm_tensor &a, const fdm_tensor &b) {
  for (int d = 0; d < 4; ++d)
    if (a.shape[d] > 1 && a.stride[d] != b.stride[d]) return false;
  return true;
}

void *take_last(fdm_buffer *buffer, int64_t bytes) {
  buffer->bytes -= bytes;
  return static_cast<std::byte *>(buffer->data) + buffer->bytes;
}

} // namespace

Problem::Problem(const fdm_pack &pack, const AttentionRecord &record, const Execution &execution)
    : pack_(pack), problem_{}, extents_{}, selection_{} {
  problem_.struct_size = sizeof(fdm_problem);
  for (fdm_tensor *optional : {&problem_.mask, &problem_.start, &problem_.end, &problem_.bias, &problem_.cu_seqlens_q,
                               &problem_.cu_seqlens_k, &problem_.block_table, &problem_.sink})
    *optional = absent_tensor();
  extents_.is_varlen = is_varlen(record.cu_seqlens);
  is_paged_ = !is_absent(record.block_table);
  if (is_paged_ && !extents_.is_varlen)
    value_error("block_table is given, but needs cu_seqlens_q and cu_seqlens_k, which are None");
  read_query(record);
  read_key_value(record);
  if (extents_.is_varlen) read_sequences(record);
  problem_.batch = extents_.batch;
  problem_.queries = extents_.queries;
  problem_.keys = extents_.keys;
  read_mask(record);
  read_bias(record);
  read_sink(record);
  read_settings(record, execution);
  read_window(record);
  set_plan_bytes();
}

void Problem::read_query(const AttentionRecord &record) {
  const TensorView &query = read_argument(record.query, "query", pack_.dtypes | only(FDM_FLOAT32));
  if ((only(query.dtype->pack_code) & pack_.dtypes) == 0)
    type_error("query has dtype float32, but kernel pack ", pack_.name,
               " multiplies 16-bit numbers: convert query, key ",
               "and value to float16 or bfloat16, or pass backend='triton', which multiplies float32 as it is, without "
               "TF32");
  require_pack_device(query, "query", pack_);
  device_ = query.device;
  if (extents_.is_varlen) {
    require_rank(query, "query", 3, packed_form);
    problem_.q = with_axes(query, {new_axis, 0, 1, 2});
  } else {
    require_rank(query, "query", 4, batch_form);
    problem_.q = with_axes(query, {0, 1, 2, 3});
    extents_.batch = query.shape[0];
    extents_.queries = query.shape[1];
  }
  extents_.total_queries = problem_.q.shape[1];
  problem_.heads = extents_.heads = problem_.q.shape[2];
  problem_.head_dim = problem_.q.shape[3];
  if (problem_.head_dim < 1 || problem_.head_dim > pack_.max_head_dim)
    value_error("query has shape ", shape_of(query), ", but its head dimension must be from 1 to ", pack_.max_head_dim);
}

void Problem::read_key_value(const AttentionRecord &record) {
  const DtypeSet dtype = only(problem_.q.dtype);
  const TensorView &key = read_argument(record.key, "key", dtype, device_);
  const TensorView &value = read_argument(record.value, "value", dtype, device_);
  const bool packed = extents_.is_varlen && !is_paged_;
  require_rank(key, "key", packed ? 3 : 4, is_paged_ ? paged_form : packed ? packed_form : batch_form);
  problem_.k = packed ? with_axes(key, {new_axis, 0, 1, 2}) : with_axes(key, {0, 1, 2, 3});
  if (!extents_.is_varlen && key.shape[0] != extents_.batch)
    value_error("key has shape ", shape_of(key), ", but must have batch ", extents_.batch, " like query");
  if (problem_.k.shape[3] != problem_.head_dim)
    value_error("key has shape ", shape_of(key), ", but must have head dimension ", problem_.head_dim, " like query");
  if (is_paged_ && key.shape[1] < 1)
    value_error("key has shape ", shape_of(key), ", but pages must have a size above 0");
  problem_.kv_heads = extents_.kv_heads = problem_.k.shape[2];
  require_heads(problem_.heads, problem_.kv_heads);

  bool fits = value.rank == key.rank;
  for (int i = 0; fits && i < key.rank - 1; ++i) fits = value.shape[i] == key.shape[i];
  if (fits && value.shape[key.rank - 1] != problem_.head_dim)
    fits = pack_.narrow_value_dim > 0 && value.shape[key.rank - 1] <= pack_.narrow_value_dim;
  if (!fits) value_error("value has shape ", shape_of(value), ", but must have shape ", shape_of(key), " like key");
  problem_.v = packed ? with_axes(value, {new_axis, 0, 1, 2}) : with_axes(value, {0, 1, 2, 3});
  if (!extents_.is_varlen) extents_.keys = problem_.k.shape[1];
  extents_.total_keys = problem_.k.shape[1];
}

void Problem::read_sequences(const AttentionRecord &record) {
  const auto [queries, keys] = read_cu_seqlens(record.cu_seqlens, device_);
  require_total(queries, extents_.total_queries, "query");
  require_max_length(queries, record.max_seqlen_q);
  require_max_length(keys, record.max_seqlen_k);
  if (is_paged_) {
    problem_.block_table =
        read_block_table(record.block_table, keys, problem_.k.shape[0], problem_.k.shape[1], device_);
    extents_.total_keys = keys.total;
  } else {
    require_total(keys, extents_.total_keys, "key");
  }
  problem_.cu_seqlens_q = queries.tensor;
  problem_.cu_seqlens_k = keys.tensor;
  extents_.batch = queries.batch;
  extents_.queries = record.max_seqlen_q;
  extents_.keys = record.max_seqlen_k;
}

void Problem::read_mask(const AttentionRecord &record) {
  mask_kind_ = FDM_MASK_NONE;
  if (is_absent(record.start) != is_absent(record.end))
    value_error(is_absent(record.start) ? "attn_mask.start" : "attn_mask.end",
                " is None, but intervals need both start and end");
  if (!is_absent(record.mask) && !is_absent(record.start))
    value_error("attn_mask is given both as a boolean mask and as intervals (start, end), but only one is allowed");
  if (!is_absent(record.mask)) {
    // A given plan may be that of a mask of blocks. Then this tensor only has the mask's shape.
    const bool may_have_blocks = pack_.plan_blocks != nullptr && !is_absent(record.given_plan);
    const DtypeSet allowed = only(FDM_BOOL) | (may_have_blocks ? only(FDM_INT32) : 0);
    const TensorView &mask = read_argument(record.mask, "attn_mask", allowed, device_);
    problem_.mask = map_scores(mask, "attn_mask", extents_);
    mask_kind_ = is_per_query(problem_.mask) ? FDM_MASK_ROWS : FDM_MASK_KEYS;
  }
  if (!is_absent(record.start)) {
    const TensorView &start = read_argument(record.start, "attn_mask.start", only(FDM_INT32), device_);
    const TensorView &end = read_argument(record.end, "attn_mask.end", only(FDM_INT32), device_);
    problem_.start = map_intervals(start, "attn_mask.start", extents_);
    problem_.end = map_intervals(end, "attn_mask.end", extents_);
    if (!same_shape(problem_.start, problem_.end))
      value_error("attn_mask.end has shape ", shape_of(end), ", but must have shape ", shape_of(start),
                  " like attn_mask.start");
    mask_kind_ = FDM_MASK_INTERVALS;
  }
  require_at_least(record.max_kept, "max_kept", 0);
  problem_.max_kept = record.max_kept;
}

void Problem::read_bias(const AttentionRecord &record) {
  has_bias_ = !is_absent(record.bias);
  if (!has_bias_) return;
  const DtypeSet allowed = only(FDM_FLOAT32) | only(problem_.q.dtype);
  const TensorView &bias = read_argument(record.bias, "attn_bias", allowed | only(FDM_FLOAT64), device_);
  problem_.bias = map_scores(bias, "attn_bias", extents_);
  if ((only(problem_.bias.dtype) & allowed) != 0) return;
  if (is_per_query(problem_.bias))
    type_error("attn_bias has dtype float64, but one with a row for each query must have query's or float32");
  if ((pack_.key_bias_dtypes & only(FDM_FLOAT64)) == 0)
    raise(PyExc_NotImplementedError, std::string("attn_bias has dtype float64, which kernel pack ") + pack_.name +
                                         " cannot read; convert it to float32, or pass backend=\"reference\"");
}

void Problem::read_sink(const AttentionRecord &record) {
  has_sink_ = !is_absent(record.sink);
  if (!has_sink_) return;
  const TensorView &sink = read_argument(record.sink, "sink", only(FDM_FLOAT32) | only(problem_.q.dtype), device_);
  if (sink.rank != 1 || sink.shape[0] != extents_.heads)
    value_error("sink has shape ", shape_of(sink), ", but must have shape (heads,) = (", extents_.heads, ",)");
  problem_.sink = with_axes(sink, {0, new_axis, new_axis, new_axis});
}

void Problem::read_settings(const AttentionRecord &record, const Execution &execution) {
  problem_.scale = static_cast<float>(record.scale);
  problem_.softcap = static_cast<float>(record.softcap);
  if (!std::isfinite(problem_.scale)) value_error("softmax_scale is ", record.scale, ", but must be finite in float32");
  if (!std::isfinite(problem_.softcap) || problem_.softcap < 0)
    value_error("softcap is ", record.softcap, ", but must be 0 (off) or positive, and finite in float32");
  require_at_least(execution.threads, "threads", 1);
  const auto flag = [](bool is_set, fdm_flag bit) { return is_set ? uint32_t{bit} : 0; };
  problem_.flags = flag(record.causal, FDM_CAUSAL) | flag(record.deterministic, FDM_DETERMINISTIC) |
                   flag(record.keeps_runs, FDM_KEEPS_RUNS);
  problem_.context = {device_.index, execution.threads, reinterpret_cast<void *>(execution.stream)};
}

void Problem::read_window(const AttentionRecord &record) {
  require_at_least(record.window, "window", -1);
  require_at_least(record.keep_last, "keep_last", 0);
  require_at_least(record.keep_first, "keep_first", 0);
  if (record.window < 0 && (record.keep_last > 0 || record.keep_first > 0))
    value_error("keep_last is ", record.keep_last, " and keep_first ", record.keep_first,
                ", but both must be 0 without window");
  if (record.window >= 0 && has_bias_ && problem_.bias.dtype == FDM_FLOAT64 && problem_.q.dtype != FDM_FLOAT64)
    type_error("attn_bias has dtype float64, but a selection by it needs dtype float32 or query's");
  // Without keys or sequences nothing is selected.
  has_selection_ = record.window >= 0 && extents_.batch > 0 && extents_.keys > 0 && !is_empty(problem_.bias);
  if (!has_selection_) return;
  if ((problem_.flags & FDM_CAUSAL) == 0 || !has_bias_ || is_per_query(problem_.bias) || mask_kind_ == FDM_MASK_ROWS ||
      mask_kind_ == FDM_MASK_INTERVALS)
    value_error("window is ", record.window,
                ", but only a causal problem with a bias per key, and at most a mask per key, selects by itself");
  selection_ = selection_of(problem_, extents_, record);
  problem_.mask = absent_tensor();
  problem_.start = selection_.start;
  problem_.end = selection_.end;
  problem_.flags |= FDM_SELECTS;
  problem_.max_kept = max_kept_keys(selection_);
  mask_kind_ = FDM_MASK_INTERVALS;
}

void Problem::set_plan_bytes() {
  if (problem_.mask.dtype == FDM_INT32) { // a mask of blocks, of whose plan the pack knows a lower bound
    plan_bytes_ = bytes_of_pack(pack_, "plan_bytes", pack_.plan_bytes, &problem_);
    return;
  }
  const fdm_tensor &mask = mask_kind_ == FDM_MASK_INTERVALS ? problem_.start : problem_.mask;
  const int64_t lists = mask_kind_ == FDM_MASK_NONE ? 0 : mask.shape[0] * mask.shape[1];
  const int64_t keys = extents_.total_keys == Extents::unknown ? mask.shape[3] : extents_.total_keys;
  plan_bytes_ = fdm::plan_bytes(pack_.plan_layouts[mask_kind_], lists, keys, extents_.keys, extents_.total_queries,
                                extents_.is_varlen ? extents_.batch : 1, problem_.max_kept);
  if (has_selection_) plan_bytes_ += 2 * bound_bytes(selection_);
}

int64_t Problem::needed_plan_bytes() const {
  if (plan_bytes_ == 0 || has_selection_ || pack_.plan_bytes == nullptr) return plan_bytes_;
  return bytes_of_pack(pack_, "plan_bytes", pack_.plan_bytes, &problem_) > 0 ? plan_bytes_ : 0;
}

int64_t Problem::workspace_bytes(fdm_pass pass) const {
  const int64_t bytes = bytes_of_pack(pack_, "workspace_bytes", pack_.workspace_bytes, &problem_, pass);
  if (!has_selection_ || pass != FDM_PASS_PLAN) return bytes;
  return std::max(bytes,
                  bytes_of_pack(pack_, "selection_workspace_bytes", pack_.selection_workspace_bytes, &selection_));
}

std::string Problem::describe(nb::tuple gradients, const Selection *mask_selection) const {
  if (pack_.describe == nullptr) return "{}";
  // The address of result tensors. Nothing is written there.
  alignas(256) static std::byte memory[256];
  const auto like = [](const fdm_tensor &t) { return contiguous_like(t, memory); };
  fdm_problem problem = problem_;
  fdm_tensor prototype = out_prototype();
  if (gradients.size() == 0) problem.flags |= FDM_FORWARD_ONLY;
  if (needs_row_copies(gradients.size() > 0)) {
    const auto padded_size = [&](int64_t size) { return round_up(size, pack_.row_bytes / 2); };
    problem.head_dim = padded_size(problem.head_dim);
    prototype.shape[3] = padded_size(prototype.shape[3]);
    for (fdm_tensor *t : {&problem.q, &problem.k, &problem.v}) {
      t->shape[3] = padded_size(t->shape[3]);
      *t = like(*t);
    }
  }
  fdm_forward_args forward{};
  forward.struct_size = sizeof forward;
  forward.out = like(prototype);
  forward.lse = contiguous_lse(memory, extents_, lse_dtype());
  fdm_backward_args backward{};
  backward.struct_size = sizeof backward;
  backward.out = backward.dout = forward.out;
  backward.lse = forward.lse;
  if (gradients.size() > 0 && out_rest_bytes() > 0)
    forward.out_rest = backward.out_rest = bytes_like(prototype, memory);
  const std::pair<const char *, std::pair<fdm_tensor *, const fdm_tensor *>> all[] = {
      {"query", {&backward.dq, &problem.q}},
      {"key", {&backward.dk, &problem.k}},
      {"value", {&backward.dv, &problem.v}},
      {"bias", {&backward.dbias, &problem.bias}},
      {"sink", {&backward.dsink, &problem.sink}}};
  for (nb::handle wanted : gradients)
    for (const auto &[name, tensors] : all)
      if (std::strcmp(nb::cast<const char *>(wanted), name) == 0) *tensors.first = like(*tensors.second);
  std::string text(size_t{1} << 14, '\0');
  const fdm_selection *selection = has_selection_   ? &selection_
                                   : mask_selection ? &mask_selection->as_fdm_selection()
                                                    : nullptr;
  call_pack<Gil::hold>(pack_, "describe", pack_.describe, &problem, selection, &forward,
                       gradients.size() ? &backward : nullptr, text.data(), text.size());
  text.resize(std::strlen(text.c_str()));
  return text;
}

fdm_tensor Problem::read_key_list_tensor(const TensorField &field, const char *name, DtypeSet allowed,
                                         bool may_be_per_head, int64_t length) const {
  const TensorView &view = read_argument(field, name, allowed, device_);
  const int first = extents_.is_varlen ? 1 : 0;
  require_rank(view, name, 4 - first,
               extents_.is_varlen ? "(heads, total_q, length)" : "(batch, heads, queries, length)");
  const fdm_tensor t = extents_.is_varlen ? with_axes(view, {new_axis, 0, 1, 2}) : with_axes(view, {0, 1, 2, 3});
  const int64_t heads = t.shape[1];
  const bool fits_heads = heads == 1 || heads == extents_.kv_heads || (may_be_per_head && heads == extents_.heads);
  if (t.shape[0] != problem_.q.shape[0] || !fits_heads || t.shape[2] != problem_.q.shape[1] || t.shape[3] < 1 ||
      (length > 0 && t.shape[3] != length))
    value_error(name, " has shape ", shape_of(view), ", but must have a row of ", length > 0 ? "as many" : "some",
                " elements for each of ", problem_.q.shape[1], " queries, and 1 or ", extents_.kv_heads, " heads",
                may_be_per_head ? ", or one for each query head" : "");
  return t;
}

void Problem::set_key_lists(const TensorField &indices, const TensorField &index_bias) {
  if (!pack_.lists_keys)
    raise(PyExc_NotImplementedError, std::string("kernel pack ") + pack_.name + " has no kernels for lists of keys");
  if (mask_kind_ != FDM_MASK_NONE || has_selection_)
    value_error("indices are given, but there is a mask or a window, too");
  const fdm_tensor listed = read_key_list_tensor(indices, "indices", only(FDM_INT32), false, 0);
  const fdm_tensor bias = is_absent(index_bias)
                              ? absent_tensor()
                              : read_key_list_tensor(index_bias, "index_bias", float_dtypes, true, listed.shape[3]);
  problem_.indices = listed;
  problem_.index_bias = bias;
  has_index_bias_ = !is_absent(index_bias);
}

void Problem::set_mask_blocks(const TensorField &numbers, const TensorField &contents, int64_t kept, int64_t partial) {
  if (pack_.plan_blocks == nullptr)
    raise(PyExc_NotImplementedError, std::string("kernel pack ") + pack_.name + " has no plans of blocks");
  if (mask_kind_ != FDM_MASK_NONE || has_selection_ || extents_.is_varlen)
    value_error("blocks are given, but the call has another mask or a window, or its sequences are packed");
  const TensorView &places = read_argument(numbers, "numbers", only(FDM_INT32), device_);
  require_rank(places, "numbers", 4, "(batch, heads, blocks of queries, blocks of keys)");
  const TensorView &pairs = read_argument(contents, "contents", only(FDM_BOOL), device_);
  require_rank(pairs, "contents", 3, "(blocks, queries, keys)");
  if (pairs.shape[1] < 1 || pairs.shape[2] < 1 || !(pairs.is_empty() || pairs.is_contiguous()))
    value_error("contents has shape ", shape_of(pairs), ", but must be contiguous, with blocks of at least one pair");
  const auto blocks_of = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  const int64_t rows = blocks_of(extents_.queries, pairs.shape[1]), columns = blocks_of(extents_.keys, pairs.shape[2]);
  const bool fits =
      (places.shape[0] == 1 || places.shape[0] == extents_.batch) &&
      (places.shape[1] == 1 || places.shape[1] == extents_.kv_heads || places.shape[1] == extents_.heads) &&
      places.shape[2] == rows && places.shape[3] == columns;
  if (!fits)
    value_error("numbers has shape ", shape_of(places), ", but must have 1 or ", extents_.batch, " batch entries, 1, ",
                extents_.kv_heads, " or ", extents_.heads, " heads, ", rows, " blocks of queries and ", columns,
                " blocks of keys");
  require_at_least(kept, "kept", 0);
  require_at_least(partial, "partial", 0);
  mask_blocks_.struct_size = sizeof mask_blocks_;
  mask_blocks_.numbers = with_axes(places, {0, 1, 2, 3});
  mask_blocks_.contents = with_axes(pairs, {0, 1, 2, new_axis});
  mask_blocks_.kept = kept;
  mask_blocks_.partial = partial;
  problem_.mask = {
      places.data, {places.shape[0], places.shape[1], extents_.queries, extents_.keys}, {0, 0, 0, 0}, FDM_INT32, 0};
  mask_kind_ = FDM_MASK_ROWS;
  plan_bytes_ = bytes_of_pack(pack_, "block_plan_bytes", pack_.block_plan_bytes, &problem_, &mask_blocks_);
}

fdm_tensor Problem::read_like(const TensorField &field, const char *name, const fdm_tensor &prototype,
                              const char *prototype_name) const {
  const TensorView &view = read_argument(field, name, only(prototype.dtype), device_);
  // Only varlen tensors lack the batch dimension, and backward supports no pages, so all have the rank of query.
  const int first = extents_.is_varlen ? 1 : 0, rank = 4 - first;
  bool equal = view.rank == rank;
  for (int i = 0; equal && i < rank; ++i) equal = view.shape[i] == prototype.shape[first + i];
  if (!equal)
    value_error(name, " has shape ", shape_of(view), ", but must have shape ", Sizes{prototype.shape + first, rank},
                " like ", prototype_name);
  return extents_.is_varlen ? with_axes(view, {new_axis, 0, 1, 2}) : with_axes(view, {0, 1, 2, 3});
}

namespace {

// Whether rows of 16-bit elements can be copied this many bytes at a time.
template <class Tensor> bool has_aligned_rows(const Tensor &t, int rank, int32_t bytes) {
  bool aligned = reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.stride[rank - 1] == 1;
  for (int d = 0; d + 1 < rank; ++d) aligned &= t.shape[d] <= 1 || t.stride[d] % (bytes / 2) == 0;
  return aligned;
}

} // namespace

bool Problem::needs_row_copies(bool for_backward) const {
  const int32_t bytes = pack_.row_bytes;
  if (bytes == 1 || (!for_backward && forward_takes_any_rows(problem_))) return false;
  return problem_.head_dim % (bytes / 2) != 0 ||
         !(has_aligned_rows(problem_.q, 4, bytes) && has_aligned_rows(problem_.k, 4, bytes) &&
           has_aligned_rows(problem_.v, 4, bytes));
}

bool Problem::can_read_rows(const TensorField &field, const char *name) const {
  const TensorView &view = read_argument(field, name, only(problem_.q.dtype), device_);
  return pack_.row_bytes == 1 || view.rank == 0 || has_aligned_rows(view, view.rank, pack_.row_bytes);
}

fdm_tensor Problem::out_prototype() const {
  fdm_tensor prototype = problem_.q;
  prototype.shape[3] = problem_.v.shape[3];
  return prototype;
}

fdm_tensor Problem::read_lse(const TensorField &field, const char *name) const {
  return map_lse(read_argument(field, name, only(lse_dtype()), device_), name, extents_);
}

fdm_tensor Problem::read_out(const TensorField &field) const {
  const fdm_tensor out = read_like(field, "out", out_prototype(), "query, with the head dimension of value");
  require_distinct_elements(out, "out");
  return out;
}

fdm_tensor Problem::read_mass(const TensorField &field) const {
  const TensorView &view = read_argument(field, "mass", only(FDM_FLOAT32), device_);
  const int first = extents_.is_varlen ? 1 : 0, rank = 3 - first;
  fdm_tensor mass{};
  mass.shape[0] = extents_.is_varlen ? 1 : extents_.batch;
  mass.shape[1] = extents_.heads;
  mass.shape[2] = extents_.is_varlen ? problem_.k.shape[1] : extents_.keys;
  mass.shape[3] = 1;
  mass = contiguous_like(mass, view.is_empty() ? nullptr : view.data);
  bool fits = view.rank == rank;
  for (int i = 0; fits && i < rank; ++i)
    fits = view.shape[i] == mass.shape[first + i] &&
           (view.shape[i] == 1 || view.stride[i] == mass.stride[first + i] || view.is_empty());
  if (!fits)
    value_error("mass has shape ", shape_of(view), ", but must be contiguous, of shape ",
                Sizes{mass.shape + first, rank});
  return mass;
}

int64_t Problem::out_rest_bytes() const {
  const bool sums_rows = (has_bias_ || has_sink_) && !(has_bias_ && is_per_query(problem_.bias));
  if (!pack_.wants_out_rest || problem_.q.dtype == FDM_FLOAT32 || !sums_rows) return 0;
  const int64_t (&shape)[4] = problem_.q.shape;
  return shape[0] * shape[1] * shape[2] * problem_.v.shape[3];
}

int64_t Problem::kept_bytes(bool has_lse, bool has_plan, int64_t rest_bytes) const {
  int64_t bytes = has_plan ? 0 : needed_plan_bytes();
  if (rest_bytes > 0) bytes = padded(bytes) + padded(rest_bytes);
  return has_lse ? bytes : padded(bytes) + lse_bytes(extents_, lse_dtype());
}

Kept Problem::split_kept_buffer(fdm_buffer buffer, const TensorField &lse, const TensorField &given_plan,
                                int64_t rest_bytes) const {
  const fdm_tensor lse_tensor =
      is_absent(lse) ? contiguous_lse(take_last(&buffer, lse_bytes(extents_, lse_dtype())), extents_, lse_dtype())
                     : read_lse(lse, "lse");
  fdm_tensor out_rest = absent_tensor();
  if (rest_bytes > 0) out_rest = bytes_like(out_prototype(), take_last(&buffer, padded(rest_bytes)));
  Kept kept = split_plan_buffer(
      is_absent(given_plan) ? buffer : read_buffer(given_plan, "plan", needed_plan_bytes(), device_), lse_tensor);
  kept.out_rest = out_rest;
  return kept;
}

Kept Problem::split_plan_buffer(fdm_buffer plan, const fdm_tensor &lse) const {
  Kept kept{problem_.start, problem_.end, plan, lse, absent_tensor()};
  if (!has_selection_) return kept;
  const int64_t bytes = bound_bytes(selection_);
  std::byte *const begin = static_cast<std::byte *>(plan.data);
  kept.start.data = begin;
  kept.end.data = begin + bytes;
  kept.plan = {begin + 2 * bytes, plan.bytes - 2 * bytes};
  return kept;
}

fdm_problem Problem::problem_with(const Kept &kept, PlanUse use) const {
  fdm_problem problem = problem_;
  if (use == PlanUse::forward_only) problem.flags |= FDM_FORWARD_ONLY;
  problem.start = kept.start;
  problem.end = kept.end;
  return problem;
}

void Problem::run_plan(const Kept &kept, fdm_buffer workspace, PlanUse use) const {
  const fdm_problem problem = problem_with(kept, use);
  if (!has_selection_) return call_pack<Gil::release>(pack_, "plan", pack_.plan, &problem, kept.plan, workspace);
  fdm_selection selection = selection_;
  selection.context = problem_.context;
  selection.start = kept.start;
  selection.end = kept.end;
  call_pack<Gil::release>(pack_, "select_and_plan", pack_.select_and_plan, &selection, &problem, kept.plan, workspace);
}

void Problem::run_forward(const fdm_tensor &out, const Kept &kept, int32_t splits, fdm_buffer workspace,
                          PlanUse use) const {
  fdm_forward_args args{};
  args.struct_size = sizeof args;
  args.splits = splits;
  args.out = out;
  args.lse = kept.lse;
  args.out_rest = kept.out_rest;
  const fdm_problem problem = problem_with(kept, use);
  call_pack<Gil::release>(pack_, "forward", pack_.forward, &problem, &args, kept.plan, workspace);
}

void Problem::plan(const TensorField &plan, const TensorField &workspace) const {
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", plan_bytes_, device_);
  if (mask_blocks_.struct_size > 0)
    return call_pack<Gil::release>(pack_, "plan_blocks", pack_.plan_blocks, &problem_, &mask_blocks_, plan_buffer);
  const fdm_buffer workspace_buffer = read_buffer(workspace, "workspace", workspace_bytes(FDM_PASS_PLAN), device_);
  run_plan(split_plan_buffer(plan_buffer, absent_tensor()), workspace_buffer);
}

void Problem::forward(const TensorField &out, const TensorField &lse, const TensorField &plan,
                      const TensorField &workspace, int32_t splits) const {
  require_at_least(splits, "splits", 0);
  const fdm_tensor out_tensor = read_out(out);
  const fdm_tensor lse_tensor = read_lse(lse, "lse");
  require_distinct_elements(lse_tensor, "lse");
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", needed_plan_bytes(), device_);
  const fdm_buffer workspace_buffer = read_buffer(workspace, "workspace", workspace_bytes(FDM_PASS_FORWARD), device_);
  run_forward(out_tensor, split_plan_buffer(plan_buffer, lse_tensor), splits, workspace_buffer);
}

Problem::AttendSizes Problem::attend_sizes(bool has_lse, bool has_plan) const {
  AttendSizes sizes{kept_bytes(has_lse, has_plan, 0), workspace_bytes(FDM_PASS_FORWARD)};
  if (!has_plan && needed_plan_bytes() > 0) sizes.work = std::max(sizes.work, workspace_bytes(FDM_PASS_PLAN));
  return sizes;
}

bool Problem::attend(const TensorField &out, const TensorField &lse, const TensorField &plan, Workspace &&workspace) {
  const AttendSizes sizes = attend_sizes(!is_absent(lse), !is_absent(plan));
  fdm_buffer memory;
  if (!workspace.take(sizes.bytes(), device_, problem_.context.stream, memory)) return false;
  const fdm_buffer work{static_cast<std::byte *>(memory.data) + padded(sizes.kept), sizes.work};
  const fdm_tensor out_tensor = read_out(out);
  const Kept kept = split_kept_buffer({memory.data, sizes.kept}, lse, plan, 0);
  require_distinct_elements(kept.lse, "lse");
  const PlanUse use = is_absent(plan) ? PlanUse::forward_only : PlanUse::kept;
  if (is_absent(plan) && kept.plan.bytes > 0) run_plan(kept, work, use);
  run_forward(out_tensor, kept, 0, work, use);
  return true;
}

bool Problem::keep(const TensorField &out, const TensorField &lse, const TensorField &given_plan,
                   const TensorField &kept, Workspace &&workspace) {
  const bool is_given = !is_absent(given_plan), is_planned = is_given || needed_plan_bytes() == 0;
  const int64_t plan_work = is_planned ? 0 : workspace_bytes(FDM_PASS_PLAN);
  fdm_buffer work;
  if (!workspace.take(std::max(plan_work, workspace_bytes(FDM_PASS_FORWARD)), device_, problem_.context.stream, work))
    return false;
  const fdm_tensor out_tensor = read_out(out);
  const fdm_buffer buffer = read_buffer(kept, "kept", kept_bytes(!is_absent(lse), is_given), device_);
  const Kept parts = split_kept_buffer(buffer, lse, given_plan, out_rest_bytes());
  if (parts.out_rest.data != nullptr && !same_strides(out_tensor, parts.out_rest))
    value_error("out has strides ", strides_of(out.view()), ", but must be contiguous");
  if (!is_planned) run_plan(parts, work);
  run_forward(out_tensor, parts, 0, work);
  return true;
}

bool Problem::backward(const BackwardArguments &arguments, const TensorField &given_plan, const TensorField &kept_field,
                       Workspace &&workspace) {
  const int64_t rest_bytes = is_absent(kept_field) ? 0 : out_rest_bytes();
  const int64_t needed = kept_bytes(!is_absent(arguments.lse), !is_absent(given_plan), rest_bytes);
  const char *const name = is_absent(given_plan) && is_absent(kept_field) ? "plan" : "kept";
  const Kept kept =
      split_kept_buffer(read_buffer(kept_field, name, needed, device_), arguments.lse, given_plan, rest_bytes);
  const fdm_backward_args args = read_gradients(arguments, kept);
  fdm_buffer work;
  if (!workspace.take(workspace_bytes(FDM_PASS_BACKWARD), device_, problem_.context.stream, work)) return false;
  const fdm_problem problem = problem_with(kept);
  call_pack<Gil::release>(pack_, "backward", pack_.backward, &problem, &args, kept.plan, work);
  return true;
}

void Problem::key_mass(const TensorField &mass, const TensorField &lse, const TensorField &plan,
                       const TensorField &workspace) const {
  if (is_paged_) raise(PyExc_NotImplementedError, "block_table is given, but paged keys have no key mass");
  if (pack_.key_mass == nullptr) raise(PyExc_NotImplementedError, "the kernel pack has no kernel for the key mass");
  fdm_key_mass_args args{};
  args.struct_size = sizeof args;
  args.lse = read_lse(lse, "lse");
  args.mass = read_mass(mass);
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", needed_plan_bytes(), device_);
  const fdm_buffer work = read_buffer(workspace, "workspace", workspace_bytes(FDM_PASS_KEY_MASS), device_);
  const Kept kept = split_plan_buffer(plan_buffer, args.lse);
  const fdm_problem problem = problem_with(kept);
  call_pack<Gil::release>(pack_, "key_mass", pack_.key_mass, &problem, &args, kept.plan, work);
}

fdm_backward_args Problem::read_gradients(const BackwardArguments &arguments, const Kept &kept) const {
  if (is_paged_)
    raise(PyExc_NotImplementedError, "block_table is given, but paged keys and values have no backward pass");
  fdm_backward_args args{};
  args.struct_size = sizeof args;
  args.dlse = args.dbias = args.dsink = args.dindex_bias = absent_tensor();
  args.out = read_like(arguments.out, "out", out_prototype(), "query, with the head dimension of value");
  args.lse = kept.lse;
  args.out_rest = kept.out_rest;
  args.dout = read_like(arguments.dout, "dout", out_prototype(), "out");
  if (!is_absent(arguments.dlse)) args.dlse = read_lse(arguments.dlse, "dlse");

  const Gradients &gradients = arguments.gradients;
  const auto read_gradient = [&](const TensorField &field, const char *name, const fdm_tensor &prototype,
                                 const char *prototype_name) {
    if (is_absent(field)) return absent_tensor();
    const fdm_tensor gradient = read_like(field, name, prototype, prototype_name);
    require_distinct_elements(gradient, name);
    return gradient;
  };
  args.dq = read_gradient(gradients.query, "dq", problem_.q, "query");
  args.dk = read_gradient(gradients.key, "dk", problem_.k, "key");
  args.dv = read_gradient(gradients.value, "dv", problem_.v, "value");
  if (!is_absent(gradients.bias)) {
    if (!has_bias_) value_error("dbias is given, but the problem has no attn_bias");
    const TensorView &dbias = read_argument(gradients.bias, "dbias", only(problem_.bias.dtype), device_);
    args.dbias = map_scores(dbias, "dbias", extents_);
    if (!same_shape(args.dbias, problem_.bias))
      value_error("dbias has shape ", shape_of(dbias), ", but must have the shape of attn_bias, in 4 dimensions ",
                  shape_of(problem_.bias));
    require_distinct_elements(args.dbias, "dbias");
  }
  if (!is_absent(gradients.sink)) {
    if (!has_sink_) value_error("dsink is given, but the problem has no sink");
    const TensorView &dsink = read_argument(gradients.sink, "dsink", only(problem_.sink.dtype), device_);
    if (dsink.rank != 1 || dsink.shape[0] != extents_.heads)
      value_error("dsink has shape ", shape_of(dsink), ", but must have shape (", extents_.heads, ",) like sink");
    args.dsink = with_axes(dsink, {0, new_axis, new_axis, new_axis});
    require_distinct_elements(args.dsink, "dsink");
  }
  if (!is_absent(gradients.index_bias)) {
    if (!has_index_bias_) value_error("dindex_bias is given, but the problem has no index_bias");
    args.dindex_bias = read_key_list_tensor(gradients.index_bias, "dindex_bias", only(problem_.index_bias.dtype), true,
                                            problem_.index_bias.shape[3]);
    if (!same_shape(args.dindex_bias, problem_.index_bias))
      value_error("dindex_bias has shape ", shape_of(args.dindex_bias), ", but must have the shape of index_bias, ",
                  shape_of(problem_.index_bias));
    require_distinct_elements(args.dindex_bias, "dindex_bias");
  }
  return args;
}

Gradients read_gradients(nb::dict by_name) {
  Gradients gradients;
  Py_ssize_t read = 0;
  const auto read_field = [&](const char *name, TensorField &field) {
    PyObject *found = PyDict_GetItemString(by_name.ptr(), name);
    if (found == nullptr) return;
    field = TensorField(found);
    ++read;
  };
  gradients.for_each_field(read_field);
  read_field("index_bias", gradients.index_bias);
  if (read != PyDict_Size(by_name.ptr()))
    value_error("gradients are wanted of ", nb::str(by_name.keys()).c_str(),
                ", but there are those of query, key, value, bias, sink and index_bias only");
  return gradients;
}

} // namespace fdm
