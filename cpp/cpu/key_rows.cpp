// SPDX-License-Identifier: BSD-3-Clause
#include "key_rows.h"

#include "kernels.h"
#include "thread_pool.h"

namespace fdm::cpu {
namespace {

constexpr int64_t kKeysPerTask = 64;

bool is_copied(const fdm_problem &p, const fdm_tensor &t) {
  if (!has_key_lists(p) || present(p.block_table)) return false;
  const int64_t keys = t.shape[0] * t.shape[1], listed = p.q.shape[0] * p.q.shape[1] * p.indices.shape[3];
  const bool is_table = t.dtype == FDM_FLOAT32 && t.stride[3] == 1 && t.stride[1] == p.head_dim;
  return !is_table && listed >= 2 * keys;
}

int64_t copied_bytes(const fdm_problem &p, const fdm_tensor &t, int64_t rows) {
  return is_copied(p, t) ? round_up(rows * p.head_dim * int64_t(sizeof(float)), 64) : 0;
}

// Rows of K and V of all heads.
int64_t all_rows(const fdm_problem &p) { return p.k.shape[0] * p.k.shape[1] * p.kv_heads; }

// The tensor with consecutive rows at `memory`, ordered by head, then batch.
fdm_tensor copy_at(const fdm_problem &p, const fdm_tensor &t, void *memory) {
  fdm_tensor copy = t;
  copy.data = memory;
  copy.dtype = FDM_FLOAT32;
  copy.stride[3] = 1;
  copy.stride[1] = p.head_dim;
  copy.stride[0] = t.shape[1] * p.head_dim;
  copy.stride[2] = t.shape[0] * copy.stride[0];
  return copy;
}

fdm_tensor copied(const fdm_problem &p, const fdm_tensor &t, void *memory) {
  if (!is_copied(p, t)) return t;
  const fdm_tensor copy = copy_at(p, t, memory);
  const Kernels &kernels = best_kernels();
  const int64_t parts = ceil_div(t.shape[1], kKeysPerTask);
  const int threads = useful_threads(p.context.threads, double(p.kv_heads * copy.stride[2]));
  parallel_for(threads, p.kv_heads * t.shape[0] * parts, [&](int64_t number, int) {
    const int64_t first = number % parts * kKeysPerTask, batch = number / parts % t.shape[0];
    const int64_t head = number / parts / t.shape[0], count = min64(kKeysPerTask, t.shape[1] - first);
    const auto offset = [&](const fdm_tensor &of) {
      return batch * of.stride[0] + first * of.stride[1] + head * of.stride[2];
    };
    kernels.load_rows(t, offset(t), count, p.head_dim, static_cast<float *>(memory) + offset(copy));
  });
  return copy;
}

fdm_tensor head_copied(const fdm_problem &p, const fdm_tensor &t, const Sequence &s, int64_t kv_head, void *memory) {
  if (!is_copied(p, t)) return t;
  const int64_t offset = s.batch * t.stride[0] + s.k_begin * t.stride[1] + kv_head * t.stride[2];
  best_kernels().load_rows(t, offset, s.k_count, p.head_dim, static_cast<float *>(memory));
  fdm_tensor copy = copy_at(p, t, static_cast<float *>(memory) - s.k_begin * p.head_dim);
  copy.stride[0] = copy.stride[2] = 0;
  return copy;
}

} // namespace

bool copies_by_head(const fdm_problem &p) {
  constexpr int64_t kMinHeadsPerThread = 4; // limits the time that a thread waits for another
  return has_key_lists(p) && (p.context.threads == 1 || p.batch * p.kv_heads >= kMinHeadsPerThread * p.context.threads);
}

int64_t key_row_bytes(const fdm_problem &p, bool by_head) {
  const int64_t rows = by_head ? p.keys : all_rows(p), copies = by_head ? p.context.threads : 1;
  return copies * (copied_bytes(p, p.k, rows) + copied_bytes(p, p.v, rows));
}

fdm_problem with_key_rows(const fdm_problem &p, void *memory) {
  fdm_problem gathered = p;
  gathered.k = copied(p, p.k, memory);
  gathered.v = copied(p, p.v, static_cast<char *>(memory) + copied_bytes(p, p.k, all_rows(p)));
  return gathered;
}

fdm_problem with_key_rows(const fdm_problem &p, const Sequence &s, int64_t kv_head, void *memory, int worker) {
  const int64_t bytes = copied_bytes(p, p.k, p.keys);
  char *const own = static_cast<char *>(memory) + worker * (bytes + copied_bytes(p, p.v, p.keys));
  fdm_problem gathered = p;
  gathered.k = head_copied(p, p.k, s, kv_head, own);
  gathered.v = head_copied(p, p.v, s, kv_head, own + bytes);
  return gathered;
}

} // namespace fdm::cpu
