// SPDX-License-Identifier: BSD-3-Clause
// dQ of short sequences without sums in global memory. The key blocks of a head form a cluster: blockIdx.x is the
// head, blockIdx.y the key block. For each row tile, a block receives the sums of dQ from the block above, adds its
// part, and sends the sums to the block below. The last block of this chain writes dQ. The blocks begin with
// different tiles, so that all of them compute while tiles are in flight.
//
// With a causal limit, a block goes from the first tile that sees one of its keys to the last tile. dQ of a tile
// begins in the block of the tile's diagonal and ends in block 0. Without a causal limit, a block goes on with the
// tiles before its first one, and the blocks form a ring. A block has room for one tile of the block above. If a ring
// had more tiles than blocks, all blocks could wait for each other. So with more tiles than blocks there is no ring:
// dQ of all tiles begins in the last block.
//
// A thread sends its accumulators to the same thread of the other block, so no warp waits for another. The order of
// the additions is fixed.
#pragma once

#include "../../tile/products.cuh"
#include "../key_blocks.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"

namespace fdm::cuda {

// Flags of a step in a chain. dQ of its tile begins in this block; ends in it; no later step receives sums.
enum : uint32_t { kDqBegins = 1, kDqEnds = 2, kLastStep = 4 };

// The row tiles over which a block of the cluster iterates for each head.
struct ChainWalk {
  int32_t tiles;             // the number of all tiles
  int32_t first, last;       // the block's first and last tile; in a ring, tile 0 follows the last of all tiles
  int32_t begin, past_begin; // dQ of these tiles begins in this block
  int32_t end, past_end;     // dQ of these tiles ends in this block

  __device__ ChainWalk(const fdm_problem &p, int32_t tile_rows, int32_t block_keys) {
    const auto rank = static_cast<int32_t>(blockIdx.y), blocks = static_cast<int32_t>(gridDim.y);
    tiles = static_cast<int32_t>((p.queries + tile_rows - 1) / tile_rows);
    const auto causal_off = static_cast<int32_t>(p.keys - p.queries);
    const bool causal = is_causal(p), ring = !causal && tiles <= blocks;
    const auto first_of = [&](int32_t block) {
      if (block == 0) return 0;
      if (block == blocks) return tiles;
      if (causal) return min(tiles, max(0, block * block_keys - causal_off) / tile_rows);
      return ring ? block * tiles / blocks : 0;
    };
    first = begin = first_of(rank);
    past_begin = first_of(rank + 1);
    last = ring && first > 0 ? first - 1 : tiles - 1;
    end = ring ? first_of(static_cast<int32_t>(below())) : 0;
    past_end = ring ? first_of(static_cast<int32_t>(below()) + 1) : (rank == 0 ? tiles : 0);
  }

  // This block receives dQ from the block above, and sends it to the block below.
  __device__ static uint32_t above() { return blockIdx.y + 1 == gridDim.y ? 0 : blockIdx.y + 1; }
  __device__ static uint32_t below() { return (blockIdx.y == 0 ? gridDim.y : blockIdx.y) - 1; }

  __device__ bool has_steps() const { return first < tiles; }
  __device__ int32_t next_tile(int32_t tile) const { return tile + 1 == tiles ? 0 : tile + 1; }
  __device__ uint32_t step_flags(int32_t tile, bool last_head) const {
    const bool begins = tile >= begin && tile < past_begin, ends = tile >= end && tile < past_end;
    return (begins ? kDqBegins : 0) | (ends ? kDqEnds : 0) | (last_head && tile == last ? kLastStep : 0);
  }
};

// The sums that the block above sends, and two barriers for each warp. `full`: a tile has arrived. `empty`: the block
// below has room for a tile.
template <int kTiles, int kWarps> struct ChainShared {
  alignas(16) float sums[kWarps][kTiles][32 * 4];
  uint64_t full[kWarps], empty[kWarps];

  // One thread of the block calls this, before the cluster barrier.
  __device__ void init() {
    for (int warp = 0; warp < kWarps; ++warp) {
      ptx::init_barrier(full[warp], 1);
      ptx::init_barrier(empty[warp], 1);
    }
  }
};

template <class Element, int kTiles, int kWarps> struct QueryChain {
  using Shared = ChainShared<kTiles, kWarps>;
  using Sums = float[kTiles][4];

  const BackwardParams &params;
  uint32_t parities = 2; // the parities of the next waits: bit 0 for `full`, bit 1 for `empty`

  __device__ explicit QueryChain(const BackwardParams &parameters) : params(parameters) {}

  // Loads the sums of a step's tile that the block above has sent. If dQ begins here, sets them to zeros. All threads
  // of a warp call this.
  __device__ void receive(Sums &sums, Shared &shared, uint32_t flags) {
    if (flags & kDqBegins) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
      return;
    }
    const uint32_t thread = ptx::thread_index(), warp = thread / 32, lane = thread % 32;
    if (lane == 0) ptx::expect_from_cluster(shared.full[warp], sizeof(shared.sums[warp]));
    ptx::wait_for_cluster(shared.full[warp], parities & 1);
    const float *const received = &shared.sums[warp][0][4 * lane];
    uint32_t loaded = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 part = *reinterpret_cast<const float4 *>(received + n * 128);
      sums[n][0] = part.x;
      sums[n][1] = part.y;
      sums[n][2] = part.z;
      sums[n][3] = part.w;
      loaded ^= __float_as_uint(part.x);
    }
    parities ^= 1;
    // Tells the block above that it may overwrite these sums. The arrival at its barrier may overtake loads that are
    // still in flight, even after a fence of block scope (seen on an H200, about once in 10,000 calls). So the
    // barrier's address depends on a register of each load of the warp. `zero` is 0, since packed sequences have no
    // chains, but the compiler does not know this.
    const auto zero = uint32_t(reinterpret_cast<uintptr_t>(params.p.cu_seqlens_q.data));
    const uint32_t block = ChainWalk::above() + __any_sync(0xffffffffu, loaded & zero);
    // After its last tile, the block above may have ended.
    if (lane == 0 && !(flags & kLastStep)) ptx::arrive_remote(shared.empty[warp], block);
  }

  // Sends the sums to the block below. If dQ ends here, writes them instead.
  __device__ void send(const Sums &sums, Shared &shared, uint32_t flags, const KeyTask &task, const KeyStep &step) {
    if (flags & kDqEnds) return write(sums, task, step);
    const uint32_t thread = ptx::thread_index(), warp = thread / 32, lane = thread % 32;
    ptx::wait_for_cluster(shared.empty[warp], parities / 2);
    parities ^= 2;
    const ptx::RemoteBuffer remote(&shared.sums[warp][0][4 * lane], shared.full[warp], ChainWalk::below());
#pragma unroll
    for (int n = 0; n < kTiles; ++n) remote.store(n * 128, make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]));
  }

private:
  __device__ void write(const Sums &sums, const KeyTask &task, const KeyStep &step) const {
    const fdm_tensor &t = params.a.dq;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = (int64_t(step.tile) * kWarps + warp) * 16 + accumulator_row(half);
      write_row(static_cast<Element *>(t.data) + row_offset(t, task.s, row, task.first_head + step.head), t.stride[3],
                int(params.p.head_dim), sums, half, params.p.scale, row < task.s.q_count);
    }
  }
};

} // namespace fdm::cuda
