// SPDX-License-Identifier: BSD-3-Clause
#include "tensor.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "dlpack.h"
#include "error.h"

namespace fdm {

namespace {

constexpr Dtype dtypes[] = {
    {"float32", dlpack::dtype_code::Float, 32, FDM_FLOAT32},
    {"float16", dlpack::dtype_code::Float, 16, FDM_FLOAT16},
    {"bfloat16", dlpack::dtype_code::Bfloat, 16, FDM_BFLOAT16},
    {"bool", dlpack::dtype_code::Bool, 8, FDM_BOOL},
    {"int32", dlpack::dtype_code::Int, 32, FDM_INT32},
    {"uint8", dlpack::dtype_code::UInt, 8, FDM_UINT8},
    {"float64", dlpack::dtype_code::Float, 64, FDM_FLOAT64},
    {"int8", dlpack::dtype_code::Int, 8, -1},
    {"int16", dlpack::dtype_code::Int, 16, -1},
    {"int64", dlpack::dtype_code::Int, 64, -1},
    {"uint16", dlpack::dtype_code::UInt, 16, -1},
    {"uint32", dlpack::dtype_code::UInt, 32, -1},
    {"uint64", dlpack::dtype_code::UInt, 64, -1},
    {"complex64", dlpack::dtype_code::Complex, 64, -1},
    {"complex128", dlpack::dtype_code::Complex, 128, -1},
};
constexpr Dtype other_dtype = {"of another kind", dlpack::dtype_code{255}, 0, -1};

const Dtype *find_dtype(nb::dlpack::dtype type) {
  for (const Dtype &dtype : dtypes)
    if (uint8_t(dtype.code) == type.code && dtype.bits == type.bits && type.lanes == 1) return &dtype;
  return &other_dtype;
}

const Dtype *find_dtype(const char *name) {
  for (const Dtype &dtype : dtypes)
    if (std::strcmp(dtype.name, name) == 0) return &dtype;
  return nullptr;
}

std::string type_name_of(nb::handle object) { return nb::type_name(object.type()).c_str(); }

// The exchange table of a type, or null.
const dlpack::ExchangeTable *look_up_exchange(PyTypeObject *type) {
  nb::object capsule =
      nb::steal(PyObject_GetAttrString(reinterpret_cast<PyObject *>(type), dlpack::exchange_attribute));
  if (!capsule.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) nb::raise_python_error();
    PyErr_Clear();
    return nullptr;
  }
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::exchange_capsule)) return nullptr;
  auto header =
      static_cast<const dlpack::ExchangeHeader *>(PyCapsule_GetPointer(capsule.ptr(), dlpack::exchange_capsule));
  while (header != nullptr && header->major != dlpack::abi_major) header = header->previous;
  auto table = reinterpret_cast<const dlpack::ExchangeTable *>(header);
  return table != nullptr && table->view_from_object != nullptr ? table : nullptr;
}

// Caches the tables of the first few types, such as torch.Tensor and Parameter. Its references keep the addresses of
// the types from being reused. A program with more tensor types pays a look-up for the others.
class ExchangeCache {
public:
  const dlpack::ExchangeTable *find(PyTypeObject *type) {
    {
      nb::ft_lock_guard guard(mutex_);
      for (int i = 0; i < count_; ++i)
        if (entries_[i].type == type) return entries_[i].table;
    }
    const dlpack::ExchangeTable *table = look_up_exchange(type);
    nb::ft_lock_guard guard(mutex_);
    if (table != nullptr && count_ < capacity) {
      Py_INCREF(reinterpret_cast<PyObject *>(type));
      entries_[count_++] = {type, table};
    }
    return table;
  }

private:
  static constexpr int capacity = 16;
  struct Entry {
    PyTypeObject *type;
    const dlpack::ExchangeTable *table;
  };
  nb::ft_mutex mutex_;
  Entry entries_[capacity] = {};
  int count_ = 0;
};

ExchangeCache exchange_cache;

