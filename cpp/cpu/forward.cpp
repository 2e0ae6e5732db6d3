// SPDX-License-Identifier: BSD-3-Clause
#include "kernels.h"
#include "key_rows.h"
#include "passes.h"
#include "scratch.h"
#include "thread_pool.h"

namespace fdm::cpu {

int64_t tile_scratch_bytes(const fdm_problem &p, bool backward) {
  int64_t bytes;
  carve_tile_buffers(p, backward, nullptr, &bytes);
  return bytes;
}

int64_t CpuPack::forward_workspace_bytes(const fdm_problem &p) {
  return p.context.threads * tile_scratch_bytes(p, false) + key_row_bytes(p, copies_by_head(p));
}

void CpuPack::forward(const fdm_problem &given, const fdm_forward_args &args, const void *plan, void *workspace) {
  if (given.batch == 0 || given.queries == 0 || given.heads == 0) return;
  const int64_t scratch = tile_scratch_bytes(given, false);
  void *const copies = static_cast<char *>(workspace) + given.context.threads * scratch;
  const bool by_head = copies_by_head(given);
  const fdm_problem shared = by_head ? given : with_key_rows(given, copies);
  const Kernels &kernels = best_kernels();
  const int64_t rows = tile_rows(given, plan), tiles = ceil_div(given.queries, rows), parts = by_head ? 1 : tiles;
  const int64_t heads = heads_per_task(given), groups = given.heads / heads;
  const int threads = useful_threads(given.context.threads, forward_work(given, rows));
  parallel_for(threads, given.batch * groups * parts, [&](int64_t number, int worker) {
    TileTask task;
    task.sequence_index = number / parts / groups;
    task.sequence = sequence(given, task.sequence_index);
    const int64_t group = number / parts % groups;
    task.head = group * heads;
    task.heads = heads;
    const fdm_problem p = by_head ? with_key_rows(given, task.sequence, group, copies, worker) : shared;
    // Under a causal mask the last tiles see the most keys, so they come first.
    for (int64_t tile = tiles - 1 - number % parts; tile >= 0; tile -= parts) {
      task.first_row = tile * rows;
      task.rows = min64(rows, task.sequence.q_count - task.first_row);
      if (task.rows > 0) kernels.forward_tile(p, args, plan, task, static_cast<char *>(workspace) + worker * scratch);
    }
  });
}

} // namespace fdm::cpu
