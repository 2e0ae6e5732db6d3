// SPDX-License-Identifier: BSD-3-Clause
#include "usual.h"

#include <cmath>

#include "checks.h"
#include "record.h"
#include "tensor.h"

namespace fdm {

namespace {

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

// A selection that attention makes by itself: causal, of some of the keys, by a bias that is the same for every query.
bool is_usual_selection(const AttentionRecord &record, const TensorView &query, const TensorView &key,
                        const TensorView &bias) {
  const int64_t batch = query.shape[0], queries = query.shape[1], keys = key.shape[1];
  if (record.window >= keys || record.keep_last >= keys || record.keep_first >= keys) return false;
  return record.window + record.keep_last + record.keep_first < keys && queries != 1 &&
         (bias.rank == 3 || bias.shape[2] == 1) && (bias.shape[0] == 1 || bias.shape[0] == batch);
}

} // namespace

nb::object usual_call(const UsualArguments &arguments) {
  const auto &[query_object, key_object, value_object, bias_object, sink, scale, causal, softcap, window, keep_last,
               keep_first, deterministic] = arguments;
  TensorView query, key, value, bias;
  if (!try_read_tensor(query, query_object) || !try_read_tensor(key, key_object) ||
      !try_read_tensor(value, value_object))
    return nb::none();
  if (query.rank != 4 || key.rank != 4 || value.rank != 4 || query.shape[3] < 1) return nb::none();
  const bool alike = query.dtype == key.dtype && query.dtype == value.dtype && query.dtype->pack_code >= 0 &&
                     query.dtype->pack_code != FDM_FLOAT64 && same_device(query.device, key.device) &&
                     same_device(query.device, value.device);
  if (!alike || !is_usual_number(scale) || !is_usual_number(softcap) || !is_usual_flag(causal)) return nb::none();
  const bool is_causal = causal.ptr() == Py_True;
  if (!is_absent(bias_object)) {
    if (!try_read_tensor(bias, bias_object) || !is_usual_bias(query, key, bias) ||
        bias.dtype->pack_code == FDM_FLOAT64 || !same_device(query.device, bias.device) || is_expanded(bias))
      return nb::none();
  }
  if (!is_absent(sink)) {
    TensorView view;
    if (!try_read_tensor(view, sink) || !same_device(query.device, view.device) || is_expanded(view)) return nb::none();
  }
  AttentionRecord record;
  if (!read_usual_count(record.keep_last, keep_last) || !read_usual_count(record.keep_first, keep_first))
    return nb::none();
  if (!is_absent(window)) {
    if (!read_usual_count(record.window, window) || is_absent(bias_object) || !is_causal ||
        !is_usual_selection(record, query, key, bias))
      return nb::none();
  } else if (record.keep_last > 0 || record.keep_first > 0) {
    return nb::none();
  }
  record.each_field([](const char *, auto &field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, nb::handle>) field = nb::handle(Py_None);
  });
  record.query = query_object;
  record.key = key_object;
  record.value = value_object;
  record.bias = bias_object;
  record.sink = sink;
  record.scale = is_absent(scale) ? std::pow(static_cast<double>(query.shape[3]), -0.5) : PyFloat_AsDouble(scale.ptr());
  record.softcap = is_absent(softcap) ? 0.0 : PyFloat_AsDouble(softcap.ptr());
  record.causal = is_causal;
  record.deterministic = deterministic;
  return as_tuple(record);
}

} // namespace fdm
