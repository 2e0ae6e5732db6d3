// SPDX-License-Identifier: BSD-3-Clause
// Row plans of a mask of blocks.
//
// A thread block turns the blocks at the rows of one tile into columns. Each thread examines the blocks of one granule
// at a time, so granules without a block cost one look-up. First the block counts the granules with blocks, to take
// room from the pool. Then each warp makes the words of one such granule at a time, and all warps together list the
// columns.
#include "../host/launch.cuh"
#include "list_work.cuh"
#include "make_plan.h"
#include "row_columns.cuh"

namespace fdm::cuda {
namespace {

constexpr int kBlockThreads = 512, kBlockWarps = kBlockThreads / 32;
static_assert(kGranuleKeys == 32, "a warp has the keys of a granule");

// The blocks of a list at the rows of a tile.
struct TileBlocks {
  const fdm_mask_blocks &mask;
  const int32_t *numbers; // of the list
  int32_t first_row, rows, keys;
  int64_t first_limit; // the last key that the first row sees
  bool causal;

  __device__ int32_t block_rows() const { return static_cast<int32_t>(mask.contents.shape[1]); }
  __device__ int32_t block_keys() const { return static_cast<int32_t>(mask.contents.shape[2]); }
  __device__ int32_t number(int32_t row_block, int32_t key_block) const {
    return numbers[row_block * mask.numbers.stride[2] + key_block * mask.numbers.stride[3]];
  }

  // What the blocks of a granule say of it. One that is neither empty nor full may turn out to be, by its contents.
  __device__ GranuleNumber number_of(int32_t granule) const {
    const int32_t first = granule * kGranuleKeys, last = min(first + kGranuleKeys, keys) - 1;
    if (first >= keys || (causal && first >= first_limit + rows)) return kEmptyGranule;
    bool any = false, all = !causal || last <= first_limit;
    for (int32_t i = first_row / block_rows(); i <= (first_row + rows - 1) / block_rows(); ++i)
      for (int32_t j = first / block_keys(); j <= last / block_keys(); ++j) {
        const int32_t block = number(i, j);
        any |= block >= 0;
        all &= block == 0;
      }
    return !any ? kEmptyGranule : all ? kFullGranule : kFirstOwnGranule;
  }

