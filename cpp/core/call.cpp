// SPDX-License-Identifier: BSD-3-Clause
#include "call.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "error.h"

namespace fdm {

namespace {

// Visits the tensors of a record in order, with their index and name.
template <class Visit> void for_each_tensor(AttentionRecord &record, Visit &&visit) {
  size_t index = 0;
  record.for_each_field([&](const char *name, auto &field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, TensorField>) visit(index++, name, field);
  });
}

// The indices of tensors among those of a record.
struct TensorIndices {
  size_t count = 0, given_plan = 0;
  std::vector<size_t> gradients; // of the fields of Gradients, in their order
};

// Computed once, because comparing all names takes a measurable part of a small call.
const TensorIndices &tensor_indices() {
  static const TensorIndices found = [] {
    TensorIndices made;
    AttentionRecord record;
    const auto index_of = [&](const char *wanted) {
      size_t found_index = 0;
      for_each_tensor(record, [&](size_t index, const char *name, TensorField &) {
        if (std::strcmp(name, wanted) == 0) found_index = index;
      });
      return found_index;
    };
    for_each_tensor(record, [&](size_t, const char *, TensorField &) { ++made.count; });
    made.given_plan = index_of("given_plan");
    Gradients{}.for_each_field([&](const char *name, TensorField &) { made.gradients.push_back(index_of(name)); });
    return made;
  }();
  return found;
}

// (B, H, Q), or (H, total_q).
nb::tuple lse_sizes(const Extents &e) {
  if (e.is_varlen) return nb::make_tuple(e.heads, e.total_queries);
  return nb::make_tuple(e.batch, e.heads, e.queries);
}

bool is_usual_number(nb::handle object) { return is_absent(object) || PyFloat_CheckExact(object.ptr()); }
bool is_usual_flag(nb::handle object) {
  return is_absent(object) || object.ptr() == Py_True || object.ptr() == Py_False;
}

bool is_expanded(const TensorView &view) {
  for (int i = 0; i < view.rank; ++i)
    if (view.stride[i] == 0) return true;
  return false;
}

// Four dimensions, or (B, {H|Hk|1}, K).
bool is_usual_bias(const TensorView &query, const TensorView &key, const TensorView &bias) {
  if (bias.rank == 4) return true;
  const int64_t heads = bias.shape[1];
  return bias.rank == 3 && bias.shape[0] == query.shape[0] && bias.shape[2] == key.shape[1] &&
         (heads == 1 || heads == key.shape[2] || heads == query.shape[2]);
}

bool read_usual_count(int64_t &count, nb::handle object) {
  return PyLong_CheckExact(object.ptr()) && nb::try_cast<int64_t>(object, count) && count >= 0;
}

// A selection within an attention call: causal, of a part of the keys, by a per-key bias.
bool is_usual_selection(const AttentionRecord &record, const TensorView &query, const TensorView &key,
                        const TensorView &bias) {
  const int64_t batch = query.shape[0], queries = query.shape[1], keys = key.shape[1];
  if (record.window >= keys || record.keep_last >= keys || record.keep_first >= keys) return false;
  return record.window + record.keep_last + record.keep_first < keys && queries != 1 &&
         (bias.rank == 3 || bias.shape[2] == 1) && (bias.shape[0] == 1 || bias.shape[0] == batch);
}

// A tensor on query's device, or None.
bool is_usual_tensor(const TensorField &field, const TensorView &query) {
  return is_absent(field) || (field.try_read() && same_device(query.device, field.view().device));
}

// A 4-D boolean mask, or intervals, and no window with them.
bool is_usual_mask(const AttentionRecord &record, const TensorView &query, nb::handle window) {
  if (!is_usual_tensor(record.mask, query) || !is_usual_tensor(record.start, query) ||
      !is_usual_tensor(record.end, query))
    return false;
  if (!is_absent(record.mask)) {
    const TensorView &mask = record.mask.view();
    if (mask.rank != 4 || mask.dtype->pack_code != FDM_BOOL || is_expanded(mask)) return false;
  }
  return is_absent(window) || (is_absent(record.mask) && is_absent(record.start));
}

// Builds the call of the arguments of flash_dmattn_func, for a call that is not packed. Returns None for rare or
// invalid arguments, which need closer checks. Problem checks the rest. Reading the arguments here takes a tenth of
// the time of Python code, which for a small problem exceeds the time of its kernels.
nb::object usual_call(nb::handle query_object, nb::handle key_object, nb::handle value_object, nb::handle bias_object,
                      nb::handle sink_object, nb::handle mask, nb::handle start, nb::handle end, nb::handle max_kept,
                      bool keeps_runs, nb::handle scale, nb::handle causal, nb::handle softcap, nb::handle window,
                      nb::handle keep_last, nb::handle keep_first, bool deterministic) {
  auto found = std::make_unique<AttentionRecord>();
  AttentionRecord &record = *found;
  record.query = TensorField(query_object);
  record.key = TensorField(key_object);
  record.value = TensorField(value_object);
  record.bias = TensorField(bias_object);
  record.sink = TensorField(sink_object);
  record.mask = TensorField(mask);
  record.start = TensorField(start);
  record.end = TensorField(end);
  record.keeps_runs = keeps_runs;
  if (!record.query.try_read() || !record.key.try_read() || !record.value.try_read()) return nb::none();
  const TensorView &query = record.query.view(), &key = record.key.view(), &value = record.value.view();
  if (query.rank != 4 || key.rank != 4 || value.rank != 4 || query.shape[3] < 1) return nb::none();
  if (value.shape[3] < 1) return nb::none();
  const bool alike = query.dtype == key.dtype && query.dtype == value.dtype && query.dtype->pack_code >= 0 &&
                     query.dtype->pack_code != FDM_FLOAT64 && same_device(query.device, key.device) &&
                     same_device(query.device, value.device);
  if (!alike || !is_usual_number(scale) || !is_usual_number(softcap) || !is_usual_flag(causal)) return nb::none();
  record.causal = causal.ptr() == Py_True;
  const TensorView &bias = record.bias.view();
  if (!is_absent(record.bias)) {
    if (!is_usual_tensor(record.bias, query) || !is_usual_bias(query, key, bias) || is_expanded(bias))
      return nb::none();
    if (bias.dtype->pack_code == FDM_FLOAT64 && !is_absent(window)) return nb::none();
  }
  if (!is_usual_tensor(record.sink, query) || (!is_absent(record.sink) && is_expanded(record.sink.view())))
    return nb::none();
  if (!is_usual_mask(record, query, window) || !read_usual_count(record.max_kept, max_kept)) return nb::none();
  if (!read_usual_count(record.keep_last, keep_last) || !read_usual_count(record.keep_first, keep_first))
    return nb::none();
  if (!is_absent(window)) {
    if (!read_usual_count(record.window, window) || is_absent(record.bias) || !record.causal ||
        !is_usual_selection(record, query, key, bias))
      return nb::none();
  } else if (record.keep_last > 0 || record.keep_first > 0) {
    return nb::none();
  }
  record.scale = is_absent(scale) ? std::pow(static_cast<double>(query.shape[3]), -0.5) : PyFloat_AsDouble(scale.ptr());
  record.softcap = is_absent(softcap) ? 0.0 : PyFloat_AsDouble(softcap.ptr());
  record.deterministic = deterministic;
  return nb::cast(Call(std::move(found)));
}

} // namespace

