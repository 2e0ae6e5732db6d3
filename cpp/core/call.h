// SPDX-License-Identifier: BSD-3-Clause
//
// An attention call, from its arguments to its gradients, on the current stream of the tensor library. Transitions
// between Python and C++ dominate the cost of a small call. Therefore each step is one transition, and the arguments
// are read once.
#pragma once

#include <memory>

#include "allocator.h"
#include "problem.h"

namespace fdm {

class Call {
public:
  explicit Call(std::unique_ptr<AttentionRecord> record) : record_(std::move(record)) {}

  // The fields of the record, in order; None for tensors that keep() has released.
  nb::tuple fields() { return as_tuple(*record_); }

  // The methods below return None without effect if the type of query has no DLPack C exchange API, or if its
  // allocator fails. With narrow values they also return None if rows would need copies, or if not all gradients are
  // requested.

  // Returns (out, lse); lse is None unless need_lse is true.
  nb::object attend(const Pack &pack, int32_t threads, const Allocator &allocator, bool need_lse);

  // The same for a call with a backward pass. Returns the inputs of that pass: the tensors of the record, out, lse,
  // and the other kept data (Problem::keep), or None if that has no bytes. If need_lse is false and the record has no
  // plan, lse is None and is the last part of the other kept data. The call then holds no references to the tensors.
  nb::object keep(const Pack &pack, int32_t threads, const Allocator &allocator, bool need_lse);

  // Returns the gradients of the fields of `Gradients`, in a tuple as long as `flags`. Entries are None where a flag
  // is not set, and beyond the fields. `kept` is the result of keep(), or has its form. Returns None if hooks of
  // saved tensors have replaced the tensors of keep(): the caller then makes another call from them.
  nb::object differentiate(const Pack &pack, int32_t threads, const Allocator &allocator, nb::tuple kept,
                           nb::handle dout, nb::handle dlse, nb::tuple flags);

  // The lse in the last part of the kept data, by tensor operations, because its memory may be unreadable. An empty
  // lse is allocated like `out`.
  nb::object lse_within(nb::handle kept, nb::handle out, nb::handle dtype) const;

private:
  // The results and the problem of keep().
  struct Computed {
    Problem problem;
    TensorField out, lse, other_kept;
  };

  bool are_unchanged(nb::tuple tensors);
  nb::object make_out(const Allocator &allocator, const Problem &problem) const;

  std::unique_ptr<AttentionRecord> record_;
  std::unique_ptr<Computed> kept_;
};

void bind_call(nb::module_ &module);

} // namespace fdm
