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

// The gradients of the fields that `wanted` names, by name. What the others are the record of inputs tells, plan included.
struct ForwardResults {
  nb::handle dout, dlse, out, lse;
};
nb::object differentiate(const fdm_pack &pack, int32_t threads, const Allocator &allocator,
                         const ForwardResults &results, nb::tuple wanted, nb::handle inputs);

} // namespace fdm