nb::object Call::make_out(const Allocator &allocator, const Problem &problem) const {
  const nb::handle query = record_->query.object();
  const TensorView &view = record_->query.view();
  if (!problem.has_narrow_values()) return allocator.empty_like(query, view);
  nb::object sizes = nb::steal(PyTuple_New(view.rank));
  if (!sizes.is_valid()) nb::raise_python_error();
  for (int i = 0; i < view.rank; ++i) {
    const int64_t size = i + 1 < view.rank ? view.shape[i] : record_->value.view().shape[view.rank - 1];
    PyTuple_SetItem(sizes.ptr(), i, nb::int_(size).release().ptr());
  }
  return query.attr("new_empty")(sizes);
}

nb::object Call::attend(const Pack &pack, int32_t threads, const Allocator &allocator, bool need_lse) {
  const Exchange exchange(record_->query.object());
  if (!exchange.can_allocate()) return nb::none();
  Problem problem(pack.table(), *record_, {threads});
  if (problem.needs_row_copies(false)) return nb::none();
  const nb::object out = make_out(allocator, problem);
  nb::object lse = nb::none();
  if (need_lse) lse = allocator.empty_floats(out, lse_sizes(problem.extents()), problem.lse_dtype());
  if (!problem.attend(out, lse, record_->given_plan, Workspace(exchange))) return nb::none();
  return nb::make_tuple(out, lse);
}

nb::object Call::keep(const Pack &pack, int32_t threads, const Allocator &allocator, bool need_lse) {
  const Exchange exchange(record_->query.object());
  if (!exchange.can_allocate()) return nb::none();
  auto made = std::make_unique<Computed>(Computed{Problem(pack.table(), *record_, {threads}), {}, {}, {}});
  auto &[problem, out, lse, other_kept] = *made;
  if (problem.needs_row_copies(true)) return nb::none();
  const bool is_planned = !is_absent(record_->given_plan), has_lse = need_lse || is_planned;
  out = TensorField(make_out(allocator, problem));
  if (has_lse)
    lse = TensorField(allocator.empty_floats(out.object(), lse_sizes(problem.extents()), problem.lse_dtype()));
  const int64_t bytes = problem.kept_bytes(has_lse, is_planned);
  if (bytes > 0) other_kept = TensorField(allocator.empty_bytes(out.object(), bytes));
  if (!problem.keep(out, lse, record_->given_plan, other_kept, Workspace(exchange))) return nb::none();

  const size_t count = tensor_indices().count;
  nb::object kept = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(count + 3)));
  if (!kept.is_valid()) nb::raise_python_error();
  const auto give = [&](size_t index, const char *, TensorField &field) {
    PyTuple_SetItem(kept.ptr(), static_cast<Py_ssize_t>(index), field.release().release().ptr());
  };
  for_each_tensor(*record_, give);
  give(count, "out", out);
  give(count + 1, "lse", lse);
  give(count + 2, "kept", other_kept);
  kept_ = std::move(made);
  return kept;
}