  // The rows of the tile that keep a key.
  __device__ RowWord word(int32_t key) const {
    RowWord word;
#pragma unroll
    for (int n = 0; n < kTileRows / 32; ++n) {
      word.part[n] = kept(key, first_row + 32 * n, min(32, rows - 32 * n));
      if (causal) word.part[n] &= bits_from(key - first_limit - 32 * n);
    }
    return word;
  }

private:
  // Which of `count` rows from `row` on keep a key by the blocks.
  __device__ uint32_t kept(int32_t key, int32_t row, int count) const {
    const int32_t key_block = key / block_keys(), column = key % block_keys();
    uint32_t bits = 0;
    for (int done = 0; done < count;) {
      const int32_t row_block = (row + done) / block_rows(), inside = (row + done) % block_rows();
      const int size = min(block_rows() - inside, count - done);
      const int32_t block = number(row_block, key_block);
      if (block == 0) bits |= (~0u >> (32 - size)) << done;
      if (block > 0) {
        const uint8_t *element = static_cast<const uint8_t *>(mask.contents.data) +
                                 (int64_t(block - 1) * block_rows() + inside) * block_keys() + column;
#pragma unroll 8
        for (int n = 0; n < size; ++n) bits |= uint32_t(element[int64_t(n) * block_keys()] != 0) << (done + n);
      }
      done += size;
    }
    return bits;
  }
};

struct BlockPlanShared {
  BlockRanks<kBlockThreads, 1> ranks;
  int32_t granule[kBlockThreads]; // those of a turn that have blocks, in key order
  int32_t number[kBlockThreads];  // their numbers, if their words are stored
  int32_t first_granule;          // that the tile took from the pool
};

__global__ void __launch_bounds__(kBlockThreads)
    list_block_columns(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan,
                       const __grid_constant__ fdm_mask_blocks blocks, int64_t tiles) {
  __shared__ BlockPlanShared shared;
  const ListWork work = part_of_list(p, plan, tiles, blockIdx.x);
  const int64_t first_row = work.part * kTileRows, list_tile = work.list * plan.tiles + work.part;
  const TileBlocks tile{blocks,
                        static_cast<const int32_t *>(blocks.numbers.data) + work.list_batch * blocks.numbers.stride[0] +
                            work.list_head * blocks.numbers.stride[1],
                        static_cast<int32_t>(first_row),
                        static_cast<int32_t>(min64(kTileRows, work.s.q_count - first_row)),
                        static_cast<int32_t>(work.s.k_count),
                        first_row + work.s.causal_off,
                        is_causal(p)};
  auto *pool = reinterpret_cast<Granule *>(plan.words);
  if (blockIdx.x == 0 && threadIdx.x < kFirstOwnGranule * kGranuleKeys) {
    const uint32_t bits = threadIdx.x / kGranuleKeys == kFullGranule ? ~0u : 0u;
    plan.words[threadIdx.x] = {bits, bits, bits, bits};
  }
  // Ranks this thread's granule among those of a turn with blocks, and among those whose words are stored.
  const auto rank = [&](GranuleNumber number, uint32_t (&ranks)[1]) {
    const bool listed[1] = {number != kEmptyGranule}, stored[1] = {number == kFirstOwnGranule};
    return shared.ranks.rank(listed, stored, ranks);
  };

  uint32_t listed_count = 0, stored_count = 0, ranks[1];
  for (int32_t first = 0; first < plan.tile_granules; first += kBlockThreads) {
    const uint32_t total = rank(tile.number_of(first + threadIdx.x), ranks);
    listed_count += shared.ranks.first_of(total);
    stored_count += shared.ranks.second_of(total);
  }
  const auto room = static_cast<int32_t>(listed_count * kGranuleKeys);
  const auto column_granules = static_cast<int32_t>(ceil_div(room, kGranuleColumns));
  if (threadIdx.x == 0) {
    const auto taken = static_cast<int32_t>(column_granules + stored_count);
    shared.first_granule = kFirstOwnGranule + (taken ? atomicAdd(plan.pool_used, taken) : 0);
    plan.places[list_tile] = {shared.first_granule, room};
  }
  __syncthreads();

  int32_t *numbers = plan.granules + list_tile * plan.tile_granules;
  RowColumns<kBlockThreads> columns{shared.ranks, reinterpret_cast<int32_t *>(pool + shared.first_granule), room,
                                    tile.rows};
  int32_t next_stored = shared.first_granule + column_granules;
  for (int32_t first = 0; first < plan.tile_granules; first += kBlockThreads) {
    const int32_t own_granule = first + static_cast<int32_t>(threadIdx.x);
    const GranuleNumber own_number = tile.number_of(own_granule);
    const uint32_t total = rank(own_number, ranks);
    if (own_number == kEmptyGranule) {
      if (own_granule < plan.tile_granules) numbers[own_granule] = kEmptyGranule;
    } else {
      const uint32_t place = shared.ranks.first_of(ranks[0]);
      shared.granule[place] = own_granule;
      shared.number[place] = next_stored + static_cast<int32_t>(shared.ranks.second_of(ranks[0]));
      if (own_number == kFullGranule) shared.number[place] = kFullGranule;
    }
    __syncthreads();
    const auto listed = static_cast<int>(shared.ranks.first_of(total));
    for (int turn = 0; turn < listed; turn += kBlockWarps) {
      const int place = turn + warp_id();
      const bool has_granule = place < listed;
      const int32_t granule = has_granule ? shared.granule[place] : 0, key = granule * kGranuleKeys + lane_id();
      const int32_t number = has_granule ? shared.number[place] : kEmptyGranule;
      const bool exists = has_granule && key < tile.keys;
      RowWord word{};
      if (exists) word = number == kFullGranule ? RowWord{~0u, ~0u, ~0u, ~0u} : tile.word(key);
      const GranuleNumber found = columns.add(key, exists, word);
      if (has_granule && number >= kFirstOwnGranule) pool[number].words[lane_id()] = word;
      if (has_granule && lane_id() == 0) numbers[granule] = found < kFirstOwnGranule ? found : number;
    }
    next_stored += static_cast<int32_t>(shared.ranks.second_of(total));
    __syncthreads(); // the lists of this turn have been read
  }
  if (threadIdx.x == 0) plan.counts[list_tile] = columns.counts();
}

} // namespace

cudaError_t launch_block_lists(const fdm_problem &p, const fdm_mask_blocks &blocks, const Plan &plan,
                               const PlanRoute &route, cudaStream_t stream) {
  if (cudaError_t error = cudaMemsetAsync(plan.pool_used, 0, sizeof(int32_t), stream)) return error;
  return launch(list_block_columns, route.blocks, kBlockThreads, 0, stream, p, plan, blocks, int64_t{route.parts});
}

} // namespace fdm::cuda
