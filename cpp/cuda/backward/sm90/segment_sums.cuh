// SPDX-License-Identifier: BSD-3-Clause
// Adds the gradients of keys that several segments of rows keep to their sums in global memory, a whole key at once: by
// way of the shared memory that K, V and the pipeline stages do not need any more.
#pragma once

#include "key_stationary.cuh"
#include "ptx/store.cuh"

namespace fdm::cuda {

// All consumers call this, after their last products; each has the columns of its accumulators from `first` on. The
// numbers of a key lie as round_sums.cu reads them: the four that a thread has of two neighbouring tiles of columns,
// then those of the next thread.
template <class Config>
__device__ void add_segment_sums(KeyStationaryShared<Config> &shared, const typename Config::Gradients &sums,
                                 int first = 0) {
  if (sums.params.keys.segments.most_sums == 0) return;
  using Roles = typename Config::Roles;
  constexpr int kHeadDim = Config::kHeadDim, kColumns = Config::kColumns, kRowBytes = 2 * kHeadDim * 4;
  constexpr int kStride = kRowBytes + 16; // the rows of a warp lie in different banks
  static_assert(Config::kKeys * kStride <= offsetof(KeyStationaryShared<Config>, stages));
  ptx::sync_threads<2, Roles::kConsumerThreads>(); // all products are done
  const auto store = [&](const float (&accumulators)[kColumns / 8][4], int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto *row = reinterpret_cast<float4 *>(shared.sK + sums.key_row(0, half) * kStride) + threadIdx.x % 4;
#pragma unroll
      for (int d = 0; d < kColumns / 8; d += 2) {
        const float (&low)[4] = accumulators[d], (&high)[4] = accumulators[d + 1];
        if (first + 8 * d < kHeadDim)
          row[column / 4 + 2 * d] = {low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]};
      }
    }
  };
  store(sums.dk[0], first);
  store(sums.dv[0], kHeadDim + first);
  ptx::fence_async_proxy();
  ptx::sync_threads<2, Roles::kConsumerThreads>();
  const auto key = static_cast<int>(threadIdx.x);
  if (key >= Config::kKeys || sums.keys.shared.key[key] < 0 || sums.keys.shared.sum[key] < 0) return;
  ptx::add_global_bulk(sums.keys.segment_sums(key), ptx::shared_address(shared.sK + key * kStride), kRowBytes);
  ptx::wait_for_bulk_reads();
}

} // namespace fdm::cuda
