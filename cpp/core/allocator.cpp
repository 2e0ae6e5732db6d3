// SPDX-License-Identifier: BSD-3-Clause
#include "allocator.h"

namespace fdm {

nb::object Allocator::like(nb::handle tensor) const { return empty_like_(tensor); }

nb::object Allocator::sums(nb::handle tensor, nb::handle sizes) const {
  return tensor.attr("new_empty")(sizes, nb::arg("dtype") = float32_);
}

nb::object Allocator::bytes(nb::handle tensor, int64_t count) const {
  return tensor.attr("new_empty")(count, nb::arg("dtype") = uint8_);
}

} // namespace fdm
