// SPDX-License-Identifier: BSD-3-Clause
// Selection row by row into booleans: one block of threads for each row of the result.
#include "../host/launch.cuh"
#include "radix_select.cuh"
#include "select.h"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 512;

template <int kBits>
__global__ void __launch_bounds__(kThreads, 2)
    select_keep_rows(const __grid_constant__ fdm_selection s, uint32_t rows) {
  __shared__ typename RadixSelect<kThreads>::Shared shared;
  const auto heads = static_cast<uint32_t>(s.keep.shape[1]);
  const int64_t i = blockIdx.x % rows, head = blockIdx.x / rows % heads, b = blockIdx.x / rows / heads;
  const bool varlen = present(s.cu_seqlens_q), per_row = s.keep.shape[2] > 1;
  const SelectionRow r = selection_row(s, s.keep, b, head);
  if (per_row && i >= r.q_count) return;
  // A row for all queries is that of the last query, which sees the most keys.
  const int64_t query = per_row ? i : max64(0, r.q_count - 1);
  const int64_t limit = (s.flags & FDM_CAUSAL) ? query + r.causal_off + 1 : r.k_count;
  const auto visible = static_cast<int32_t>(max64(0, min64(r.k_count, limit)));
  Candidates<kBits> source(s, r, query);
  if (s.keep_last > 0 || s.keep_first > 0) {
    const bool masked = source.masked;
    const int64_t seen = masked ? RadixSelect<kThreads>::count_seen(shared, source.mask, visible) : visible;
    const auto past_seen = [&](int64_t count) {
      if (masked) return RadixSelect<kThreads>::last_seen(shared, source.mask, visible, count) + 1;
      return static_cast<int32_t>(clamp64(count, 0, visible));
    };
    source.first_ranked = past_seen(s.keep_first);
    const int32_t past = s.keep_last > 0 ? past_seen(seen - s.keep_last) : visible;
    source.ranked_count = static_cast<uint32_t>(max(0, past - source.first_ranked));
  }
  const Window window = RadixSelect<kThreads>::select(shared, source, visible, s.window);

  const auto columns = static_cast<int32_t>(per_row ? s.keep.shape[3] : r.k_count);
  const int64_t stride = s.keep.stride[3];
  auto *keep = static_cast<uint8_t *>(s.keep.data) + (varlen ? 0 : b) * s.keep.stride[0] + head * s.keep.stride[1] +
               (per_row ? (r.q_begin + i) * s.keep.stride[2] : r.k_begin * stride);
  for (int32_t j = threadIdx.x; j < columns; j += kThreads) {
    const uint32_t value = j < visible ? source.value(j) : 0;
    keep[j * stride] = value != 0 && (!source.ranks(j) || window.holds(value, j));
  }
}

} // namespace

cudaError_t select_keep(const fdm_selection &s, const SelectionRoute &route, cudaStream_t stream) {
  return with_bias_bits(s, [&](auto bits) {
    return launch(select_keep_rows<decltype(bits)::value>, route.blocks, kThreads, 0, stream, s,
                  uint32_t(kept_rows(s)));
  });
}

} // namespace fdm::cuda
