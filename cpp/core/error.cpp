// SPDX-License-Identifier: BSD-3-Clause
#include "error.h"

namespace fdm {

void raise(PyObject *type, const std::string &message) {
  PyErr_SetString(type, message.c_str());
  nb::raise_python_error();
}

namespace {

struct Meaning {
  PyObject *exception;
  const char *words;
};

Meaning meaning_of(int32_t status) {
  switch (status) {
  case FDM_INVALID_ARGUMENT:
    return {PyExc_ValueError, "invalid argument"};
  case FDM_UNSUPPORTED:
    return {PyExc_NotImplementedError, "unsupported problem"};
  case FDM_BUFFER_TOO_SMALL:
    return {PyExc_ValueError, "plan or workspace too small"};
  case FDM_OUT_OF_MEMORY:
    return {PyExc_MemoryError, "out of memory"};
  case FDM_DEVICE_ERROR:
    return {PyExc_RuntimeError, "device error"};
  case FDM_INTERNAL_ERROR:
    return {PyExc_RuntimeError, "internal error"};
  default:
    return {PyExc_RuntimeError, "unknown status"};
  }
}

} // namespace

void raise_status(const fdm_pack &pack, const char *entry, int32_t status, const char *message) {
  const Meaning meaning = meaning_of(status);
  Text text;
  text << entry << " in kernel pack " << pack.name << ": " << meaning.words << " (status " << status << ")";
  if (message[0] != '\0') text << ": " << message;
  raise(meaning.exception, text.str());
}

} // namespace fdm
