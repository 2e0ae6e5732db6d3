// SPDX-License-Identifier: BSD-3-Clause
// The counts of the tiles of a key mask.
#pragma once

#include "list_work.cuh"

namespace fdm::cuda {

// The columns of the tiles of a key mask are the first kept keys of the list: those that the tile's last row sees.
// Full columns are those that its first row sees.
struct KeyTileCounts {
  TileCounts *counts; // of the sequence's first tile; null: no key mask
  int64_t causal_off;
  int32_t queries;
  bool causal;

  __device__ KeyTileCounts(const fdm_problem &p, const Plan &plan, const ListWork &work)
      : counts(nullptr), causal_off(work.s.causal_off), queries(static_cast<int32_t>(work.s.q_count)),
        causal(is_causal(p)) {
    if (mask_kind(p) == FDM_MASK_KEYS)
      counts = plan.counts + work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, 0);
  }

  // Stores the counts that key j determines, the last key that a row sees. `kept` keys up to j are kept. Called once
  // per key.
  __device__ void pass(int64_t j, int32_t kept) const {
    if (!counts || !causal) return;
    const int64_t row = j - causal_off;
    if (row < 0 || row >= queries) return;
    if (row % kTileRows == 0) counts[row / kTileRows].full = kept;
    if (row % kTileRows == kTileRows - 1 || row == queries - 1) counts[row / kTileRows].columns = kept;
  }

  // Stores the other counts: of tiles that see no key, and without a causal limit of all. A thread block calls this.
  __device__ void finish(int32_t kept, int threads) const {
    if (!counts) return;
    const int32_t tiles = (queries + kTileRows - 1) / kTileRows;
    for (int32_t tile = threadIdx.x; tile < tiles; tile += threads) {
      const int64_t first = int64_t(tile) * kTileRows, last = min64(queries, first + kTileRows) - 1;
      if (!causal || first + causal_off < 0) counts[tile].full = causal ? 0 : kept;
      if (!causal || last + causal_off < 0) counts[tile].columns = causal ? 0 : kept;
    }
  }
};

} // namespace fdm::cuda
