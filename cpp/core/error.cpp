// SPDX-License-Identifier: BSD-3-Clause
#include "error.h"

namespace fdm {

void raise(PyObject *type, const std::string &message) {
  PyErr_SetString(type, message.c_str());
  nb::raise_python_error();
}

namespace {

PyObject *exception_of(int32_t status) {
  switch (status) {
  case FDM_INVALID_ARGUMENT:
  case FDM_BUFFER_TOO_SMALL:
    return PyExc_ValueError;
  case FDM_UNSUPPORTED:
    return PyExc_NotImplementedError;
  case FDM_OUT_OF_MEMORY:
    return PyExc_MemoryError;
  default:
    return PyExc_RuntimeError;
  }
}

const char *meaning_of(int32_t status) {
  switch (status) {
  case FDM_INVALID_ARGUMENT:
    return "invalid argument";
  case FDM_UNSUPPORTED:
    return "unsupported problem";
  case FDM_BUFFER_TOO_SMALL:
    return "plan or workspace too small";
  case FDM_OUT_OF_MEMORY:
    return "out of memory";
  case FDM_DEVICE_ERROR:
    return "device error";
  case FDM_INTERNAL_ERROR:
    return "internal error";
  default:
    return "unknown status";
  }
}

} // namespace

void raise_status(const fdm_pack &pack, const char *entry, int32_t status, const char *message) {
  Text text;
  text << entry << " in kernel pack " << pack.name << ": " << meaning_of(status) << " (status " << status << ")";
  if (message[0] != '\0') text << ": " << message;
  raise(exception_of(status), text.str());
}

} // namespace fdm
