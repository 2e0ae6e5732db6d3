// SPDX-License-Identifier: BSD-3-Clause
// Selection of the keys with the largest bias: fdm_pack.select.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../indexing.h"
#include "passes.h"
#include "scalar.h"
#include "thread_pool.h"

namespace fdm::cpu {
namespace {

// The cost of a key of a row in multiply-adds: 12 ns, measured for 8192 keys.
constexpr double kWorkPerKey = 500.0;

struct Candidate {
  float bias;
  int32_t key;
};

// The order of selection: larger bias first, then lower key.
bool selected_before(const Candidate &a, const Candidate &b) {
  return a.bias > b.bias || (a.bias == b.bias && a.key < b.key);
}

// A sequence and a head of the attention problem for the rows of a result.
struct Row : Sequence {
  int64_t head;
};

// The offset of element (i, j) of a bias or mask; i and j count from the start of the sequence.
int64_t element(const fdm_selection &s, const fdm_tensor &t, const Row &r, int64_t i, int64_t j) {
  const int64_t head = t.shape[1] == 1 ? 0 : (t.shape[1] == s.heads ? r.head : r.head / (s.heads / s.kv_heads));
  int64_t offset = (t.shape[0] == 1 ? 0 : r.batch) * t.stride[0] + head * t.stride[1];
  const bool rows = t.shape[2] > 1;
  if (rows) offset += (r.q_begin + i) * t.stride[2];
  if (t.shape[3] > 1) offset += (j + (rows ? 0 : r.k_begin)) * t.stride[3];
  return offset;
}

bool mask_keeps(const fdm_selection &s, const Row &r, int64_t i, int64_t j) {
  return !present(s.mask) || static_cast<const uint8_t *>(s.mask.data)[element(s, s.mask, r, i, j)];
}

// The candidate of key j in row i, which the mask keeps; false if the bias excludes it.
bool candidate(const fdm_selection &s, const Row &r, int64_t i, int64_t j, Candidate *out) {
  out->bias = load_scalar(s.bias.data, s.bias.dtype, element(s, s.bias, r, i, j));
  out->key = int32_t(j);
  return out->bias > -INFINITY; // false for NaN too
}

int64_t visible_count(const fdm_selection &s, const Row &r, int64_t i) {
  return (s.flags & FDM_CAUSAL) ? min64(r.k_count, i + r.causal_off + 1) : r.k_count;
}

// When query i advances, key i + K - Q becomes visible and the window drops its last member. So one pass over the
// keys with a heap gives each key the one run of queries that select it. The run ends keep_last seen keys after the
// key that drives it out of the heap, or after the key itself if it never enters. `seen` has room for the row's keys.
void select_intervals(const fdm_selection &s, const Row &r, Candidate *heap, int32_t *seen, int32_t *start,
                      int32_t *end, int64_t start_stride, int64_t end_stride) {
  int64_t seen_count = 0;
  for (int64_t j = 0; j < r.k_count; ++j)
    if (mask_keeps(s, r, 0, j)) seen[seen_count++] = int32_t(j);
  const auto row_of = [&](int64_t j) { return clamp64(j - r.causal_off, 0, r.q_count); };
  const auto write = [&](int64_t key, int64_t past_row) {
    const bool selected = row_of(key) < past_row;
    start[key * start_stride] = selected ? int32_t(row_of(key)) : 0;
    end[key * end_stride] = selected ? int32_t(past_row) : 0;
  };
  int64_t held = 0, previous_seen = 0; // keys in the heap; seen keys before key j
  for (int64_t j = 0; j < r.k_count; ++j) {
    Candidate c;
    const bool is_seen = previous_seen < seen_count && seen[previous_seen] == j;
    const int64_t number = previous_seen, leaver_number = number + s.keep_last;
    previous_seen += is_seen;
    if (!is_seen || !candidate(s, r, 0, j, &c)) {
      write(j, 0);
      continue;
    }
    if (number < s.keep_first) {
      write(j, r.q_count);
      continue;
    }
    const int64_t past_row = leaver_number < seen_count ? row_of(seen[leaver_number]) : r.q_count;
    if (s.window == 0 || (held == s.window && !selected_before(c, heap[0]))) {
      write(j, past_row);
      continue;
    }
    if (held == s.window) {
      write(heap[0].key, past_row);
      std::pop_heap(heap, heap + held, selected_before);
      --held;
    }
    heap[held] = c;
    ++held;
    std::push_heap(heap, heap + held, selected_before);
  }
  for (int64_t n = 0; n < held; ++n) write(heap[n].key, r.q_count);
}

void select_row(const fdm_selection &s, const Row &r, int64_t i, Candidate *candidates, uint8_t *keep, int64_t stride,
                int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) keep[j * stride] = 0;
  int64_t count = 0, number = 0;
  const int64_t visible = visible_count(s, r, i);
  int64_t first_of_last = visible; // the last keep_last seen keys begin here
  for (int64_t last = s.keep_last; last > 0 && first_of_last > 0;) last -= mask_keeps(s, r, i, --first_of_last);
  for (int64_t j = 0; j < visible; ++j) {
    if (!mask_keeps(s, r, i, j)) continue;
    const bool by_position = number++ < s.keep_first || j >= first_of_last;
    if (!candidate(s, r, i, j, candidates + count)) continue;
    if (by_position)
      keep[j * stride] = 1;
    else
      ++count;
  }
  if (count > s.window) {
    std::nth_element(candidates, candidates + s.window, candidates + count, selected_before);
    count = s.window;
  }
  for (int64_t n = 0; n < count; ++n) keep[candidates[n].key * stride] = 1;
}

// All keys of a keep row can be candidates and be seen.
int64_t candidate_bytes(const fdm_selection &s) { return round_up(max64(1, s.keys) * int64_t(sizeof(Candidate)), 64); }
int64_t seen_bytes(const fdm_selection &s) { return round_up(max64(1, s.keys) * int64_t(sizeof(int32_t)), 64); }

const fdm_tensor &result(const fdm_selection &s) { return present(s.keep) ? s.keep : s.start; }

} // namespace

