// SPDX-License-Identifier: BSD-3-Clause
//
// Tensors for results, made as Python code makes them: their memory belongs to the library of the tensors of a call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "tensor.h"

namespace fdm {

namespace nb = nanobind;

class Allocator {
public:
  // A function that makes a tensor like another, and its argument `memory_format` for a contiguous one; and the dtypes
  // of sums() and bytes().
  Allocator(nb::object empty_like, nb::object contiguous, nb::object float32, nb::object float64, nb::object uint8)
      : empty_like_(std::move(empty_like)), contiguous_(std::move(contiguous)), float32_(std::move(float32)),
        float64_(std::move(float64)), uint8_(std::move(uint8)) {}

  // A contiguous tensor of the shape and dtype of another, which has been read.
  nb::object like(nb::handle tensor, const TensorView &view) const;
  // Contiguous ones on the device of another: float32 or float64 of these sizes, and bytes.
  nb::object sums(nb::handle tensor, nb::handle sizes, int32_t dtype) const;
  nb::object bytes(nb::handle tensor, int64_t count) const;

private:
  nb::object empty_like_, contiguous_, float32_, float64_, uint8_;
};

} // namespace fdm
