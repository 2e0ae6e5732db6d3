// SPDX-License-Identifier: BSD-3-Clause
//
// Python exceptions for bad arguments and for the statuses of packs. The GIL must be held.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "../pack.h"
#include "text.h"

namespace fdm {

namespace nb = nanobind;

// A library that cannot be used as a kernel pack; flash_dmattn._core.PackError in Python.
struct PackError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void raise(PyObject *type, const std::string &message);

// Messages are assembled out of line, so that valid arguments never build a string.
template <typename... Parts> [[noreturn, gnu::noinline, gnu::cold]] void value_error(const Parts &...parts) {
  Text message;
  (message << ... << parts);
  raise(PyExc_ValueError, message.str());
}

template <typename... Parts> [[noreturn, gnu::noinline, gnu::cold]] void type_error(const Parts &...parts) {
  Text message;
  (message << ... << parts);
  raise(PyExc_TypeError, message.str());
}

[[noreturn]] void raise_status(const fdm_pack &pack, const char *entry, int32_t status, const char *message);

enum class Gil { hold, release };

// Calls an entry point of a pack with these arguments and a message buffer, and raises an exception on failure.
template <Gil gil, typename... Parameters, typename... Arguments>
void call_pack(const fdm_pack &pack, const char *name, int32_t (*entry)(Parameters...), const Arguments &...arguments) {
  char message[512];
  message[0] = '\0';
  int32_t status;
  if constexpr (gil == Gil::release) {
    nb::gil_scoped_release release;
    status = entry(arguments..., message, sizeof message);
  } else {
    status = entry(arguments..., message, sizeof message);
  }
  if (status != FDM_OK) raise_status(pack, name, status, message);
}

// The number of bytes that an entry point of a pack returns for these arguments.
template <typename... Parameters, typename... Arguments>
int64_t bytes_of_pack(const fdm_pack &pack, const char *name, int32_t (*entry)(Parameters...),
                      const Arguments &...arguments) {
  int64_t bytes = 0;
  call_pack<Gil::hold>(pack, name, entry, arguments..., &bytes);
  return bytes;
}

} // namespace fdm
