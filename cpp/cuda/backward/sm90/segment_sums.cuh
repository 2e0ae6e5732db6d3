// SPDX-License-Identifier: BSD-3-Clause
// Adds the gradients of keys that several segments of rows keep to their sums in global memory, a whole key at once.
// After the last products, the shared memory of K, V and the pipeline stages is free for this.
#pragma once

#include "key_stationary.cuh"
#include "ptx/store.cuh"

namespace fdm::cuda {

// All consumers call this after their last products. The accumulators of a consumer are the columns from `first` on.
// The layout of a key is the one that round_sums.cu reads: four numbers of a thread from two neighbouring tiles of
// columns, then those of the next thread. If shared memory does not hold both gradients, dV follows after dK.
template <class Config>
__device__ void add_segment_sums(KeyStationaryShared<Config> &shared, const typename Config::Gradients &sums,
                                 int first = 0) {
  if (sums.params.keys.segments.max_sums == 0) return;
  using Roles = typename Config::Roles;
  constexpr int kHeadDim = Config::kHeadDim, kValueDim = Config::kValueDim;
  constexpr int kPadding = 16, kRoom = offsetof(KeyStationaryShared<Config>, stages) / Config::kKeys - kPadding;
  constexpr bool kFitsBoth = (kHeadDim + kValueDim) * 4 <= kRoom;
  constexpr int kRowBytes = (kFitsBoth ? kHeadDim + kValueDim : kHeadDim) * 4;
  constexpr int kStride = kRowBytes + kPadding; // the rows of a warp lie in different banks
  static_assert(kRowBytes <= kRoom);
  const auto store = [&](const auto &accumulators, int column, int columns) {
    constexpr int kTiles = sizeof(accumulators) / sizeof(accumulators[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto *row = reinterpret_cast<float4 *>(shared.sK + sums.key_row(0, half) * kStride) + threadIdx.x % 4;
#pragma unroll
      for (int d = 0; d < kTiles; d += 2) {
        const float (&low)[4] = accumulators[d], (&high)[4] = accumulators[d + 1];
        if (first + 8 * d < columns)
          row[(column + first) / 4 + 2 * d] = {low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]};
      }
    }
  };
  const auto add = [&](int column, int bytes) {
    ptx::fence_async_proxy();
    ptx::sync_threads<2, Roles::kConsumerThreads>();
    const auto key = static_cast<int>(threadIdx.x);
    if (key >= Config::kKeys || sums.keys.shared.key[key] < 0 || sums.keys.shared.sum[key] < 0) return;
    ptx::add_global_bulk(sums.keys.segment_sums(key) + column, ptx::shared_address(shared.sK + key * kStride), bytes);
    ptx::wait_for_bulk_reads();
  };
  ptx::sync_threads<2, Roles::kConsumerThreads>(); // all products are complete
  store(sums.dk[0], 0, kHeadDim);
  if constexpr (!kFitsBoth) {
    add(0, kHeadDim * 4);
    ptx::sync_threads<2, Roles::kConsumerThreads>(); // all sums of dK have been read
  }
  store(sums.dv[0], kFitsBoth ? kHeadDim : 0, kValueDim);
  add(kFitsBoth ? 0 : kHeadDim, kFitsBoth ? kRowBytes : kValueDim * 4);
}

} // namespace fdm::cuda
