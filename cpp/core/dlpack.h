// SPDX-License-Identifier: BSD-3-Clause
//
// The part of DLPack's C ABI that reads a tensor without taking ownership of it (https://github.com/dmlc/dlpack,
// ABI major version 1), besides what nanobind declares. Entries of the exchange table that are never called are declared
// as untyped pointers.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>

namespace fdm::dlpack {

constexpr uint32_t abi_major = 1;
constexpr const char *exchange_attribute = "__dlpack_c_exchange_api__";
constexpr const char *exchange_capsule = "dlpack_exchange_api";

using nanobind::dlpack::dltensor;
using nanobind::dlpack::dtype_code;

// A tensor owned by its receiver until it calls the deleter.
struct ManagedTensor {
  uint32_t major;
  uint32_t minor;
  void *context;
  void (*deleter)(ManagedTensor *self); // may be null
  uint64_t flags;
  dltensor tensor;
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
  int (*allocate)(dltensor *prototype, ManagedTensor **out, void *error_context,
                  void (*set_error)(void *error_context, const char *kind, const char *message));
  void *managed_from_object;
  void *managed_to_object;
  int (*view_from_object)(void *object, dltensor *out); // may be null; returns 0, or -1 with a Python exception set
  int (*current_stream)(int32_t device_type, int32_t device_index, void **out); // as view_from_object
};

static_assert(offsetof(ManagedTensor, tensor) == 32, "the layout of DLManagedTensorVersioned on 64-bit platforms");
static_assert(offsetof(ExchangeTable, view_from_object) == 40, "the layout of DLPackExchangeAPI on 64-bit platforms");

} // namespace fdm::dlpack
