// SPDX-License-Identifier: BSD-3-Clause
//
// Views of tensors that Python owns, without copies.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "../pack.h"
#include "dlpack.h"
#include "text.h"

namespace fdm {

namespace nb = nanobind;

struct Dtype {
  const char *name;
  dlpack::dtype_code code;
  uint8_t bits;
  int32_t pack_code; // enum fdm_dtype, or -1 for a dtype that only messages name
};

struct Device {
  int32_t type; // DLPack's device type
  int32_t index;
};

bool same_device(Device a, Device b);

struct TensorView {
  // More than the 4 dimensions of a pack's tensor, so that messages can show the shape of a tensor with too many.
  static constexpr int max_rank = 8;

  void *data;
  const Dtype *dtype;
  Device device;
  int rank;
  int64_t shape[max_rank];
  int64_t stride[max_rank]; // in elements

  bool is_empty() const;
  bool operator==(const TensorView &other) const;
  // Whether the strides are exactly those of a new tensor, also in dimensions of size 0 or 1, where others would be
  // valid.
  bool is_contiguous() const;
};

// A tensor argument or None. It is an object whose type has DLPack's C exchange API, or the tuple (data_ptr, dtype,
// shape, strides_in_elements, device_type, device_index). It is read once.
class TensorField {
public:
  TensorField() : object_(nb::none()) {}
  TensorField(nb::handle object) : object_(nb::borrow(object)) {}
  TensorField(TensorField &&other) noexcept : object_(other.release()) { take_view(other); }
  TensorField &operator=(TensorField &&other) noexcept {
    object_ = other.release();
    take_view(other);
    return *this;
  }

  bool is_absent() const { return type_ == nullptr && object_.is_none(); }
  nb::handle object() const { return object_; }

  // `name` is the argument's name for messages.
  const TensorView &read(const char *name) const;
  // The same for an object of a type with the API; returns false, without an exception, if it cannot be read.
  bool try_read() const;
  const TensorView &view() const { return view_; } // valid once the tensor has been read

  // Only sizes and strides are needed: the address may be None.
  void allow_no_memory() { needs_memory_ = false; }

  // Releases the object but keeps the view.
  nb::object release() { return std::exchange(object_, nb::none()); }
  // Whether `other` has the same type and an equal view, including the address; or both are None.
  bool matches(nb::handle other) const;

private:
  void take_view(const TensorField &other) {
    type_ = other.type_;
    needs_memory_ = other.needs_memory_;
    if (type_ != nullptr) view_ = other.view_;
  }

  nb::object object_;
  mutable PyTypeObject *type_ = nullptr; // type of the object once it has been read
  mutable TensorView view_;
  bool needs_memory_ = true;
};

// The allocator and streams of the library of a tensor's type, through the same API.
class Exchange {
public:
  // For a type without the API every request fails.
  explicit Exchange(nb::handle tensor);

  bool can_allocate() const { return table_ != nullptr && table_->allocate != nullptr; }

  // The stream on which the library enqueues work, if the device has streams.
  bool current_stream(Device device, void *&stream) const;

private:
  friend class DeviceBytes;
  const dlpack::ExchangeTable *table_;
};

// Device memory from the library's allocator, freed at the end of the scope.
class DeviceBytes {
public:
  DeviceBytes(const Exchange &exchange, int64_t bytes, Device device);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes &) = delete;
  DeviceBytes &operator=(const DeviceBytes &) = delete;

  // Null if no bytes are needed, or if the allocation fails.
  void *data() const;

private:
  dlpack::ManagedTensor *memory_ = nullptr;
};

const char *dtype_name(int32_t pack_code);

// Printed like a Python tuple.
struct Sizes {
  const int64_t *sizes;
  int rank;
};
Text &operator<<(Text &stream, Sizes sizes);
inline Sizes shape_of(const TensorView &view) { return {view.shape, view.rank}; }
inline Sizes strides_of(const TensorView &view) { return {view.stride, view.rank}; }

Text &operator<<(Text &stream, Device device);

} // namespace fdm

template <> struct nanobind::detail::type_caster<fdm::TensorField> {
  NB_TYPE_CASTER(fdm::TensorField, const_name("object"))

  bool from_python(handle object, uint8_t, cleanup_list *) noexcept {
    value = fdm::TensorField(object);
    return true;
  }
};