void set_rank(TensorView &view, int64_t rank, const char *name) {
  if (rank > TensorView::max_rank) value_error(name, " has ", rank, " dimensions, but at most 4 are allowed");
  view.rank = static_cast<int>(rank);
}

void read_view(TensorView &view, const dlpack::dltensor &tensor) {
  view.data = tensor.data == nullptr ? nullptr : static_cast<char *>(tensor.data) + tensor.byte_offset;
  view.dtype = find_dtype(tensor.dtype);
  view.device = {tensor.device.device_type, tensor.device.device_id};
  int64_t contiguous = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.stride[i] = tensor.strides != nullptr ? tensor.strides[i] : contiguous;
    contiguous *= tensor.shape[i];
  }
}

void read_exchange(TensorView &view, const dlpack::ExchangeTable &table, nb::handle object, const char *name) {
  dlpack::dltensor tensor;
  if (table.view_from_object(object.ptr(), &tensor) != 0) {
    nb::python_error cause; // takes over the exception of the producer
    const std::string reason = cause.what();
    value_error(name, " cannot be read through DLPack: ", reason.substr(0, reason.find('\n')));
  }
  set_rank(view, tensor.ndim, name);
  read_view(view, tensor);
}

constexpr const char *tuple_form =
    "(data_ptr: int, dtype: str, shape: tuple, strides_in_elements: tuple, device_type: int, device_index: int)";

int64_t read_integer(PyObject *object, const char *name) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    type_error(name, " has a value of type ", type_name_of(object),
               " where its tuple form needs a 64-bit integer: ", tuple_form);
  }
  return value;
}

void read_tuple(TensorView &view, nb::handle object, const char *name) {
  PyObject *tuple = object.ptr();
  if (PyTuple_Size(tuple) != 6)
    type_error(name, " is a tuple of ", PyTuple_Size(tuple), " items, but its tuple form is ", tuple_form);
  PyObject *dtype = PyTuple_GetItem(tuple, 1), *shape = PyTuple_GetItem(tuple, 2), *stride = PyTuple_GetItem(tuple, 3);
  if (!PyUnicode_Check(dtype) || !PyTuple_Check(shape) || !PyTuple_Check(stride) ||
      PyTuple_Size(shape) != PyTuple_Size(stride))
    type_error(name, " is not a tuple of the form ", tuple_form, " with as many strides as sizes");

  PyObject *address = PyTuple_GetItem(tuple, 0);
  view.data = address == Py_None ? nullptr : PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    type_error(name, " has no address as the first item of its tuple form ", tuple_form);
  }
  const char *dtype_text = PyUnicode_AsUTF8AndSize(dtype, nullptr);
  if (dtype_text == nullptr) nb::raise_python_error();
  view.dtype = find_dtype(dtype_text);
  if (view.dtype == nullptr)
    type_error(name, " has the unknown dtype '", dtype_text, "', but must have one that DLPack has");
  set_rank(view, PyTuple_Size(shape), name);
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = read_integer(PyTuple_GetItem(shape, i), name);
    view.stride[i] = read_integer(PyTuple_GetItem(stride, i), name);
    if (view.shape[i] < 0) value_error(name, " has shape ", shape_of(view), ", but sizes must not be negative");
  }
  view.device.type = static_cast<int32_t>(read_integer(PyTuple_GetItem(tuple, 4), name));
  view.device.index = static_cast<int32_t>(read_integer(PyTuple_GetItem(tuple, 5), name));
}

} // namespace

bool same_device(Device a, Device b) { return a.type == b.type && (a.type == FDM_CPU || a.index == b.index); }

bool TensorView::is_empty() const {
  for (int i = 0; i < rank; ++i)
    if (shape[i] == 0) return true;
  return false;
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (stride[i] != expected) return false;
    expected *= std::max<int64_t>(shape[i], 1);
  }
  return true;
}

