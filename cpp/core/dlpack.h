// SPDX-License-Identifier: BSD-3-Clause
//
// The part of DLPack's C ABI that reads a tensor without taking ownership of it (https://github.com/dmlc/dlpack,
// ABI major version 1). Entries of the exchange table that are never called are declared as untyped pointers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdm::dlpack {

constexpr uint32_t abi_major = 1;
constexpr const char *exchange_attribute = "__dlpack_c_exchange_api__";
constexpr const char *exchange_capsule = "dlpack_exchange_api";

enum TypeCode : uint8_t {
  type_int = 0,
  type_uint = 1,
  type_float = 2,
  type_bfloat = 4,
  type_complex = 5,
  type_bool = 6
};

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void *data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t *shape;
  int64_t *strides; // in elements; may be null for a contiguous tensor before DLPack 1.2
  uint64_t byte_offset;
};

// A tensor owned by its receiver until it calls the deleter.
struct ManagedTensor {
  uint32_t major;
  uint32_t minor;
  void *context;
  void (*deleter)(ManagedTensor *self); // may be null
  uint64_t flags;
  Tensor tensor;
};

// Only the header keeps its layout across major versions; older tables are linked from it.
struct ExchangeHeader {
  uint32_t major;
  uint32_t minor;
  const ExchangeHeader *previous;
};

struct ExchangeTable {
  ExchangeHeader header;
  // may be null; returns 0, or -1 after a call of set_error
  int (*allocate)(Tensor *prototype, ManagedTensor **out, void *error_context,
                  void (*set_error)(void *error_context, const char *kind, const char *message));
  void *managed_from_object;
  void *managed_to_object;
  int (*view_from_object)(void *object, Tensor *out); // may be null; returns 0, or -1 with a Python exception set
  int (*current_stream)(int32_t device_type, int32_t device_index, void **out); // as view_from_object
};

static_assert(sizeof(Tensor) == 48 && offsetof(Tensor, shape) == 24, "the layout of DLTensor on 64-bit platforms");
static_assert(offsetof(ManagedTensor, tensor) == 32, "the layout of DLManagedTensorVersioned on 64-bit platforms");
static_assert(offsetof(ExchangeTable, view_from_object) == 40, "the layout of DLPackExchangeAPI on 64-bit platforms");

} // namespace fdm::dlpack
