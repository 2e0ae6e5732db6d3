// SPDX-License-Identifier: BSD-3-Clause
#include "checks.h"

#include <string>

#include "error.h"

namespace fdm {

namespace {

std::string names_of(DtypeSet set) {
  std::string names;
  for (int32_t dtype = 0; set != 0; ++dtype) {
    if ((set & only(dtype)) == 0) continue;
    set &= ~only(dtype);
    names += std::string(names.empty() ? "" : set == 0 ? " or " : ", ") + dtype_name(dtype);
  }
  return names;
}

} // namespace

const TensorView &read_argument(const TensorField &field, const char *name, DtypeSet allowed) {
  const TensorView &view = field.read(name);
  if (view.dtype->pack_code < 0 || (only(view.dtype->pack_code) & allowed) == 0)
    type_error(name, " has dtype ", view.dtype->name, ", but must have dtype ", names_of(allowed));
  return view;
}

const TensorView &read_argument(const TensorField &field, const char *name, DtypeSet allowed, Device device) {
  const TensorView &view = read_argument(field, name, allowed);
  if (!same_device(view.device, device))
    value_error(name, " is on ", view.device, ", but must be on ", device, " like the other arguments");
  return view;
}

void require_pack_device(const TensorView &view, const char *name, const fdm_pack &pack) {
  if (view.device.type != pack.device_type)
    value_error(name, " is on ", view.device, ", but kernel pack ", pack.name, " computes on ",
                pack.device_type == FDM_CPU ? "cpu" : "cuda", " tensors only");
}

fdm_pack rules_without_pack(int32_t device_type) {
  fdm_pack rules{};
  rules.name = "none";
  rules.device_type = device_type;
  rules.max_head_dim = 256;
  rules.row_bytes = 1;
  rules.dtypes = float_dtypes | only(FDM_FLOAT64);
  rules.key_bias_dtypes = only(FDM_FLOAT64);
  for (fdm_plan_layout &layout : rules.plan_layouts) layout.tile_rows = 1;
  return rules;
}

void require_rank(const TensorView &view, const char *name, int rank, const char *form) {
  if (view.rank != rank)
    value_error(name, " has shape ", shape_of(view), ", but must have ", rank, " dimensions ", form);
}

void require_distinct_elements(const fdm_tensor &tensor, const char *name) {
  for (int i = 0; i < 4; ++i)
    if (tensor.data != nullptr && tensor.stride[i] == 0 && tensor.shape[i] > 1)
      value_error(name, " has sizes ", Sizes{tensor.shape, 4}, " with strides ", Sizes{tensor.stride, 4},
                  ", but is written to, so no dimension of size above 1 may have stride 0");
}

void require_at_least(int64_t value, const char *name, int64_t minimum) {
  if (value < minimum) value_error(name, " is ", value, ", but must be at least ", minimum);
}

void require_heads(int64_t heads, int64_t kv_heads) {
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
    value_error("query has ", heads, " heads and key has ", kv_heads,
                ", but the number of query heads must be a positive multiple of the number of key heads");
}

fdm_buffer read_buffer(const TensorField &field, const char *name, int64_t needed, Device device) {
  if (field.is_absent()) {
    if (needed > 0) value_error(name, " is None, but must be a uint8 tensor of at least ", needed, " bytes");
    return {nullptr, 0};
  }
  const TensorView &view = read_argument(field, name, only(FDM_UINT8), device);
  require_rank(view, name, 1, "(bytes,)");
  if (view.shape[0] > 1 && view.stride[0] != 1)
    value_error(name, " has strides ", strides_of(view), ", but must be contiguous");
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0)
    value_error(name, " begins at address ", view.data, ", but must be 16-byte aligned");
  if (view.shape[0] < needed)
    value_error(name, " has shape ", shape_of(view), ", but must have at least ", needed, " bytes");
  return {view.data, view.shape[0]};
}

bool Workspace::take(int64_t bytes, Device device, void *&stream, fdm_buffer &taken) {
  if (given_ != nullptr) {
    taken = read_buffer(*given_, name_, bytes, device);
    return true;
  }
  if (!exchange_->current_stream(device, stream)) return false;
  own_.emplace(*exchange_, bytes, device);
  taken = {own_->data(), bytes};
  return taken.data != nullptr || bytes == 0;
}

fdm_tensor with_axes(const TensorView &view, const int (&axes)[4]) {
  fdm_tensor tensor;
  // An empty tensor has no address, whatever the producer reports.
  tensor.data = view.is_empty() ? nullptr : view.data;
  tensor.dtype = view.dtype->pack_code;
  tensor.reserved = 0;
  for (int i = 0; i < 4; ++i) {
    tensor.shape[i] = axes[i] == new_axis ? 1 : view.shape[axes[i]];
    tensor.stride[i] = axes[i] == new_axis ? 0 : view.stride[axes[i]];
  }
  return tensor;
}

// Sizes of 1, since a tensor with a dimension of 0 counts as present even without data.
fdm_tensor absent_tensor() { return {nullptr, {1, 1, 1, 1}, {0, 0, 0, 0}, FDM_FLOAT32, 0}; }

} // namespace fdm
