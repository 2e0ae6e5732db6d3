// SPDX-License-Identifier: BSD-3-Clause
#include "record.h"

#include "error.h"

namespace fdm {

namespace {

template <class Record> Py_ssize_t field_count() {
  static const Py_ssize_t counted = [] {
    Py_ssize_t count = 0;
    Record record;
    record.for_each_field([&](const char *, auto &) { ++count; });
    return count;
  }();
  return counted;
}

void read_field(const char *, nb::handle value, TensorField &field) { field = TensorField(value); }

template <class Number> void read_field(const char *name, nb::handle value, Number &field) {
  if (!nb::try_cast<Number>(value, field))
    type_error(name, " is of type ", nb::type_name(value.type()).c_str(), " or out of range, but must be ",
               std::is_same_v<Number, bool>      ? "a boolean"
               : std::is_same_v<Number, int64_t> ? "an integer of 64 bits"
                                                 : "a number");
}

nb::object as_object(const TensorField &field) { return nb::borrow(field.object()); }
template <class Number> nb::object as_object(Number field) { return nb::cast(field); }

// `named` may be null.
template <class Record> Record read_fields(PyObject *positional, PyObject *named) {
  Record record;
  const Py_ssize_t given = PyTuple_Size(positional);
  Py_ssize_t position = 0, found = 0;
  record.for_each_field([&](const char *name, auto &field) {
    PyObject *value = nullptr;
    if (position < given)
      value = PyTuple_GetItem(positional, position);
    else if (named != nullptr && (value = PyDict_GetItemString(named, name)) != nullptr)
      ++found;
    ++position;
    if (value != nullptr) read_field(name, value, field);
  });
  if (given > position) type_error("a record of ", position, " fields is given ", given, " by position");
  if (named != nullptr && found != PyDict_Size(named))
    type_error("a record with the fields ", nb::str(field_names<Record>()).c_str(), " is given ",
               nb::str(nb::handle(named)).c_str(), " by name, of which ", PyDict_Size(named) - found,
               " are unknown, or given by position too");
  return record;
}

} // namespace

template <class Record> Record read_record(nb::handle tuple) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_Size(tuple.ptr()) != field_count<Record>())
    type_error("a record must be a tuple of ", field_count<Record>(), " fields, ",
               nb::str(field_names<Record>()).c_str());
  return read_fields<Record>(tuple.ptr(), nullptr);
}

template <class Record> Record read_record(const nb::args &positional, const nb::kwargs &named) {
  return read_fields<Record>(positional.ptr(), named.ptr());
}

template <class Record> nb::tuple as_tuple(Record &record) {
  nb::list values;
  record.for_each_field([&](const char *, auto &field) { values.append(as_object(field)); });
  return nb::tuple(values);
}

template <class Record> nb::tuple field_names() {
  nb::list names;
  Record record;
  record.for_each_field([&](const char *name, auto &) { names.append(nb::str(name)); });
  return nb::tuple(names);
}

template AttentionRecord read_record<AttentionRecord>(nb::handle);
template SelectionRecord read_record<SelectionRecord>(nb::handle);
template AttentionRecord read_record<AttentionRecord>(const nb::args &, const nb::kwargs &);
template SelectionRecord read_record<SelectionRecord>(const nb::args &, const nb::kwargs &);
template nb::tuple as_tuple<AttentionRecord>(AttentionRecord &);
template nb::tuple field_names<AttentionRecord>();
template nb::tuple field_names<SelectionRecord>();

} // namespace fdm
