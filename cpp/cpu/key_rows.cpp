// SPDX-License-Identifier: BSD-3-Clause
#include "key_rows.h"

#include "kernels.h"
#include "thread_pool.h"

namespace fdm::cpu {
namespace {

constexpr int64_t kKeysOfTask = 64;

bool is_copied(const fdm_problem &p, const fdm_tensor &t) {
  if (!lists_keys(p) || present(p.block_table)) return false;
  const int64_t keys = t.shape[0] * t.shape[1], listed = p.q.shape[0] * p.q.shape[1] * p.indices.shape[3];
  const bool is_table = t.dtype == FDM_FLOAT32 && t.stride[3] == 1 && t.stride[1] == p.head_dim;
  return !is_table && listed >= 2 * keys;
}

int64_t copied_bytes(const fdm_problem &p, const fdm_tensor &t) {
  if (!is_copied(p, t)) return 0;
  return round_up(t.shape[0] * t.shape[1] * p.kv_heads * p.head_dim * int64_t(sizeof(float)), 64);
}

fdm_tensor copied(const fdm_problem &p, const fdm_tensor &t, void *memory) {
  if (!is_copied(p, t)) return t;
  fdm_tensor copy = t;
  copy.data = memory;
  copy.dtype = FDM_FLOAT32;
  copy.stride[3] = 1;
  copy.stride[1] = p.head_dim;
  copy.stride[0] = t.shape[1] * p.head_dim;
  copy.stride[2] = t.shape[0] * copy.stride[0];
  const Kernels &kernels = best_kernels();
  const int64_t parts = ceil_div(t.shape[1], kKeysOfTask);
  const int threads = useful_threads(p.context.threads, double(p.kv_heads * copy.stride[2]));
  parallel_for(threads, p.kv_heads * t.shape[0] * parts, [&](int64_t number, int) {
    const int64_t first = number % parts * kKeysOfTask, batch = number / parts % t.shape[0];
    const int64_t head = number / parts / t.shape[0], count = min64(kKeysOfTask, t.shape[1] - first);
    const auto place = [&](const fdm_tensor &of) {
      return batch * of.stride[0] + first * of.stride[1] + head * of.stride[2];
    };
    kernels.load_rows(t, place(t), count, p.head_dim, static_cast<float *>(memory) + place(copy));
  });
  return copy;
}

} // namespace

int64_t key_row_bytes(const fdm_problem &p) { return copied_bytes(p, p.k) + copied_bytes(p, p.v); }

fdm_problem with_key_rows(const fdm_problem &p, void *memory) {
  fdm_problem gathered = p;
  gathered.k = copied(p, p.k, memory);
  gathered.v = copied(p, p.v, static_cast<char *>(memory) + copied_bytes(p, p.k));
  return gathered;
}

} // namespace fdm::cpu
