// SPDX-License-Identifier: BSD-3-Clause
// Selection row by row into booleans: one thread block per row of the result.
#include "../host/launch.cuh"
#include "keep_row.cuh"
#include "radix_select.cuh"
#include "select.h"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 512;

template <int kBits>
__global__ void __launch_bounds__(kThreads, 2)
    select_keep_rows(const __grid_constant__ fdm_selection s, uint32_t rows) {
  __shared__ typename RadixSelect<kThreads>::Shared shared;
  const KeepRow row(s, rows, blockIdx.x);
  if (row.absent) return;
  const int32_t visible = row.visible;
  Candidates<kBits> candidates(s, row, row.query);
  if (s.keep_last > 0 || s.keep_first > 0) {
    const bool masked = candidates.masked;
    const int64_t seen = masked ? RadixSelect<kThreads>::count_seen(shared, candidates.mask, visible) : visible;
    const auto past_seen = [&](int64_t count) {
      if (masked) return RadixSelect<kThreads>::last_seen(shared, candidates.mask, visible, count) + 1;
      return static_cast<int32_t>(clamp64(count, 0, visible));
    };
    candidates.first_ranked = past_seen(s.keep_first);
    const int32_t past = s.keep_last > 0 ? past_seen(seen - s.keep_last) : visible;
    candidates.ranked_count = static_cast<uint32_t>(max(0, past - candidates.first_ranked));
  }
  const Window window = RadixSelect<kThreads>::select(shared, candidates, visible, s.window);

  for (int32_t j = threadIdx.x; j < row.columns; j += kThreads) {
    const uint32_t value = j < visible ? candidates.value(j) : 0;
    row.keep[j * row.stride] = value != 0 && (!candidates.ranks(j) || window.holds(value, j));
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
