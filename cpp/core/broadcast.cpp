// SPDX-License-Identifier: BSD-3-Clause
#include "broadcast.h"

#include <algorithm>

#include "error.h"

namespace fdm {

namespace {

bool fits(int64_t size, int64_t full) { return size == full || size == 1; }
bool fits_heads(int64_t size, const Extents &e) { return size == e.heads || size == e.kv_heads || size == 1; }
bool equals(int64_t size, int64_t full) { return full == Extents::unknown || size == full; }

// Prints "{8|2|1}", each size once.
struct HeadChoice {
  const Extents &extents;
};
Text &operator<<(Text &stream, HeadChoice choice) {
  const Extents &e = choice.extents;
  stream << '{' << e.heads;
  if (e.kv_heads != e.heads) stream << '|' << e.kv_heads;
  if (e.heads != 1 && e.kv_heads != 1) stream << "|1";
  return stream << '}';
}

// Prints "{4|1}".
struct Choice {
  int64_t size;
};
Text &operator<<(Text &stream, Choice choice) {
  stream << '{' << choice.size;
  return stream << (choice.size == 1 ? "}" : "|1}");
}

struct Size {
  int64_t size;
};
Text &operator<<(Text &stream, Size size) {
  return size.size == Extents::unknown ? stream << "any" : stream << size.size;
}

fdm_tensor map_batch_scores(const TensorView &view, const char *name, const Extents &e) {
  fdm_tensor scores;
  switch (view.rank) {
  case 4:
    scores = with_axes(view, {0, 1, 2, 3});
    break;
  case 3:
    scores = with_axes(view, {0, 1, new_axis, 2});
    break;
  case 2:
    scores = with_axes(view, {0, new_axis, new_axis, 1});
    break;
  default:
    value_error(name, " has shape ", shape_of(view), ", but must have 4 dimensions (batch, heads, queries, keys), ",
                "3 (batch, heads, keys) or 2 (batch, keys)");
  }
  if (fits(scores.shape[0], e.batch) && fits_heads(scores.shape[1], e) && fits(scores.shape[2], e.queries) &&
      fits(scores.shape[3], e.keys))
    return scores;
  const Choice batch{e.batch}, queries{e.queries}, keys{e.keys};
  switch (view.rank) {
  case 4:
    value_error(name, " has shape ", shape_of(view), ", but must have shape (batch, heads, queries, keys) = (", batch,
                ", ", HeadChoice{e}, ", ", queries, ", ", keys, ")");
  case 3:
    value_error(name, " has shape ", shape_of(view), ", but with 3 dimensions must have shape (batch, heads, keys) = (",
                batch, ", ", HeadChoice{e}, ", ", keys, ")");
  default:
    value_error(name, " has shape ", shape_of(view), ", but with 2 dimensions must have shape (batch, keys) = (", batch,
                ", ", keys, ")");
  }
}

fdm_tensor map_varlen_scores(const TensorView &view, const char *name, const Extents &e) {
  if (view.rank == 3 && fits_heads(view.shape[0], e)) {
    // One row always means that all queries share it, so a per-query row of a single query must span all keys.
    const bool per_key = view.shape[1] == 1 && equals(view.shape[2], e.total_keys);
    const bool per_query = view.shape[1] != 1 && equals(view.shape[1], e.total_queries) && view.shape[2] == e.keys;
    if (per_key || per_query) return with_axes(view, {new_axis, 0, 1, 2});
  }
  if (e.total_queries == 1)
    value_error(name, " has shape ", shape_of(view), ", but with one query must have shape (heads, 1, total_k) = (",
                HeadChoice{e}, ", 1, ", Size{e.total_keys}, "), where cu_seqlens_k ends with total_k");
  value_error(name, " has shape ", shape_of(view), ", but must have shape (heads, 1, total_k) = (", HeadChoice{e},
              ", 1, ", Size{e.total_keys}, ") or (heads, total_q, max_seqlen_k) = (", HeadChoice{e}, ", ",
              Size{e.total_queries}, ", ", e.keys,
              "), where cu_seqlens_k ends with total_k and cu_seqlens_q with total_q");
}

} // namespace

fdm_tensor map_scores(const TensorView &view, const char *name, const Extents &extents) {
  return extents.is_varlen ? map_varlen_scores(view, name, extents) : map_batch_scores(view, name, extents);
}

fdm_tensor map_intervals(const TensorView &view, const char *name, const Extents &e) {
  if (e.is_varlen) {
    if (view.rank == 2 && fits_heads(view.shape[0], e) && equals(view.shape[1], e.total_keys))
      return with_axes(view, {new_axis, 0, new_axis, 1});
    value_error(name, " has shape ", shape_of(view), ", but must have shape (heads, total_k) = (", HeadChoice{e}, ", ",
                Size{e.total_keys}, ")");
  }
  if (view.rank == 3 && fits(view.shape[0], e.batch) && fits_heads(view.shape[1], e) && view.shape[2] == e.keys)
    return with_axes(view, {0, 1, new_axis, 2});
  value_error(name, " has shape ", shape_of(view), ", but must have shape (batch, heads, keys) = (", Choice{e.batch},
              ", ", HeadChoice{e}, ", ", e.keys, ")");
}

fdm_tensor map_lse(const TensorView &view, const char *name, const Extents &e) {
  if (e.is_varlen) {
    if (view.rank == 2 && view.shape[0] == e.heads && view.shape[1] == e.total_queries)
      return with_axes(view, {new_axis, 0, 1, new_axis});
    value_error(name, " has shape ", shape_of(view), ", but must have shape (heads, total_q) = (", e.heads, ", ",
                e.total_queries, ")");
  }
  if (view.rank == 3 && view.shape[0] == e.batch && view.shape[1] == e.heads && view.shape[2] == e.queries)
    return with_axes(view, {0, 1, 2, new_axis});
  value_error(name, " has shape ", shape_of(view), ", but must have shape (batch, heads, queries) = (", e.batch, ", ",
              e.heads, ", ", e.queries, ")");
}

int64_t lse_bytes(const Extents &e, int32_t dtype) {
  const int64_t rows = e.is_varlen ? e.total_queries : e.batch * e.queries;
  return rows * e.heads * static_cast<int64_t>(dtype == FDM_FLOAT64 ? sizeof(double) : sizeof(float));
}

fdm_tensor contiguous_lse(void *data, const Extents &e, int32_t dtype) {
  const int64_t batch = e.is_varlen ? 1 : e.batch, rows = e.is_varlen ? e.total_queries : e.queries;
  return {lse_bytes(e, dtype) == 0 ? nullptr : data, {batch, e.heads, rows, 1}, {e.heads * rows, rows, 1, 1}, dtype, 0};
}

bool is_empty(const fdm_tensor &tensor) { return std::count(tensor.shape, tensor.shape + 4, 0) != 0; }

bool same_shape(const fdm_tensor &a, const fdm_tensor &b) {
  for (int i = 0; i < 4; ++i)
    if (a.shape[i] != b.shape[i]) return false;
  return true;
}

} // namespace fdm
