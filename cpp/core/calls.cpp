// SPDX-License-Identifier: BSD-3-Clause
#include "calls.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "problem.h"

namespace fdm {

namespace {

// A tensor for lse: (B, H, Q), or (H, total_q).
nb::object new_lse(const Allocator &allocator, nb::handle query, int32_t dtype) {
  const TensorView view = read_tensor(query, "query");
  if (view.rank == 4) return allocator.sums(query, nb::make_tuple(view.shape[0], view.shape[2], view.shape[1]), dtype);
  return allocator.sums(query, nb::make_tuple(view.shape[1], view.shape[0]), dtype);
}

nb::handle field_of(AttentionRecord &record, const char *wanted) {
  nb::handle found = Py_None;
  record.each_field([&](const char *name, auto &field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, nb::handle>)
      if (std::strcmp(name, wanted) == 0) found = field;
  });
  if (found.is_none()) value_error("the gradient of ", wanted, " is wanted, but a call has no tensor of this name");
  return found;
}

} // namespace

nb::object attend(const fdm_pack &pack, int32_t threads, const Allocator &allocator, bool need_lse, nb::handle inputs) {
  const auto record = read_record<AttentionRecord>(inputs);
  const Exchange exchange(record.query);
  if (!exchange.offers_memory()) return nb::none();
  Problem problem(pack, record, {threads});
  nb::object out = allocator.like(record.query);
  nb::object lse = need_lse ? new_lse(allocator, record.query, problem.lse_dtype()) : nb::none();
  if (!problem.attend(exchange, out, lse, record.given_plan)) return nb::none();
  return nb::make_tuple(out, lse);
}

nb::object attend_and_keep(const fdm_pack &pack, int32_t threads, const Allocator &allocator, bool need_lse,
                           nb::handle inputs) {
  const auto record = read_record<AttentionRecord>(inputs);
  const Exchange exchange(record.query);
  if (!exchange.offers_memory()) return nb::none();
  Problem problem(pack, record, {threads});
  const bool is_planned = !is_absent(record.given_plan), has_lse = need_lse || is_planned;
  nb::object out = allocator.like(record.query);
  nb::object lse = has_lse ? new_lse(allocator, record.query, problem.lse_dtype()) : nb::none();
  nb::object plan = nb::borrow(record.given_plan);
  const int64_t bytes = is_planned ? 0 : problem.kept_bytes(has_lse);
  if (bytes > 0) plan = allocator.bytes(record.query, bytes);
  const bool makes_plan = !is_planned && problem.needed_plan_bytes() > 0;
  if (!problem.attend_and_keep(exchange, out, lse, plan, makes_plan)) return nb::none();
  return nb::make_tuple(out, lse, plan);
}

nb::object differentiate(const fdm_pack &pack, int32_t threads, const Allocator &allocator, const KeptCall &call,
                         nb::handle dout, nb::handle dlse, nb::tuple names, nb::tuple flags) {
  constexpr size_t made = 3; // out, lse and plan
  const size_t inputs = call.tensors.size() - std::min(made, call.tensors.size());
  auto record = read_record<AttentionRecord>(call.tensors, inputs, call.settings);
  const nb::handle out = call.tensors[inputs], lse = call.tensors[inputs + 1], plan = call.tensors[inputs + 2];
  if (!is_absent(plan)) record.given_plan = plan;
  const Exchange exchange(record.query);
  if (!exchange.offers_memory()) return nb::none();
  Problem problem(pack, record, {threads});
  nb::dict gradients;
  nb::list results;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (i < names.size() && nb::cast<bool>(flags[i])) {
      nb::object gradient = allocator.like(field_of(record, nb::cast<const char *>(names[i])));
      gradients[names[i]] = gradient;
      results.append(gradient);
    } else {
      results.append(nb::none());
    }
  }
  if (!problem.backward(exchange, {dout, dlse, out, lse, gradients}, record.given_plan)) return nb::none();
  return nb::tuple(results);
}

} // namespace fdm
