// SPDX-License-Identifier: BSD-3-Clause
//
// Calls whose arguments need no closer look. Reading them here takes a tenth of the time that it takes in Python, which
// for a small problem is longer than its kernels.
#pragma once

#include <nanobind/nanobind.h>

namespace fdm {

namespace nb = nanobind;

// The arguments of flash_dmattn_func that a usual call has; what may be None has Python's default then.
struct UsualArguments {
  nb::handle query, key, value, bias, sink, scale, causal, softcap, window, keep_last, keep_first;
  bool deterministic;
};

// The fields of a record, in order, of a dense call without a mask; None for a call that has to be looked at more
// closely, be it wrong or only rare. A Problem checks what is not asked here.
nb::object usual_call(const UsualArguments &arguments);

} // namespace fdm
