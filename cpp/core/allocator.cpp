// SPDX-License-Identifier: BSD-3-Clause
#include "allocator.h"

#include "tensor.h"

namespace fdm {

namespace {

nb::object checked(PyObject *made) {
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

nb::tuple sizes_of(const TensorView &view) {
  nb::list sizes;
  for (int i = 0; i < view.rank; ++i) sizes.append(view.shape[i]);
  return nb::tuple(sizes);
}

// empty_like keeps the order of strides, which makes of a contiguous tensor a contiguous one.
bool is_contiguous(const TensorView &view) {
  int64_t expected = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.shape[i] != 1 && view.stride[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

} // namespace

nb::object Allocator::like(nb::handle tensor, const char *name) const {
  const TensorView view = read_tensor(tensor, name);
  if (!is_contiguous(view)) return tensor.attr("new_empty")(sizes_of(view));
  return empty_like_(tensor);
}

nb::object Allocator::sums(nb::handle tensor, nb::handle sizes) const {
  return tensor.attr("new_empty")(sizes, nb::arg("dtype") = float32_);
}

nb::object Allocator::bytes(nb::handle tensor, int64_t count) const {
  return tensor.attr("new_empty")(count, nb::arg("dtype") = uint8_);
}

} // namespace fdm
