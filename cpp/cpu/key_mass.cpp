// SPDX-License-Identifier: BSD-3-Clause
// The pass that sums the probabilities of each key.
//
// A unit is one KV head of one sequence. If there are too few of those for the threads, a unit is an interleaved part
// of its row tiles, with separate sums. The parts are added in order: no two threads add to the same number.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "passes.h"
#include "scratch.h"
#include "thread_pool.h"

namespace fdm::cpu {
namespace {

int64_t part_count(const fdm_problem &p) {
  const int64_t threads = p.context.threads, heads = p.batch * p.kv_heads;
  if (heads == 0 || threads == 1) return 1;
  return max64(1, min64(ceil_div(p.queries, kMaxTileRows), ceil_div(2 * threads, heads)));
}

// Sums of all parts but the first, which uses the result tensor.
int64_t part_floats(const fdm_problem &p) { return (part_count(p) - 1) * p.batch * p.heads * p.keys; }

} // namespace

int64_t CpuPack::key_mass_workspace_bytes(const fdm_problem &p) {
  return p.context.threads * round_up(tile_scratch_bytes(p, false), 64) + part_floats(p) * int64_t(sizeof(float));
}

void CpuPack::key_mass(const fdm_problem &p, const fdm_key_mass_args &args, const void *plan, void *workspace) {
  const fdm_tensor &mass = args.mass;
  auto *const result = static_cast<float *>(mass.data);
  // memset requires an address even for 0 bytes
  std::fill_n(result, mass.shape[0] * mass.shape[1] * mass.shape[2], 0.0f);
  if (p.batch == 0 || p.queries == 0 || p.keys == 0) return;
  const Kernels &kernels = best_kernels();
  const int64_t scratch = round_up(tile_scratch_bytes(p, false), 64), parts = part_count(p);
  auto *const base = static_cast<char *>(workspace);
  auto *const more = reinterpret_cast<float *>(base + p.context.threads * scratch);
  const int64_t rows = tile_rows(p, plan), heads = heads_per_task(p), group = group_size(p);
  const int threads = useful_threads(p.context.threads, forward_work(p, rows));
  // The sums of a part of query head h of sequence b, and the distance to those of the next head.
  const auto sums_of = [&](int64_t part, int64_t b, const Sequence &s, int64_t h, int64_t *stride) {
    *stride = part == 0 ? mass.stride[1] : p.keys;
    if (part == 0) return result + s.batch * mass.stride[0] + h * mass.stride[1] + s.k_begin;
    return more + (((part - 1) * p.batch + b) * p.heads + h) * p.keys;
  };
  parallel_for(threads, p.batch * p.kv_heads * parts, [&](int64_t unit, int worker) {
    const int64_t part = unit % parts, b = unit / parts / p.kv_heads, kv_head = unit / parts % p.kv_heads;
    TileTask task;
    task.sequence_index = b;
    task.sequence = sequence(p, b);
    task.heads = heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h += heads) {
      int64_t stride;
      float *const sums = sums_of(part, b, task.sequence, h, &stride);
      if (part > 0) std::memset(sums, 0, size_t(heads * p.keys) * sizeof(float));
      task.head = h;
      for (int64_t tile = part; tile * rows < task.sequence.q_count; tile += parts) {
        task.first_row = tile * rows;
        task.rows = min64(rows, task.sequence.q_count - task.first_row);
        kernels.key_mass_tile(p, args.lse, plan, task, sums, stride, base + worker * scratch);
      }
    }
  });
  if (parts == 1) return;
  parallel_for(threads, p.batch * p.heads, [&](int64_t number, int) {
    const int64_t b = number / p.heads, h = number % p.heads;
    const Sequence s = sequence(p, b);
    int64_t stride;
    float *const sums = sums_of(0, b, s, h, &stride);
    for (int64_t part = 1; part < parts; ++part) {
      const float *const part_sums = sums_of(part, b, s, h, &stride);
      for (int64_t j = 0; j < s.k_count; ++j) sums[j] += part_sums[j];
    }
  });
}

} // namespace fdm::cpu
