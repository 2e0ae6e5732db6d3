// SPDX-License-Identifier: BSD-3-Clause
// Row plans: a boolean mask per query, read exactly once.
//
// A block turns the rows of one tile into columns, kStepKeys keys at a time. A warp reads 32 rows of 128 keys, four
// keys a thread: a row is one request of 128 bytes, and 32 requests are in flight. Shifts pack the bytes of eight
// rows into the bits of one register, for four keys at once. A transposition of four such registers gives a word of
// 32 rows for each key. Then each thread takes one key, classifies it and ranks it among the others.
#include "../host/launch.cuh"
#include "../tile/mask_bytes.cuh"
#include "list_work.cuh"
#include "make_plan.h"
#include "row_columns.cuh"

namespace fdm::cuda {
namespace {

constexpr int kRowThreads = 512, kStepKeys = kRowThreads;
constexpr int kParts = kTileRows / 32, kKeysPerThread = kMaskBytes, kKeysPerWarp = 32 * kKeysPerThread;
static_assert(kRowThreads / 32 / kParts * kKeysPerWarp == kStepKeys, "the warps' parts must cover a step");

// Byte k of bits[b] has key k in rows 8 b ... 8 b + 7, counted from `first`.
template <MaskLoad kLoad>
__device__ __forceinline__ void load_rows(const uint8_t *first, int64_t row, int64_t col, int rows, int keys,
                                          uint32_t (&bits)[4]) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    uint32_t loaded[8];
#pragma unroll
    for (int r = 0; r < 8; ++r)
      loaded[r] = 8 * b + r < rows ? load_mask<kLoad>(first + (8 * b + r) * row, col, keys) : 0;
    bits[b] = 0;
#pragma unroll
    for (int r = 0; r < 8; ++r) bits[b] = bits[b] >> 1 | upper_bits(loaded[r]); // only the last shift fills a bit 0
  }
}

// Transposes four registers of four bytes: word.x has rows 0 ... 31 of key 0, and so on.
__device__ __forceinline__ uint4 words_of_keys(const uint32_t (&bits)[4]) {
  const uint32_t low01 = __byte_perm(bits[0], bits[1], 0x5140), high01 = __byte_perm(bits[0], bits[1], 0x7362);
  const uint32_t low23 = __byte_perm(bits[2], bits[3], 0x5140), high23 = __byte_perm(bits[2], bits[3], 0x7362);
  return {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632), __byte_perm(high01, high23, 0x5410),
          __byte_perm(high01, high23, 0x7632)};
}

// How a thread loads booleans: four at once if the key stride is 1 and every row begins at a multiple of four bytes.
enum class MaskLoads { single, four };

template <MaskLoads kLoads>
__global__ void __launch_bounds__(kRowThreads, 2)
    list_row_columns(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan, int64_t tiles) {
  __shared__ uint4 words[kParts][kStepKeys / kKeysPerThread];
  __shared__ BlockRanks<kRowThreads, 1> ranks;
  const ListWork work = part_of_list(p, plan, tiles, blockIdx.x);
  const int64_t first_row = work.part * kTileRows;
  if (first_row >= work.s.q_count) return;
  const int rows = static_cast<int>(min64(kTileRows, work.s.q_count - first_row));
  const int64_t row = p.mask.stride[2], col = p.mask.shape[3] == 1 ? 0 : p.mask.stride[3];
  const int64_t first_limit = first_row + work.s.causal_off; // the last key that row 0 of the tile sees
  const int64_t visible = is_causal(p) ? min64(work.s.k_count, first_limit + rows) : work.s.k_count;
  const auto *mask = static_cast<const uint8_t *>(p.mask.data) + work.list_batch * p.mask.stride[0] +
                     work.list_head * p.mask.stride[1] + (work.s.q_begin + first_row) * row;
  const int64_t list_tile = work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, work.part);
  RowWord *key_words = plan.words + list_tile * plan.tile_keys;
  int32_t *granules = plan.granules + list_tile * plan.tile_granules;
  static_assert(kGranuleKeys == 32, "a warp has the keys of a granule");

  const int part = warp_id() % kParts, group = warp_id() / kParts;
  const int part_rows = max(0, min(32, rows - 32 * part));
  const uint8_t *part_mask = mask + 32 * part * row;
  RowColumns<kRowThreads> columns{ranks, plan.columns + list_tile * plan.tile_keys, plan.tile_keys, rows};
  for (int64_t step = 0; step < visible; step += kStepKeys) {
    const int64_t lane_key = step + group * kKeysPerWarp + lane_id() * kKeysPerThread;
    const int keys = static_cast<int>(max64(0, min64(kKeysPerThread, work.s.k_count - lane_key)));
    uint32_t bits[4] = {0, 0, 0, 0};
    if (kLoads == MaskLoads::four && keys == kKeysPerThread) {
      load_rows<MaskLoad::word>(part_mask + lane_key, row, 1, part_rows, keys, bits);
    } else if (keys > 0) {
      load_rows<MaskLoad::bytes>(part_mask + lane_key * col, row, col, part_rows, keys, bits);
    }
    words[part][group * 32 + lane_id()] = words_of_keys(bits);
    __syncthreads();

    const int64_t key = step + threadIdx.x;
    RowWord word;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      word.part[n] = reinterpret_cast<const uint32_t *>(words[n])[threadIdx.x];
      if (is_causal(p)) word.part[n] &= bits_from(key - first_limit - 32 * n);
    }
    const bool exists = key < work.s.k_count;
    if (exists) key_words[key] = word;
    const GranuleNumber number = columns.add(static_cast<int32_t>(key), exists, word);
    if (exists && lane_id() == 0) granules[key / kGranuleKeys] = number;
  }
  // Clears the keys beyond the causal limit that no step has written.
  for (int64_t key = ceil_div(max64(0, visible), kStepKeys) * kStepKeys + threadIdx.x; key < work.s.k_count;
       key += kRowThreads) {
    key_words[key] = RowWord{};
    if (lane_id() == 0) granules[key / kGranuleKeys] = kEmptyGranule;
  }
  if (threadIdx.x == 0) plan.counts[list_tile] = columns.counts();
}

} // namespace

cudaError_t launch_row_lists(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream) {
  const auto kernel = route.aligned ? list_row_columns<MaskLoads::four> : list_row_columns<MaskLoads::single>;
  return launch(kernel, route.blocks, kRowThreads, 0, stream, p, plan, int64_t{route.parts});
}

} // namespace fdm::cuda
