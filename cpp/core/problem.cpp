// SPDX-License-Identifier: BSD-3-Clause
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "error.h"

namespace fdm {

namespace {

constexpr const char *packed_form = "(total, heads, head_dim) with cu_seqlens";
constexpr const char *batch_form = "(batch, length, heads, head_dim)";
constexpr const char *paged_form = "(pages, page size, heads, head_dim) with block_table";

} // namespace

Problem::Problem(const fdm_pack &pack, const AttentionRecord &record, const Execution &execution)
    : pack_(pack), problem_{}, extents_{}, selection_{} {
  problem_.struct_size = sizeof(fdm_problem);
  extents_.varlen = is_varlen(record.cu_seqlens);
  paged_ = !is_absent(record.block_table);
  if (paged_ && !extents_.varlen)
    value_error("block_table is given, but needs cu_seqlens_q and cu_seqlens_k, which are None");
  read_query(record);
  read_key_value(record);
  if (extents_.varlen) {
    read_sequences(record);
  } else {
    problem_.cu_seqlens_q = problem_.cu_seqlens_k = problem_.block_table = absent_tensor();
  }
  problem_.batch = extents_.batch;
  problem_.queries = extents_.queries;
  problem_.keys = extents_.keys;
  read_mask(record);
  read_bias(record);
  read_sink(record);
  read_settings(record, execution);
  read_window(record);
  measure_plan();
}

void Problem::read_query(const AttentionRecord &record) {
  const TensorView query = read_argument(record.query, "query", pack_.dtypes | only(FDM_FLOAT32));
  if ((only(query.dtype->pack_code) & pack_.dtypes) == 0)
    type_error("query has dtype float32, but kernel pack ", pack_.name,
               " multiplies 16-bit numbers: convert query, key ",
               "and value to float16 or bfloat16, or pass backend='triton', which multiplies float32 as it is, without "
               "TF32");
  require_pack_device(query, "query", pack_);
  device_ = query.device;
  if (extents_.varlen) {
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
  const TensorView key = read_argument(record.key, "key", dtype, device_);
  const TensorView value = read_argument(record.value, "value", dtype, device_);
  const bool packed = extents_.varlen && !paged_;
  require_rank(key, "key", packed ? 3 : 4, paged_ ? paged_form : packed ? packed_form : batch_form);
  problem_.k = packed ? with_axes(key, {new_axis, 0, 1, 2}) : with_axes(key, {0, 1, 2, 3});
  if (!extents_.varlen && key.shape[0] != extents_.batch)
    value_error("key has shape ", shape_of(key), ", but must have batch ", extents_.batch, " like query");
  if (problem_.k.shape[3] != problem_.head_dim)
    value_error("key has shape ", shape_of(key), ", but must have head dimension ", problem_.head_dim, " like query");
  if (paged_ && key.shape[1] < 1) value_error("key has shape ", shape_of(key), ", but pages must have a size above 0");
  problem_.kv_heads = extents_.kv_heads = problem_.k.shape[2];
  require_heads(problem_.heads, problem_.kv_heads);

  bool equal = value.rank == key.rank;
  for (int i = 0; equal && i < key.rank; ++i) equal = value.shape[i] == key.shape[i];
  if (!equal) value_error("value has shape ", shape_of(value), ", but must have shape ", shape_of(key), " like key");
  problem_.v = packed ? with_axes(value, {new_axis, 0, 1, 2}) : with_axes(value, {0, 1, 2, 3});
  if (!extents_.varlen) extents_.keys = problem_.k.shape[1];
  extents_.total_keys = problem_.k.shape[1];
}

void Problem::read_sequences(const AttentionRecord &record) {
  const auto [queries, keys] = read_cu_seqlens(record.cu_seqlens, device_);
  require_total(queries, extents_.total_queries, "query");
  require_longest(queries, record.max_seqlen_q);
  require_longest(keys, record.max_seqlen_k);
  problem_.block_table = absent_tensor();
  if (paged_) {
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
  problem_.mask = problem_.start = problem_.end = absent_tensor();
  mask_kind_ = FDM_MASK_NONE;
  if (is_absent(record.start) != is_absent(record.end))
    value_error(is_absent(record.start) ? "attn_mask.start" : "attn_mask.end",
                " is None, but intervals need both start and end");
  if (!is_absent(record.mask) && !is_absent(record.start))
    value_error("attn_mask is given both as a boolean mask and as intervals (start, end), but only one is allowed");
  if (!is_absent(record.mask)) {
    const TensorView mask = read_argument(record.mask, "attn_mask", only(FDM_BOOL), device_);
    problem_.mask = map_scores(mask, "attn_mask", extents_);
    mask_kind_ = is_per_query(problem_.mask) ? FDM_MASK_ROWS : FDM_MASK_KEYS;
  }
  if (!is_absent(record.start)) {
    const TensorView start = read_argument(record.start, "attn_mask.start", only(FDM_INT32), device_);
    const TensorView end = read_argument(record.end, "attn_mask.end", only(FDM_INT32), device_);
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
  problem_.bias = absent_tensor();
  has_bias_ = !is_absent(record.bias);
  if (!has_bias_) return;
  const DtypeSet allowed = only(FDM_FLOAT32) | only(problem_.q.dtype);
  const TensorView bias = read_argument(record.bias, "attn_bias", allowed | only(FDM_FLOAT64), device_);
  problem_.bias = map_scores(bias, "attn_bias", extents_);
  if ((only(problem_.bias.dtype) & allowed) != 0) return;
  if (is_per_query(problem_.bias))
    type_error("attn_bias has dtype float64, but one with a row for each query must have query's or float32");
  if ((pack_.key_bias_dtypes & only(FDM_FLOAT64)) == 0)
    raise(PyExc_NotImplementedError, std::string("attn_bias has dtype float64, which kernel pack ") + pack_.name +
                                         " cannot read; convert it to float32, or pass backend=\"reference\"");
}

void Problem::read_sink(const AttentionRecord &record) {
  problem_.sink = absent_tensor();
  has_sink_ = !is_absent(record.sink);
  if (!has_sink_) return;
  const TensorView sink = read_argument(record.sink, "sink", only(FDM_FLOAT32) | only(problem_.q.dtype), device_);
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
  problem_.flags =
      (record.causal ? uint32_t{FDM_CAUSAL} : 0) | (record.deterministic ? uint32_t{FDM_DETERMINISTIC} : 0);
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
  // Where there are no keys, or no sequences, nothing is selected.
  selects_ = record.window >= 0 && extents_.batch > 0 && extents_.keys > 0 && problem_.bias.data != nullptr;
  if (!selects_) return;
  selection_ = selection_of(problem_, extents_, record);
  problem_.mask = absent_tensor();
  problem_.start = selection_.start;
  problem_.start.data = this; // what is present has an address, which placed() replaces
  problem_.end = problem_.start;
  problem_.max_kept = most_kept(selection_);
  mask_kind_ = FDM_MASK_INTERVALS;
}

Problem::Placed Problem::placed(fdm_buffer plan, PlanUse use) const {
  Placed placed{problem_, selection_, plan};
  if (use == PlanUse::forward_only) placed.problem.flags |= FDM_FORWARD_ONLY;
  if (!selects_) return placed;
  const int64_t bytes = bound_bytes(selection_);
  placed.selection.context = problem_.context;
  std::byte *const base = static_cast<std::byte *>(plan.data);
  placed.problem.start.data = placed.selection.start.data = base;
  placed.problem.end.data = placed.selection.end.data = base + bytes;
  placed.plan = {base + 2 * bytes, plan.bytes - 2 * bytes};
  return placed;
}

void Problem::measure_plan() {
  const fdm_tensor &mask = mask_kind_ == FDM_MASK_INTERVALS ? problem_.start : problem_.mask;
  const int64_t lists = mask_kind_ == FDM_MASK_NONE ? 0 : mask.shape[0] * mask.shape[1];
  const int64_t keys = extents_.total_keys == Extents::unknown ? mask.shape[3] : extents_.total_keys;
  plan_bytes_ = fdm::plan_bytes(pack_.plan_layouts[mask_kind_], lists, keys, extents_.keys, extents_.total_queries,
                                extents_.varlen ? extents_.batch : 1, problem_.max_kept);
  if (selects_) plan_bytes_ += 2 * bound_bytes(selection_);
}

int64_t Problem::needed_plan_bytes() const {
  if (plan_bytes_ == 0 || selects_ || pack_.plan_bytes == nullptr) return plan_bytes_;
  int64_t bytes = 0;
  call_pack<Gil::hold>(pack_, "plan_bytes", [&](char *message, size_t message_bytes) {
    return pack_.plan_bytes(&problem_, &bytes, message, message_bytes);
  });
  return bytes > 0 ? plan_bytes_ : 0;
}

int64_t Problem::workspace_bytes(fdm_pass pass) const {
  int64_t bytes = 0;
  call_pack<Gil::hold>(pack_, "workspace_bytes", [&](char *message, size_t message_bytes) {
    return pack_.workspace_bytes(&problem_, pass, &bytes, message, message_bytes);
  });
  if (!selects_ || pass != FDM_PASS_PLAN) return bytes;
  int64_t selection_bytes = 0;
  call_pack<Gil::hold>(pack_, "selection_workspace_bytes", [&](char *message, size_t message_bytes) {
    return pack_.selection_workspace_bytes(&selection_, &selection_bytes, message, message_bytes);
  });
  return std::max(bytes, selection_bytes);
}

std::string Problem::describe(nb::tuple gradients) const {
  if (pack_.describe == nullptr) return "{}";
  // Memory that results would have. Nothing is written there.
  alignas(256) static std::byte memory[256];
  const auto like = [](const fdm_tensor &t) {
    fdm_tensor own = t;
    int64_t stride = 1;
    for (int d = 3; d >= 0; stride *= own.shape[d--]) own.stride[d] = stride;
    own.data = memory;
    return own;
  };
  fdm_problem problem = problem_;
  if (gradients.size() == 0) problem.flags |= FDM_FORWARD_ONLY;
  fdm_forward_args forward{};
  forward.struct_size = sizeof forward;
  forward.out = like(problem.q);
  forward.lse = contiguous_lse(memory, extents_, lse_dtype());
  fdm_backward_args backward{};
  backward.struct_size = sizeof backward;
  backward.out = backward.dout = forward.out;
  backward.lse = forward.lse;
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
  call_pack<Gil::hold>(pack_, "describe", [&](char *message, size_t message_bytes) {
    return pack_.describe(&problem, selects_ ? &selection_ : nullptr, &forward, gradients.size() ? &backward : nullptr,
                          text.data(), text.size(), message, message_bytes);
  });
  text.resize(std::strlen(text.c_str()));
  return text;
}

fdm_tensor Problem::read_like(nb::handle object, const char *name, const fdm_tensor &model,
                              const char *model_name) const {
  const TensorView view = read_argument(object, name, only(model.dtype), device_);
  // Only varlen tensors lack the batch dimension, and backward knows no pages, so all have the rank of query.
  const int first = extents_.varlen ? 1 : 0, rank = 4 - first;
  bool equal = view.rank == rank;
  for (int i = 0; equal && i < rank; ++i) equal = view.shape[i] == model.shape[first + i];
  if (!equal)
    value_error(name, " has shape ", shape_of(view), ", but must have shape ", Sizes{model.shape + first, rank},
                " like ", model_name);
  return extents_.varlen ? with_axes(view, {new_axis, 0, 1, 2}) : with_axes(view, {0, 1, 2, 3});
}

fdm_tensor Problem::read_lse(nb::handle object, const char *name) const {
  return map_lse(read_argument(object, name, only(lse_dtype()), device_), name, extents_);
}

void Problem::plan(nb::handle plan, nb::handle workspace) const {
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", plan_bytes_, device_);
  const fdm_buffer workspace_buffer = read_buffer(workspace, "workspace", workspace_bytes(FDM_PASS_PLAN), device_);
  run_plan(plan_buffer, workspace_buffer);
}

void Problem::run_plan(fdm_buffer plan, fdm_buffer workspace, PlanUse use) const {
  const Placed own = placed(plan, use);
  call_pack<Gil::release>(pack_, selects_ ? "select_and_plan" : "plan", [&](char *message, size_t message_bytes) {
    if (selects_)
      return pack_.select_and_plan(&own.selection, &own.problem, own.plan, workspace, message, message_bytes);
    return pack_.plan(&own.problem, own.plan, workspace, message, message_bytes);
  });
}

void Problem::forward(nb::handle out, nb::handle lse, nb::handle plan, nb::handle workspace, int32_t splits) const {
  require_at_least(splits, "splits", 0);
  const fdm_tensor out_tensor = read_out(out);
  const fdm_tensor lse_tensor = read_lse(lse, "lse");
  require_distinct_elements(lse_tensor, "lse");
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", needed_plan_bytes(), device_);
  const fdm_buffer workspace_buffer = read_buffer(workspace, "workspace", workspace_bytes(FDM_PASS_FORWARD), device_);
  run_forward(out_tensor, lse_tensor, splits, plan_buffer, workspace_buffer);
}

void Problem::run_forward(const fdm_tensor &out, const fdm_tensor &lse, int32_t splits, fdm_buffer plan,
                          fdm_buffer workspace, PlanUse use) const {
  fdm_forward_args args{};
  args.struct_size = sizeof args;
  args.splits = splits;
  args.out = out;
  args.lse = lse;
  const Placed own = placed(plan, use);
  call_pack<Gil::release>(pack_, "forward", [&](char *message, size_t message_bytes) {
    return pack_.forward(&own.problem, &args, own.plan, workspace, message, message_bytes);
  });
}

fdm_tensor Problem::read_out(nb::handle object) const {
  const fdm_tensor out = read_like(object, "out", problem_.q, "query");
  require_distinct_elements(out, "out");
  return out;
}

Problem::Scratch Problem::scratch_of(bool has_lse, bool has_plan) const {
  Scratch scratch{};
  if (!has_lse) scratch.lse = padded(lse_bytes(extents_, lse_dtype()));
  scratch.workspace = workspace_bytes(FDM_PASS_FORWARD);
  if (const int64_t needed = has_plan ? 0 : needed_plan_bytes()) {
    scratch.plan = padded(needed);
    scratch.workspace = std::max(scratch.workspace, workspace_bytes(FDM_PASS_PLAN));
  }
  return scratch;
}

void Problem::attend(nb::handle out, nb::handle lse, nb::handle plan, nb::handle scratch) const {
  const Scratch sizes = scratch_of(!is_absent(lse), !is_absent(plan));
  attend_in(read_buffer(scratch, "scratch", sizes.bytes(), device_).data, sizes, out, lse, plan);
}

bool Problem::attend(const Exchange &exchange, nb::handle out, nb::handle lse, nb::handle plan) {
  if (!exchange.current_stream(device_, problem_.context.stream)) return false;
  const Scratch sizes = scratch_of(!is_absent(lse), !is_absent(plan));
  const DeviceBytes memory(exchange, sizes.bytes(), device_);
  if (memory.data() == nullptr && sizes.bytes() > 0) return false;
  attend_in(memory.data(), sizes, out, lse, plan);
  return true;
}

int64_t Problem::kept_bytes(bool has_lse) const {
  const int64_t needed = needed_plan_bytes();
  return has_lse ? needed : padded(needed) + lse_bytes(extents_, lse_dtype());
}

fdm_tensor Problem::lse_behind(fdm_buffer plan) const {
  if (plan.bytes < kept_bytes(false)) value_error("lse is None, but there is no room for it behind plan");
  std::byte *const end = static_cast<std::byte *>(plan.data) + plan.bytes;
  return contiguous_lse(end - lse_bytes(extents_, lse_dtype()), extents_, lse_dtype());
}

bool Problem::attend_and_keep(const Exchange &exchange, nb::handle out, nb::handle lse, nb::handle plan,
                              bool makes_plan) {
  if (!exchange.current_stream(device_, problem_.context.stream)) return false;
  const int64_t bytes =
      std::max(workspace_bytes(FDM_PASS_FORWARD), makes_plan ? workspace_bytes(FDM_PASS_PLAN) : int64_t{0});
  const DeviceBytes memory(exchange, bytes, device_);
  if (memory.data() == nullptr && bytes > 0) return false;
  const fdm_tensor out_tensor = read_out(out);
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", needed_plan_bytes(), device_),
                   workspace{memory.data(), bytes};
  const fdm_tensor lse_tensor = is_absent(lse) ? lse_behind(plan_buffer) : read_lse(lse, "lse");
  if (makes_plan) run_plan(plan_buffer, workspace);
  run_forward(out_tensor, lse_tensor, 0, plan_buffer, workspace);
  return true;
}

void Problem::attend_in(void *memory, const Scratch &sizes, nb::handle out, nb::handle lse, nb::handle plan) const {
  const bool has_lse = !is_absent(lse);
  std::byte *const begin = static_cast<std::byte *>(memory);
  void *const lse_data = begin + sizes.plan;
  const fdm_buffer workspace{begin + sizes.plan + sizes.lse, sizes.workspace};

  const fdm_tensor out_tensor = read_out(out);
  const fdm_tensor lse_tensor = has_lse ? read_lse(lse, "lse") : contiguous_lse(lse_data, extents_, lse_dtype());
  if (has_lse) require_distinct_elements(lse_tensor, "lse");
  if (!is_absent(plan)) {
    run_forward(out_tensor, lse_tensor, 0, read_buffer(plan, "plan", needed_plan_bytes(), device_), workspace);
    return;
  }
  const fdm_buffer own_plan{begin, sizes.plan};
  if (sizes.plan > 0) run_plan(own_plan, workspace, PlanUse::forward_only);
  run_forward(out_tensor, lse_tensor, 0, own_plan, workspace, PlanUse::forward_only);
}

void Problem::backward(const BackwardArguments &arguments, nb::handle plan, nb::handle workspace) const {
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", needed_plan_bytes(), device_);
  const fdm_backward_args args = read_gradients(arguments, plan_buffer);
  run_backward(args, plan_buffer, read_buffer(workspace, "workspace", workspace_bytes(FDM_PASS_BACKWARD), device_));
}

bool Problem::backward(const Exchange &exchange, const BackwardArguments &arguments, nb::handle plan) {
  if (!exchange.current_stream(device_, problem_.context.stream)) return false;
  const fdm_buffer plan_buffer = read_buffer(plan, "plan", needed_plan_bytes(), device_);
  const fdm_backward_args args = read_gradients(arguments, plan_buffer);
  const int64_t bytes = workspace_bytes(FDM_PASS_BACKWARD);
  const DeviceBytes memory(exchange, bytes, device_);
  if (memory.data() == nullptr && bytes > 0) return false;
  run_backward(args, plan_buffer, {memory.data(), bytes});
  return true;
}

void Problem::run_backward(const fdm_backward_args &args, fdm_buffer plan, fdm_buffer workspace) const {
  const Placed own = placed(plan);
  call_pack<Gil::release>(pack_, "backward", [&](char *message, size_t message_bytes) {
    return pack_.backward(&own.problem, &args, own.plan, workspace, message, message_bytes);
  });
}

fdm_backward_args Problem::read_gradients(const BackwardArguments &arguments, fdm_buffer plan) const {
  if (paged_) raise(PyExc_NotImplementedError, "block_table is given, but paged keys and values have no backward pass");
  fdm_backward_args args{};
  args.struct_size = sizeof args;
  args.out = read_like(arguments.out, "out", problem_.q, "query");
  args.lse = is_absent(arguments.lse) ? lse_behind(plan) : read_lse(arguments.lse, "lse");
  args.dout = read_like(arguments.dout, "dout", problem_.q, "query");
  args.dlse = is_absent(arguments.dlse) ? absent_tensor() : read_lse(arguments.dlse, "dlse");

  Py_ssize_t read = 0;
  const auto find = [&](const char *field) {
    PyObject *found = PyDict_GetItemString(arguments.gradients.ptr(), field);
    if (found != nullptr) ++read;
    return nb::handle(found != nullptr ? found : Py_None);
  };
  const auto read_gradient = [&](const char *field, const char *name, const fdm_tensor &model) {
    const nb::handle object = find(field);
    if (is_absent(object)) return absent_tensor();
    const fdm_tensor gradient = read_like(object, name, model, field);
    require_distinct_elements(gradient, name);
    return gradient;
  };
  args.dq = read_gradient("query", "dq", problem_.q);
  args.dk = read_gradient("key", "dk", problem_.k);
  args.dv = read_gradient("value", "dv", problem_.v);
  args.dbias = absent_tensor();
  if (const nb::handle object = find("bias"); !is_absent(object)) {
    if (!has_bias_) value_error("dbias is given, but the problem has no attn_bias");
    const TensorView dbias = read_argument(object, "dbias", only(problem_.bias.dtype), device_);
    args.dbias = map_scores(dbias, "dbias", extents_);
    if (!same_shape(args.dbias, problem_.bias))
      value_error("dbias has shape ", shape_of(dbias), ", but must have the shape of attn_bias, in 4 dimensions ",
                  shape_of(problem_.bias));
    require_distinct_elements(args.dbias, "dbias");
  }
  args.dsink = absent_tensor();
  if (const nb::handle object = find("sink"); !is_absent(object)) {
    if (!has_sink_) value_error("dsink is given, but the problem has no sink");
    const TensorView dsink = read_argument(object, "dsink", only(problem_.sink.dtype), device_);
    if (dsink.rank != 1 || dsink.shape[0] != extents_.heads)
      value_error("dsink has shape ", shape_of(dsink), ", but must have shape (", extents_.heads, ",) like sink");
    args.dsink = with_axes(dsink, {0, new_axis, new_axis, new_axis});
    require_distinct_elements(args.dsink, "dsink");
  }
  if (read != PyDict_Size(arguments.gradients.ptr()))
    value_error("gradients are wanted of ", nb::str(arguments.gradients.keys()).c_str(),
                ", but there are those of query, key, value, bias and sink only");
  return args;
}

} // namespace fdm