bool TensorView::operator==(const TensorView &other) const {
  return data == other.data && dtype == other.dtype && same_device(device, other.device) && rank == other.rank &&
         std::equal(shape, shape + rank, other.shape) && std::equal(stride, stride + rank, other.stride);
}

const TensorView &TensorField::read(const char *name) const {
  if (type_ != nullptr) return view_;
  if (PyTuple_Check(object_.ptr())) {
    read_tuple(view_, object_, name);
  } else {
    const dlpack::ExchangeTable *table = exchange_cache.find(Py_TYPE(object_.ptr()));
    if (table == nullptr)
      type_error(name, " is of type ", type_name_of(object_), ", but must be a torch.Tensor or a tuple ", tuple_form);
    read_exchange(view_, *table, object_, name);
  }
  if (needs_memory_ && view_.data == nullptr && !view_.is_empty())
    value_error(name, " of shape ", shape_of(view_), " has no memory: fake and meta tensors cannot be computed with");
  type_ = Py_TYPE(object_.ptr());
  return view_;
}

bool TensorField::try_read() const {
  if (type_ != nullptr) return true;
  const dlpack::ExchangeTable *table = exchange_cache.find(Py_TYPE(object_.ptr()));
  dlpack::dltensor tensor;
  if (table == nullptr) return false;
  if (table->view_from_object(object_.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.ndim > TensorView::max_rank) return false;
  view_.rank = tensor.ndim;
  read_view(view_, tensor);
  if (view_.data == nullptr && !view_.is_empty()) return false;
  type_ = Py_TYPE(object_.ptr());
  return true;
}

bool TensorField::matches(nb::handle other) const {
  if (is_absent()) return other.is_none();
  const TensorField field(other);
  return Py_TYPE(other.ptr()) == type_ && field.try_read() && field.view_ == view_;
}

Exchange::Exchange(nb::handle tensor) : table_(exchange_cache.find(Py_TYPE(tensor.ptr()))) {}

bool Exchange::current_stream(Device device, void *&stream) const {
  stream = nullptr;
  if (device.type == FDM_CPU) return true;
  if (table_ == nullptr || table_->current_stream == nullptr) return false;
  if (table_->current_stream(device.type, device.index, &stream) == 0) return true;
  PyErr_Clear();
  return false;
}

DeviceBytes::DeviceBytes(const Exchange &exchange, int64_t bytes, Device device) {
  if (bytes == 0 || exchange.table_ == nullptr || exchange.table_->allocate == nullptr) return;
  dlpack::dltensor prototype{};
  prototype.device = {device.type, device.index};
  prototype.ndim = 1;
  prototype.dtype = {uint8_t(dlpack::dtype_code::UInt), 8, 1};
  prototype.shape = &bytes;
  // The caller reports the failed allocation in its own words.
  const auto set_no_error = [](void *, const char *, const char *) {};
  if (exchange.table_->allocate(&prototype, &memory_, nullptr, set_no_error) != 0) memory_ = nullptr;
}

DeviceBytes::~DeviceBytes() {
  if (memory_ != nullptr && memory_->deleter != nullptr) memory_->deleter(memory_);
}

void *DeviceBytes::data() const {
  return memory_ == nullptr ? nullptr : static_cast<char *>(memory_->tensor.data) + memory_->tensor.byte_offset;
}

const char *dtype_name(int32_t pack_code) {
  for (const Dtype &dtype : dtypes)
    if (dtype.pack_code == pack_code) return dtype.name;
  return other_dtype.name;
}

Text &operator<<(Text &stream, Sizes sizes) {
  stream << '(';
  for (int i = 0; i < sizes.rank; ++i) stream << (i == 0 ? "" : ", ") << sizes.sizes[i];
  return stream << (sizes.rank == 1 ? ",)" : ")");
}

Text &operator<<(Text &stream, Device device) {
  switch (device.type) {
  case FDM_CPU:
    return stream << "cpu";
  case FDM_CUDA:
    return stream << "cuda:" << device.index;
  default:
    return stream << "a device of DLPack type " << device.type;
  }
}

} // namespace fdm
