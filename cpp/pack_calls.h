// SPDX-License-Identifier: BSD-3-Clause
// Messages and argument checks of the entry points of every pack. They cover the limits of the pack and the sizes of
// buffers. The core has already checked shapes and dtypes.
#pragma once

#include <cstdio>
#include <exception>
#include <new>

#include "indexing.h"

namespace fdm {

// The buffer for the message of a failed call.
struct Message {
  char *text;
  size_t bytes;

  int32_t fail(fdm_status status, const char *words) const { return fail(status, "%s", words); }

  template <class... Values> int32_t fail(fdm_status status, const char *format, Values... values) const {
    static_assert(sizeof...(Values) > 0, "the plain text overload is meant");
    if (text && bytes) std::snprintf(text, bytes, format, printed(values)...);
    return status;
  }

private:
  // The type of %lld, which not all platforms have as int64_t.
  static long long printed(int64_t value) { return value; }
  template <class Value> static Value printed(Value value) { return value; }
};

// The limits of a pack.
struct PackLimits {
  int32_t max_head_dim;
  uint32_t dtypes; // see fdm_pack.dtypes
  uint32_t key_bias_dtypes = 0;
  int32_t row_bytes = 1; // these and the next: see fdm_pack
  int32_t narrow_head_dim = 0, narrow_value_dim = 0;
};

template <class Args> int32_t check_args(const Args *args, const char *name, const Message &message) {
  if (args && args->struct_size >= sizeof(Args)) return FDM_OK;
  return message.fail(FDM_INVALID_ARGUMENT, "%s has %u bytes, this pack was compiled with %zu", name,
                      args ? args->struct_size : 0u, sizeof(Args));
}

static inline int32_t check_problem(const fdm_problem *p, const PackLimits &limits, const Message &message) {
  if (int32_t status = check_args(p, "fdm_problem", message)) return status;
  if (p->head_dim < 1 || p->head_dim > limits.max_head_dim)
    return message.fail(FDM_UNSUPPORTED, "head dimension %lld is not in 1 ... %d", p->head_dim, limits.max_head_dim);
  const int64_t value_dim = p->v.shape[3];
  const bool is_narrow = value_dim <= limits.narrow_value_dim && value_dim % 8 == 0 &&
                         p->head_dim > limits.narrow_value_dim && p->head_dim <= limits.narrow_head_dim &&
                         !present(p->block_table) && !has_key_lists(*p) && !has_query_rows(p->bias);
  if (value_dim != p->head_dim && !is_narrow)
    return message.fail(FDM_UNSUPPORTED, "values of %lld columns beside keys of %lld are not supported", value_dim,
                        p->head_dim);
  if (p->q.dtype < 0 || p->q.dtype > 31 || !(limits.dtypes >> p->q.dtype & 1u))
    return message.fail(FDM_UNSUPPORTED, "dtype %d of q is not supported", p->q.dtype);
  if (p->kv_heads < 1 || p->heads < 1 || p->heads % p->kv_heads != 0)
    return message.fail(FDM_INVALID_ARGUMENT, "%lld query heads are not a multiple of %lld key/value heads", p->heads,
                        p->kv_heads);
  if (p->heads > INT32_MAX)
    return message.fail(FDM_UNSUPPORTED, "%lld query heads: there are at most 2^31 - 1", p->heads);
  if (p->queries > INT32_MAX || p->keys > INT32_MAX)
    return message.fail(FDM_UNSUPPORTED, "%lld queries and %lld keys: a sequence has at most 2^31 - 1 of each",
                        p->queries, p->keys);
  if (p->context.threads < 1)
    return message.fail(FDM_INVALID_ARGUMENT, "threads is %d, at least 1 is needed", p->context.threads);
  return FDM_OK;
}

// Of a tensor whose rows have 16-bit elements.
static inline int32_t check_rows(const fdm_tensor &t, const char *name, const PackLimits &limits,
                                 const Message &message) {
  const int64_t count = limits.row_bytes / 2;
  if (limits.row_bytes == 1 || (t.shape[3] % count == 0 && rows_have_chunks(t, count, limits.row_bytes))) return FDM_OK;
  return message.fail(FDM_INVALID_ARGUMENT, "rows of %s cannot be copied %d bytes at a time", name, limits.row_bytes);
}
static inline int32_t check_input_rows(const fdm_problem &p, const PackLimits &limits, const Message &message) {
  if (int32_t status = check_rows(p.q, "q", limits, message)) return status;
  if (int32_t status = check_rows(p.k, "k", limits, message)) return status;
  return check_rows(p.v, "v", limits, message);
}

// Of a problem whose mask has blocks.
static inline int32_t check_block_mask(const fdm_problem &p, const Message &message) {
  if (is_per_query(p.mask) && !is_varlen(p) && !has_query_rows(p.bias)) return FDM_OK;
  return message.fail(FDM_UNSUPPORTED,
                      "a mask of blocks needs several queries that are not packed, and no bias per query");
}

static inline int32_t check_buffer(const char *name, fdm_buffer buffer, int64_t needed, const Message &message) {
  if (buffer.bytes >= needed && (buffer.data || needed == 0)) return FDM_OK;
  return message.fail(FDM_BUFFER_TOO_SMALL, "%s has %lld bytes, %lld are needed", name, buffer.bytes, needed);
}

static inline int32_t check_selection(const fdm_selection *s, const Message &message) {
  if (int32_t status = check_args(s, "fdm_selection", message)) return status;
  if (s->queries > INT32_MAX || s->keys > INT32_MAX)
    return message.fail(FDM_UNSUPPORTED, "%lld queries and %lld keys: a sequence has at most 2^31 - 1 of each",
                        s->queries, s->keys);
  if (s->kv_heads >= 1 && s->heads % s->kv_heads == 0 && s->window >= 0 && s->keep_last >= 0 &&
      s->keep_last <= s->keys && s->keep_first >= 0 && s->keep_first <= s->keys && s->context.threads >= 1)
    return FDM_OK;
  return message.fail(
      FDM_INVALID_ARGUMENT,
      "heads %lld, kv_heads %lld, window %lld, keep_last %lld, keep_first %lld or threads %d is out of range", s->heads,
      s->kv_heads, s->window, s->keep_last, s->keep_first, s->context.threads);
}

static inline int32_t check_forgetting(const fdm_forgetting *f, const Message &message) {
  if (int32_t status = check_args(f, "fdm_forgetting", message)) return status;
  if (f->log_forget.shape[3] > INT32_MAX)
    return message.fail(FDM_UNSUPPORTED, "%lld gates: a row has at most 2^31 - 1", f->log_forget.shape[3]);
  if (f->context.threads >= 1 && f->least <= 0 && !(f->prune > 0)) return FDM_OK;
  return message.fail(FDM_INVALID_ARGUMENT, "least %g, prune %g or threads %d is out of range", f->least, f->prune,
                      f->context.threads);
}

// Kernels count keys beyond the last one, at most those that 512 threads of 32 keys look at.
constexpr int64_t kBlockMaskKeyLimit = INT32_MAX - (int64_t{1} << 15);

static inline int32_t check_blocks(const fdm_problem &p, const fdm_mask_blocks *blocks, const Message &message) {
  if (int32_t status = check_args(blocks, "fdm_mask_blocks", message)) return status;
  if (!has_mask_blocks(p)) return message.fail(FDM_INVALID_ARGUMENT, "the mask of the problem is not one of blocks");
  if (int32_t status = check_block_mask(p, message)) return status;
  if (p.keys > kBlockMaskKeyLimit)
    return message.fail(FDM_UNSUPPORTED, "a mask of blocks has %lld keys, more than the largest number, %lld",
                        (long long)p.keys, (long long)kBlockMaskKeyLimit);
  const int64_t (&numbers)[4] = blocks->numbers.shape, (&contents)[4] = blocks->contents.shape;
  const bool has_size = contents[1] >= 1 && contents[1] <= INT32_MAX && contents[2] >= 1 && contents[2] <= INT32_MAX;
  if (!has_size || blocks->kept < 0 || blocks->partial < 0 || numbers[0] != p.mask.shape[0] ||
      numbers[1] != p.mask.shape[1] || numbers[2] != ceil_div(p.queries, contents[1]) ||
      numbers[3] != ceil_div(p.keys, contents[2]))
    return message.fail(FDM_INVALID_ARGUMENT, "the shapes or the counts of the blocks do not fit the problem");
  return FDM_OK;
}

// Runs `work` and converts its exceptions to a status. An exception must not cross the C interface.
template <class Work> int32_t run_guarded(const Message &message, const Work &work) {
  try {
    return work();
  } catch (const std::bad_alloc &) {
    return message.fail(FDM_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    return message.fail(FDM_INTERNAL_ERROR, "%s", error.what());
  }
}

} // namespace fdm