bool Call::are_unchanged(nb::tuple tensors) {
  bool are = true;
  const auto compare = [&](size_t index, const char *, TensorField &field) {
    are = are && field.matches(tensors[index]);
  };
  const size_t count = tensor_indices().count;
  for_each_tensor(*record_, compare);
  compare(count, "out", kept_->out);
  compare(count + 1, "lse", kept_->lse);
  compare(count + 2, "kept", kept_->other_kept);
  return are;
}

nb::object Call::differentiate(const Pack &pack, int32_t threads, const Allocator &allocator, nb::tuple kept,
                               nb::handle dout, nb::handle dlse, nb::tuple flags) {
  const size_t count = tensor_indices().count;
  if (kept.size() != count + 3)
    type_error("kept must be a tuple of ", count, " tensors of a record, out, lse and what else is kept, but has ",
               kept.size(), " items");
  if (kept_ && !are_unchanged(kept)) return nb::none();
  const Exchange exchange(kept[0]);
  if (!exchange.can_allocate()) return nb::none();
  Problem problem = kept_ ? kept_->problem : Problem(pack.table(), *record_, {threads});
  const bool wants_all =
      flags.size() >= 3 && flags[0].ptr() == Py_True && flags[1].ptr() == Py_True && flags[2].ptr() == Py_True;
  if (problem.has_narrow_values() && !wants_all) return nb::none();
  BackwardArguments arguments{dout, dlse, nb::handle(kept[count]), nb::handle(kept[count + 1]), {}};
  const bool reads_rows = !problem.needs_row_copies(true) && problem.can_read_rows(arguments.dout, "dout") &&
                          problem.can_read_rows(arguments.out, "out");
  if (!reads_rows) return nb::none();
  problem.set_threads(threads);

  nb::object results = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(flags.size())));
  if (!results.is_valid()) nb::raise_python_error();
  size_t index = 0;
  const auto append = [&](nb::object result) {
    PyTuple_SetItem(results.ptr(), static_cast<Py_ssize_t>(index++), result.release().ptr());
  };
  arguments.gradients.for_each_field([&](const char *of, TensorField &gradient) {
    if (index == flags.size()) return;
    if (flags[index].ptr() == Py_True) {
      TensorField like = nb::handle(kept[tensor_indices().gradients[index]]);
      if (is_absent(like)) value_error("the gradient of ", of, " is wanted, but the call has no ", of);
      gradient = TensorField(allocator.empty_like(like.object(), like.read(of)));
    }
    append(nb::borrow(gradient.object()));
  });
  while (index < flags.size()) append(nb::none());
  const TensorField given_plan = nb::handle(kept[tensor_indices().given_plan]),
                    other_kept = nb::handle(kept[count + 2]);
  if (!problem.backward(arguments, given_plan, other_kept, Workspace(exchange))) return nb::none();
  return results;
}

nb::object Call::lse_within(nb::handle kept, nb::handle out, nb::handle dtype) const {
  if (!kept_) value_error("a call that has not been kept has no lse");
  const nb::tuple sizes = lse_sizes(kept_->problem.extents());
  const int64_t bytes = lse_bytes(kept_->problem.extents(), kept_->problem.lse_dtype());
  if (bytes == 0) return out.attr("new_empty")(sizes, nb::arg("dtype") = dtype);
  const nb::object last = kept[nb::slice(nb::int_(-bytes), nb::none(), nb::none())];
  return last.attr("view")(dtype).attr("view")(sizes);
}

void bind_call(nb::module_ &module) {
  using namespace nb::literals;
  nb::class_<Call>(module, "Call")
      .def(
          "__init__",
          [](Call *self, nb::handle inputs) {
            new (self) Call(std::make_unique<AttentionRecord>(read_record<AttentionRecord>(inputs)));
          },
          "inputs"_a)
      .def_prop_ro("fields", &Call::fields)
      .def("attend", &Call::attend, "pack"_a, "threads"_a, "allocator"_a, "need_lse"_a)
      .def("keep", &Call::keep, "pack"_a, "threads"_a, "allocator"_a, "need_lse"_a)
      .def("differentiate", &Call::differentiate, "pack"_a, "threads"_a, "allocator"_a, "kept"_a, "dout"_a,
           "dlse"_a.none(), "flags"_a)
      .def("lse_within", &Call::lse_within, "kept"_a.none(), "out"_a, "dtype"_a);
  module.def("usual_call", &usual_call, "query"_a, "key"_a.none(), "value"_a.none(), "bias"_a.none(), "sink"_a.none(),
             "mask"_a.none(), "start"_a.none(), "end"_a.none(), "max_kept"_a, "keeps_runs"_a, "scale"_a.none(),
             "causal"_a.none(), "softcap"_a.none(), "window"_a.none(), "keep_last"_a.none(), "keep_first"_a.none(),
             "deterministic"_a);
}

} // namespace fdm
