// SPDX-License-Identifier: BSD-3-Clause
//
// Calls of attention from their record to their results, on the current stream of the tensors' library. What a small
// call costs is crossings into Python and back, so each of these is one.
#pragma once

#include "allocator.h"
#include "library.h"

namespace fdm {

// Each returns None, with nothing done, where the type of query has no DLPack C exchange API, or its allocator refuses.

// (out, lse), where lse is None unless it is needed.
nb::object attend(const fdm_pack &pack, int32_t threads, const Allocator &allocator, bool need_lse, nb::handle inputs);

// (out, lse, plan) of a call that has a backward pass. Unless lse is needed, it is the last part of the plan, and None
// here, if the call makes the plan. A plan without bytes is None.
nb::object attend_and_keep(const fdm_pack &pack, int32_t threads, const Allocator &allocator, bool need_lse,
                           nb::handle inputs);

// What is kept of a call: the tensors of its record, then out, lse and plan as attend_and_keep has made them, where plan is
// None if the record has one; and the settings of its record.
struct KeptCall {
  nb::tuple tensors, settings;
};

// The gradients of the fields of these names, in a tuple as long as `flags`: None where a flag does not want one, and
// behind the names.
nb::object differentiate(const fdm_pack &pack, int32_t threads, const Allocator &allocator, const KeptCall &call,
                         nb::handle dout, nb::handle dlse, nb::tuple names, nb::tuple flags);

} // namespace fdm
