// SPDX-License-Identifier: BSD-3-Clause
//
// Checks of single arguments: kind, dtype, device, rank, memory. Each raises an exception that names the argument.
#pragma once

#include <optional>

#include "../pack.h"
#include "tensor.h"

namespace fdm {

// A set of enum fdm_dtype.
using DtypeSet = uint32_t;
constexpr DtypeSet only(int32_t dtype) { return DtypeSet{1} << dtype; }
constexpr DtypeSet float_dtypes = only(FDM_FLOAT32) | only(FDM_FLOAT16) | only(FDM_BFLOAT16);

// Reads a tensor that must have one of the dtypes.
const TensorView &read_argument(const TensorField &field, const char *name, DtypeSet allowed);
// The same, and the tensor must be on `device`.
const TensorView &read_argument(const TensorField &field, const char *name, DtypeSet allowed, Device device);

// The device of the first argument, which the pack must support.
void require_pack_device(const TensorView &view, const char *name, const fdm_pack &pack);

// The rules without limits of kernels, as the table of a pack without entry points. Nothing may run on it.
fdm_pack rules_without_pack(int32_t device_type);

// `form` describes the dimensions, such as "(batch, queries, heads, head_dim)".
void require_rank(const TensorView &view, const char *name, int rank, const char *form);

// Requires that no two elements share memory, for an output tensor.
void require_distinct_elements(const fdm_tensor &tensor, const char *name);

void require_at_least(int64_t value, const char *name, int64_t minimum);
void require_heads(int64_t heads, int64_t kv_heads);

// A 1-D contiguous uint8 tensor of at least `needed` bytes, or None if `needed` is 0.
fdm_buffer read_buffer(const TensorField &field, const char *name, int64_t needed, Device device);

// The source of a pack's workspace and, on a GPU, of its stream: the allocator of a tensor library, or the caller.
class Workspace {
public:
  explicit Workspace(const Exchange &exchange) : exchange_(&exchange) {}
  // A buffer of the caller; take() then leaves the stream unchanged.
  Workspace(const TensorField &given, const char *name) : given_(&given), name_(name) {}

  // False if the library cannot allocate or reports no stream.
  bool take(int64_t bytes, Device device, void *&stream, fdm_buffer &taken);

private:
  const Exchange *exchange_ = nullptr;
  const TensorField *given_ = nullptr;
  const char *name_ = nullptr;
  std::optional<DeviceBytes> own_;
};

// The 4-D form of a tensor whose dimension i is dimension axes[i] of the view; new_axis adds one of size 1.
constexpr int new_axis = -1;
fdm_tensor with_axes(const TensorView &view, const int (&axes)[4]);
fdm_tensor absent_tensor();
inline bool is_absent(nb::handle object) { return object.is_none(); }
inline bool is_absent(const TensorField &field) { return field.is_absent(); }

} // namespace fdm
