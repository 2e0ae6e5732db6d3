// SPDX-License-Identifier: BSD-3-Clause
#include "forgetting.h"

#include <algorithm>
#include <string>

#include "broadcast.h"
#include "error.h"

namespace fdm {

Forgetting::Forgetting(const fdm_pack &pack, const TensorField &log_forget, const TensorField &padding,
                       const TensorField &cu_seqlens, double least, const Execution &execution)
    : pack_(pack), forgetting_{}, is_varlen_(!is_absent(cu_seqlens)) {
  if (pack.forget == nullptr)
    raise(PyExc_NotImplementedError, std::string("kernel pack ") + pack.name + " has no kernels for forget gates");
  require_at_least(execution.threads, "threads", 1);
  const TensorView &gates = read_argument(log_forget, "log_forget", float_dtypes | only(FDM_FLOAT64));
  require_pack_device(gates, "log_forget", pack);
  device_ = gates.device;
  fdm_forgetting &f = forgetting_;
  f.struct_size = sizeof(fdm_forgetting);
  f.context = {device_.index, execution.threads, reinterpret_cast<void *>(execution.stream)};
  f.least = least;
  f.padding = f.cu_seqlens = f.bias = f.start = f.end = f.dbias = f.dlog_forget = absent_tensor();
  if (is_varlen_) {
    require_rank(gates, "log_forget", 2, "(heads, total)");
    f.log_forget = with_axes(gates, {new_axis, 0, new_axis, 1});
    const SequenceLengths lengths = read_bounds(cu_seqlens, "cu_seqlens", "N", device_);
    if (lengths.total != Extents::unknown && lengths.total != f.log_forget.shape[3])
      value_error("cu_seqlens ends with ", lengths.total, ", but must end with the tokens of log_forget, ",
                  f.log_forget.shape[3]);
    f.cu_seqlens = lengths.tensor;
  } else {
    require_rank(gates, "log_forget", 3, "(batch, heads, N)");
    f.log_forget = with_axes(gates, {0, 1, new_axis, 2});
  }
  if (is_absent(padding)) return;
  const TensorView &tokens = read_argument(padding, "padding", only(FDM_BOOL), device_);
  require_rank(tokens, "padding", 2, "(batch, N)");
  f.padding = with_axes(tokens, {0, new_axis, new_axis, 1});
  if (is_varlen_ || f.padding.shape[0] != f.log_forget.shape[0] || f.padding.shape[3] != f.log_forget.shape[3])
    value_error("padding has shape ", shape_of(tokens), ", but must have the sizes (batch, N) of log_forget, ",
                shape_of(gates), ", which is not packed");
}

fdm_tensor Forgetting::read_like(const TensorField &field, const char *name, DtypeSet allowed, bool is_bias) const {
  const TensorView &view = read_argument(field, name, allowed, device_);
  const int rank = (is_varlen_ ? 2 : 3) + (is_bias ? 1 : 0);
  require_rank(view, name, rank, is_bias ? "([batch,] heads, 1, N)" : "([batch,] heads, N)");
  const fdm_tensor tensor =
      with_axes(view, {is_varlen_ ? new_axis : 0, is_varlen_ ? 0 : 1, is_bias ? rank - 2 : new_axis, rank - 1});
  if (!same_shape(tensor, forgetting_.log_forget))
    value_error(name, " has in 4 dimensions the shape ", shape_of(tensor), ", but must have the shape ",
                shape_of(forgetting_.log_forget), " of log_forget");
  return tensor;
}

int64_t Forgetting::workspace_bytes() const {
  return bytes_of_pack(pack_, "forget_workspace_bytes", pack_.forget_workspace_bytes, &forgetting_);
}

template <class Entry>
bool Forgetting::run(Entry entry, const char *name, fdm_forgetting forgetting, Workspace &workspace) const {
  if (is_empty(forgetting.log_forget)) return true;
  fdm_buffer memory;
  if (!workspace.take(workspace_bytes(), device_, forgetting.context.stream, memory)) return false;
  call_pack<Gil::release>(pack_, name, entry, &forgetting, memory);
  return true;
}

bool Forgetting::forget(const TensorField &bias, const TensorField &start, const TensorField &end, double prune,
                        Workspace &&workspace) const {
  fdm_forgetting f = forgetting_;
  f.bias = read_like(bias, "bias", only(FDM_FLOAT32) | only(FDM_FLOAT64), true);
  require_distinct_elements(f.bias, "bias");
  if (is_absent(start) != is_absent(end)) value_error("start and end must both be given, or both be None");
  if (!is_absent(start)) {
    f.prune = prune;
    f.start = read_like(start, "start", only(FDM_INT32), false);
    f.end = read_like(end, "end", only(FDM_INT32), false);
    require_distinct_elements(f.start, "start");
    require_distinct_elements(f.end, "end");
  }
  return run(pack_.forget, "forget", f, workspace);
}

bool Forgetting::forget_backward(const TensorField &dbias, const TensorField &dlog_forget,
                                 Workspace &&workspace) const {
  fdm_forgetting f = forgetting_;
  f.dbias = read_like(dbias, "dbias", only(FDM_FLOAT32) | only(FDM_FLOAT64), true);
  f.dlog_forget = read_like(dlog_forget, "dlog_forget", only(f.log_forget.dtype), false);
  require_distinct_elements(f.dlog_forget, "dlog_forget");
  return run(pack_.forget_backward, "forget_backward", f, workspace);
}

} // namespace fdm
