// SPDX-License-Identifier: BSD-3-Clause
//
// Result tensors, allocated through Python: their memory belongs to the tensor library of a call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "tensor.h"

namespace fdm {

namespace nb = nanobind;

class Allocator {
public:
  // empty_like of the library, its `memory_format` argument for a contiguous tensor, and the dtypes of empty_floats()
  // and empty_bytes().
  Allocator(nb::object empty_like, nb::object contiguous, nb::object float32, nb::object float64, nb::object uint8)
      : empty_like_(std::move(empty_like)), contiguous_(std::move(contiguous)), float32_(std::move(float32)),
        float64_(std::move(float64)), uint8_(std::move(uint8)) {}

  // A contiguous tensor with the shape and dtype of `tensor`, whose view has been read.
  nb::object empty_like(nb::handle tensor, const TensorView &view) const {
    // A named argument takes torch a sixth longer, and the copy of a contiguous tensor is contiguous without it.
    if (view.is_contiguous()) return empty_like_(tensor);
    return empty_like_(tensor, nb::arg("memory_format") = contiguous_);
  }
  // Contiguous tensors on the device of `tensor`: float32 or float64 of the given sizes, and uint8.
  nb::object empty_floats(nb::handle tensor, nb::handle sizes, int32_t dtype) const {
    return tensor.attr("new_empty")(sizes, nb::arg("dtype") = dtype == FDM_FLOAT64 ? float64_ : float32_);
  }
  nb::object empty_bytes(nb::handle tensor, int64_t count) const {
    return tensor.attr("new_empty")(count, nb::arg("dtype") = uint8_);
  }

private:
  nb::object empty_like_, contiguous_, float32_, float64_, uint8_;
};

} // namespace fdm
