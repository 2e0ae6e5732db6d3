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

int64_t forward_workspace_bytes(const fdm_problem &p) {
  return p.context.threads * tile_scratch_bytes(p, false) + key_row_bytes(p);
}

void forward_pass(const fdm_problem &given, const fdm_forward_args &args, const void *plan, void *workspace) {
  if (given.batch == 0 || given.queries == 0 || given.heads == 0) return;
  const int64_t scratch = tile_scratch_bytes(given, false);
  const fdm_problem p = with_key_rows(given, static_cast<char *>(workspace) + given.context.threads * scratch);
  const Kernels &kernels = best_kernels();
  const int64_t rows = tile_rows(p, plan), tiles = ceil_div(p.queries, rows);
  const int64_t heads = heads_per_task(p), groups = p.heads / heads;
  const int threads = useful_threads(p.context.threads, forward_work(p, rows));
  parallel_for(threads, p.batch * groups * tiles, [&](int64_t number, int worker) {
    TileTask task;
    // The last tiles see the most keys under a causal mask, so they come first.
    const int64_t tile = tiles - 1 - number % tiles;
    task.sequence_index = number / tiles / groups;
    task.sequence = sequence(p, task.sequence_index);
    task.head = number / tiles % groups * heads;
    task.heads = heads;
    task.first_row = tile * rows;
    task.rows = min64(rows, task.sequence.q_count - task.first_row);
    if (task.rows <= 0) return;
    kernels.forward_tile(p, args, plan, task, static_cast<char *>(workspace) + worker * scratch);
  });
}

} // namespace fdm::cpu
