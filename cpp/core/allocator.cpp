// SPDX-License-Identifier: BSD-3-Clause
#include "allocator.h"

namespace fdm {

nb::object Allocator::empty_like(nb::handle tensor, const TensorView &view) const {
  // A named argument takes torch a sixth longer, and the copy of a contiguous tensor is contiguous without it.
  if (view.is_contiguous()) return empty_like_(tensor);
  return empty_like_(tensor, nb::arg("memory_format") = contiguous_);
}

nb::object Allocator::empty_floats(nb::handle tensor, nb::handle sizes, int32_t dtype) const {
  return tensor.attr("new_empty")(sizes, nb::arg("dtype") = dtype == FDM_FLOAT64 ? float64_ : float32_);
}

nb::object Allocator::empty_bytes(nb::handle tensor, int64_t count) const {
  return tensor.attr("new_empty")(count, nb::arg("dtype") = uint8_);
}

} // namespace fdm
