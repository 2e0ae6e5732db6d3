// SPDX-License-Identifier: BSD-3-Clause
// Adds the parts of dbias tiles that several thread blocks share, in the order of the blocks.
#include "../tile/sum_parts.cuh"
#include "dbias_tiles.cuh"

namespace fdm::cuda {
namespace {

// An item is the boundary before a block, if it is the first inside a tile. Its values are pairs of adjacent
// elements.
struct DividedTiles {
  using Params = PairBiasBackward;
  using Value = float2;

  const PairBiasBackward &work;
  int64_t count, offset;
  PartSums parts;
  int64_t rows, keys; // existing ones, counted from the tile's first

  __device__ explicit DividedTiles(const PairBiasBackward &work_)
      : work(work_), count(is_superseded(work) ? 0 : work.dbias.blocks - 1) {}

  __device__ bool find(int64_t item) {
    const DbiasWork &division = work.dbias;
    const int64_t boundary = item + 1, inside = first_step(division, boundary);
    const int64_t number = inside / division.groups, first = number * division.groups;
    if (inside == first || inside >= division.steps || first_step(division, boundary - 1) > first) return false;
    // The block before the boundary begins the tile.
    const bool only = first_step(division, boundary - 1) == first; // the tile is the first of that block
    const int64_t size = int64_t(division.tile_rows) * division.tile_keys;
    parts = {division.parts + (2 * (boundary - 1) + (only ? 0 : 1)) * size, division.parts + 2 * boundary * size,
             2 * size, 1};
    while (item + parts.count < division.blocks && first_step(division, item + parts.count) < first + division.groups)
      ++parts.count;
    const DbiasTile tile(work, number);
    offset = dbias_offset(work, tile);
    rows = work.call.p.queries - int64_t(tile.row_tile) * division.tile_rows;
    keys = work.call.p.keys - int64_t(tile.key_tile) * division.tile_keys;
    return true;
  }

  __device__ int values() const { return work.dbias.tile_rows * work.dbias.tile_keys / 2; }
  __device__ int row(int i) const { return 2 * i / work.dbias.tile_keys; }
  __device__ int key(int i) const { return 2 * i % work.dbias.tile_keys; }
  __device__ int index(int i) const { return row(i) < rows ? pair_index(work.dbias, row(i), key(i)) : -1; }
  __device__ void store(int i, const float2 &sum) const {
    const fdm_tensor &t = work.a.dbias;
    store_pair<uint16_t>(t, work.dbias_pairs, offset + row(i) * t.stride[2] + key(i) * t.stride[3], sum.x, sum.y,
                         keys - key(i), AnyPacking{t.dtype == FDM_FLOAT16});
  }
};

} // namespace

cudaError_t launch_pair_bias_dbias_sum(const PairBiasBackward &work, const PartSumGrid &grid, cudaStream_t stream) {
  return launch(sum_parts<DividedTiles>, {grid.columns, grid.divisions}, kPartsThreads, 0, stream, work);
}

} // namespace fdm::cuda