int64_t CpuPack::selection_workspace_bytes(const fdm_selection &s) {
  return s.context.threads * (candidate_bytes(s) + seen_bytes(s));
}

void CpuPack::select(const fdm_selection &s, void *workspace) {
  const fdm_tensor &out = result(s);
  const bool varlen = present(s.cu_seqlens_q), keep = present(s.keep);
  const int64_t batches = varlen ? s.batch : out.shape[0], heads = out.shape[1];
  const int64_t rows = keep ? (varlen && out.shape[2] > 1 ? s.queries : out.shape[2]) : 1;
  const int64_t query_heads_each = s.heads / max64(1, heads);
  const int threads = useful_threads(s.context.threads, kWorkPerKey * double(batches * heads * rows * s.keys));
  parallel_for(threads, batches * heads * rows, [&](int64_t task, int worker) {
    const int64_t i = task % rows, head = task / rows % heads, b = task / rows / heads;
    const Row r{sequence(s, b), head * query_heads_each};
    const bool per_row = keep && out.shape[2] > 1;
    if (per_row && i >= r.q_count) return;
    char *const scratch = static_cast<char *>(workspace) + worker * (candidate_bytes(s) + seen_bytes(s));
    auto *candidates = reinterpret_cast<Candidate *>(scratch);
    auto *seen = reinterpret_cast<int32_t *>(scratch + candidate_bytes(s));
    int64_t offset = (varlen ? 0 : b) * out.stride[0] + head * out.stride[1];
    if (keep) {
      offset += per_row ? (r.q_begin + i) * out.stride[2] : r.k_begin * out.stride[3];
      const int64_t columns = per_row ? out.shape[3] : r.k_count;
      select_row(s, r, per_row ? i : max64(0, r.q_count - 1), candidates, static_cast<uint8_t *>(out.data) + offset,
                 out.stride[3], columns);
    } else {
      const int64_t end_offset =
          (varlen ? 0 : b) * s.end.stride[0] + head * s.end.stride[1] + r.k_begin * s.end.stride[3];
      offset += r.k_begin * out.stride[3];
      select_intervals(s, r, candidates, seen, static_cast<int32_t *>(s.start.data) + offset,
                       static_cast<int32_t *>(s.end.data) + end_offset, s.start.stride[3], s.end.stride[3]);
    }
  });
}

} // namespace fdm::cpu
