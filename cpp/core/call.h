// SPDX-License-Identifier: BSD-3-Clause
//
// A call of attention from its arguments to its gradients, on the current stream of the tensors' library. What a small
// call costs is crossings into Python and back, so each step is one; and the arguments are read once.
#pragma once

#include <memory>

#include "allocator.h"
#include "problem.h"

namespace fdm {

class Call {
public:
  explicit Call(std::unique_ptr<AttentionRecord> record) : record_(std::move(record)) {}

  // The fields of the record, in order; None for tensors that keep() has given away.
  nb::tuple fields() { return as_tuple(*record_); }

  // Each of these returns None, with nothing done, where the type of query has no DLPack C exchange API, its allocator
  // refuses, or values are narrow and rows would have to be copied or gradients computed that are not wanted.

  // (out, lse), where lse is None unless it is needed.
  nb::object attend(const Pack &pack, int32_t threads, const Allocator &allocator, bool need_lse);

  // The same for a call that has a backward pass. The result is what that takes: the tensors of the record, out, lse,
  // and what else is kept (Problem::keep), None if that has no bytes. Unless it is needed, lse is None where the record
  // has no plan, and the last part of what else is kept. The call has no references to the tensors then.
  nb::object keep(const Pack &pack, int32_t threads, const Allocator &allocator, bool need_lse);

  // The gradients of the fields of `Gradients`, in a tuple as long as `flags`: None where a flag does not want one, and
  // behind the fields. `kept` is the result of keep(), or has its form. Returns None if hooks of saved tensors have
  // replaced the tensors of keep(): the caller then makes another call of them.
  nb::object differentiate(const Pack &pack, int32_t threads, const Allocator &allocator, nb::tuple kept,
                           nb::handle dout, nb::handle dlse, nb::tuple flags);

  // The lse that is the last part of what keep() has kept, by operations of the tensor, which may have no memory
  // that can be read. Without elements it is made as `out` makes tensors.
  nb::object lse_within(nb::handle kept, nb::handle out, nb::handle dtype) const;

private:
  // What keep() has computed, and made.
  struct Computed {
    Problem problem;
    TensorField out, lse, more;
  };

  bool are_kept(nb::tuple tensors);
  nb::object make_out(const Allocator &allocator, const Problem &problem) const;

  std::unique_ptr<AttentionRecord> record_;
  std::unique_ptr<Computed> kept_;
};

void bind_call(nb::module_ &module);

} // namespace fdm
