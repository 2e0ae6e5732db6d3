// SPDX-License-Identifier: BSD-3-Clause
// The order in which the thread blocks of persistent kernels take tiles.
#pragma once

#include "../../../indexing.h"
#include "../../plan/plan.cuh"
#include "../../route/route.h"
#include "roles.cuh"

namespace fdm::cuda {

// A tile of kTileRows query rows of one head. The rows may lie beyond the sequence.
struct HeadTile {
  Sequence s;
  int64_t sequence_index, head, tile;

  __device__ bool has_rows() const { return tile >= 0 && tile * kTileRows < s.q_count; }
};

// The inverse of tile_number() for packed sequences: the last sequence whose first tile number is at most `number`. A
// warp tests 32 sequences at a time.
__device__ __forceinline__ int64_t find_packed_sequence(const fdm_problem &p, int64_t number) {
  const int lane = threadIdx.x % 32;
  int32_t first = 0, count = static_cast<int32_t>(p.batch);
  while (count > 1) {
    const int32_t step = (count + 31) / 32, ahead = lane * step;
    const bool begins = ahead < count && cu_bound(p.cu_seqlens_q, first + ahead) / kTileRows + first + ahead <= number;
    const int32_t taken = max(__popc(__ballot_sync(0xffffffffu, begins)) - 1, 0) * step;
    first += taken;
    count = min(step, count - taken);
  }
  return first;
}

// The tile of a number below sequence_tiles() * heads. The order.heads heads of a pass vary fastest, so heads of a
// GQA group meet in L2; then come the order.sequences sequences. The last tiles, the longest with a causal mask, come
// first. All lanes of a warp call this.
__device__ __forceinline__ HeadTile find_tile(const fdm_problem &p, const TileOrder &order, uint32_t number) {
  const auto heads = static_cast<uint32_t>(order.heads);
  HeadTile found;
  found.head = 0;
  if (order.heads != p.heads) {
    const uint32_t before = divide(number, order.pass_tiles);
    found.head = before * heads;
    number -= before * (static_cast<uint32_t>(sequence_tiles(p)) * heads);
  }
  const uint32_t row = divide(number, order.heads_divisor);
  found.head += number - row * heads;
  if (is_varlen(p)) {
    const int64_t tile = sequence_tiles(p) - 1 - row;
    found.sequence_index = find_packed_sequence(p, tile);
    found.s = sequence(p, found.sequence_index);
    found.tile = tile - tile_number(p, found.s, found.sequence_index, 0);
  } else {
    const auto tiles = static_cast<uint32_t>(ceil_div(p.queries, kTileRows));
    const auto together = static_cast<uint32_t>(order.sequences);
    const uint32_t first = divide(row, order.interleaved_tiles) * together, place = row - first * tiles;
    const uint32_t members = min(together, static_cast<uint32_t>(p.batch) - first);
    const uint32_t from_last = members == together ? divide(place, order.sequences_divisor) : place / members;
    found.sequence_index = first + (place - from_last * members);
    found.s = sequence(p, found.sequence_index);
    found.tile = tiles - 1 - from_last;
  }
  return found;
}

// The tile that a thread block takes as its `index`th in a fixed order. Tiles get shorter towards the end. Every
// other round goes backwards, so that no thread block always has the longest tile.
__device__ __forceinline__ int64_t tile_of_round(uint32_t index) {
  const uint32_t place = index % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  return place + int64_t(index) * gridDim.x;
}

} // namespace fdm::cuda
