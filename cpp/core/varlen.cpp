// SPDX-License-Identifier: BSD-3-Clause
#include "varlen.h"

#include <algorithm>

#include "broadcast.h"
#include "error.h"

namespace fdm {

namespace {

const int32_t *values_of(const fdm_tensor &tensor) { return static_cast<const int32_t *>(tensor.data); }

} // namespace

SequenceLengths read_bounds(const TensorField &field, const char *name, const char *max_name, Device device) {
  const TensorView &view = read_argument(field, name, only(FDM_INT32), device);
  require_rank(view, name, 1, "(batch + 1,)");
  if (view.shape[0] < 1) value_error(name, " has shape ", shape_of(view), ", but must have batch + 1 values");
  if (view.shape[0] > 1 && view.stride[0] != 1)
    value_error(name, " has strides ", strides_of(view), ", but must be contiguous");

  SequenceLengths lengths{name, max_name, with_axes(view, {0, new_axis, new_axis, new_axis}), view.shape[0] - 1,
                          Extents::unknown};
  if (device.type == FDM_CPU) {
    const int32_t *values = values_of(lengths.tensor);
    if (values[0] != 0) value_error(name, " starts with ", values[0], ", but must start with 0");
    for (int64_t i = 0; i < lengths.batch; ++i)
      if (values[i + 1] < values[i])
        value_error(name, " falls from ", values[i], " to ", values[i + 1], " at index ", i + 1,
                    ", but must never fall");
    lengths.total = values[lengths.batch];
  }
  return lengths;
}

bool is_varlen(const CuSeqlens &cu_seqlens) {
  const bool no_queries = is_absent(cu_seqlens.q), no_keys = is_absent(cu_seqlens.k);
  if (no_queries != no_keys)
    value_error(no_queries ? "cu_seqlens_q" : "cu_seqlens_k", " is None, but must be given with ",
                no_queries ? "cu_seqlens_k" : "cu_seqlens_q");
  return !no_queries;
}

PackedLengths read_cu_seqlens(const CuSeqlens &cu_seqlens, Device device) {
  const PackedLengths lengths{read_bounds(cu_seqlens.q, "cu_seqlens_q", "max_seqlen_q", device),
                              read_bounds(cu_seqlens.k, "cu_seqlens_k", "max_seqlen_k", device)};
  const auto &[queries, keys] = lengths;
  if (keys.batch != queries.batch)
    value_error(keys.name, " has shape (", keys.batch + 1, ",), but must have shape (", queries.batch + 1, ",) like ",
                queries.name);
  return lengths;
}

void require_total(const SequenceLengths &lengths, int64_t total, const char *tensor) {
  if (lengths.total != Extents::unknown && lengths.total != total)
    value_error(lengths.name, " ends with ", lengths.total, ", but must end with the first size of ", tensor, ", ",
                total);
}

void require_max_length(const SequenceLengths &lengths, int64_t max_length) {
  require_at_least(max_length, lengths.max_name, 0);
  if (lengths.total == Extents::unknown) return;
  const int32_t *values = values_of(lengths.tensor);
  int64_t found = 0;
  for (int64_t i = 0; i < lengths.batch; ++i) found = std::max<int64_t>(found, values[i + 1] - values[i]);
  if (found > max_length)
    value_error(lengths.max_name, " is ", max_length, ", but must be at least ", found, ", the longest sequence of ",
                lengths.name);
}

fdm_tensor read_block_table(const TensorField &field, const SequenceLengths &keys, int64_t pages, int64_t page_size,
                            Device device) {
  const TensorView &view = read_argument(field, "block_table", only(FDM_INT32), device);
  require_rank(view, "block_table", 2, "(batch, pages of a sequence)");
  if (view.shape[0] != keys.batch)
    value_error("block_table has shape ", shape_of(view), ", but must have one row for each of the ", keys.batch,
                " sequences of cu_seqlens_k");
  if (keys.total != Extents::unknown) {
    const int32_t *lengths = values_of(keys.tensor), *table = static_cast<const int32_t *>(view.data);
    for (int64_t b = 0; b < keys.batch; ++b) {
      const int64_t length = lengths[b + 1] - lengths[b], used = (length + page_size - 1) / page_size;
      if (used > view.shape[1])
        value_error("block_table has shape ", shape_of(view), ", but sequence ", b, " has ", length, " keys and needs ",
                    used, " pages of size ", page_size);
      for (int64_t i = 0; i < used; ++i) {
        const int32_t page = table[b * view.stride[0] + i * view.stride[1]];
        if (page < 0 || page >= pages)
          value_error("block_table has the value ", page, " at index (", b, ", ", i,
                      "), but key has only the pages 0 to ", pages - 1);
      }
    }
  }
  return with_axes(view, {0, 1, new_axis, new_axis});
}

} // namespace fdm
