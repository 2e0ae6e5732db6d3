// SPDX-License-Identifier: BSD-3-Clause
// Tiles of 128 rows in the Hopper kernels of pair biases, and their copies.
#pragma once

#include "../../backward/row_statistics.cuh"
#include "../../tile/sm90/roles.cuh"
#include "../../tile/smem_tile.cuh"
#include "../sources.cuh"
#include "ptx/matrix.cuh"

namespace fdm::cuda {

// Two tensors in shared memory, 128 rows each. With 32 columns they lie side by side in a panel of 64.
template <int kHeadDim> struct TilePair {
  static constexpr bool kPaired = kHeadDim == 32;
  static_assert(kPaired || kHeadDim == 64 || kHeadDim == 128);
  using Tile = SmemTile<kPaired ? 64 : kHeadDim, kPairBiasTileSm90>;
  static constexpr int kChunks = kHeadDim / 8, kBytes = kPaired ? Tile::kBytes : 2 * Tile::kBytes;

  __device__ static __forceinline__ uint32_t chunk_address(uint32_t base, int which, int row, int chunk) {
    return Tile::chunk_address(kPaired ? base : base + which * Tile::kBytes, row,
                               chunk + (kPaired ? which * kChunks : 0));
  }
  __device__ static __forceinline__ uint64_t descriptor(uint32_t base, int which) {
    constexpr uint64_t kSecond = kPaired ? Tile::offset(0, 32) : uint64_t(Tile::kBytes >> 4);
    return Tile::descriptor(base) + which * kSecond;
  }
};

// The byte of a key mask for a key and a query head of a sequence, or null without a key mask.
__device__ __forceinline__ const uint8_t *kept_key(const fdm_problem &p, int64_t batch, int64_t head, int64_t key) {
  if (mask_kind(p) != FDM_MASK_KEYS) return nullptr;
  const Matrix mask = score_matrix(p, p.mask, pair_bias_sequence(p, batch), head, 1);
  return static_cast<const uint8_t *>(mask.base) + key * mask.col;
}

// Whether a query keeps a key by row masks, intervals and the causal limit. Each source applies its key mask itself.
__device__ __forceinline__ bool is_kept_pair(const fdm_problem &p, const Sequence &s, int64_t head, int64_t r,
                                             int64_t k) {
  if (r >= p.queries || k >= p.keys || (is_causal(p) && k > r + p.keys - p.queries)) return false;
  if (has_query_rows(p.mask)) {
    const Matrix mask = score_matrix(p, p.mask, s, head, 1);
    return static_cast<const uint8_t *>(mask.base)[r * mask.row + k * mask.col] != 0;
  }
  if (!present(p.start)) return true;
  const RowRange rows = rows_of_key(p, s, head, k);
  return rows.first <= r && r < rows.past;
}

// Iterates over consecutive sources of a bias.
struct SourceWalk {
  int batch, head, first_head, past_head;

  __device__ SourceWalk(const PairBiasCall &call, int plane, int64_t index) {
    const Source source = source_of(call, plane, index);
    batch = int(source.batch);
    head = int(source.head);
    first_head = plane % int(call.p.bias.shape[1]) * call.heads;
    past_head = first_head + call.heads;
  }
  __device__ __forceinline__ void operator++() {
    if (++head < past_head) return;
    head = first_head;
    ++batch;
  }
};

// Copies rows of a tensor with the producer threads: a warp has 32 of 128 rows.
template <class Pair> struct TileRowCopy {
  static constexpr int kRows = kPairBiasTileSm90 / Roles::kProducerWarps, kStepRows = 32 / Pair::kChunks;
  static_assert(kRows == 32);

  const fdm_tensor &t;
  const uint16_t *thread_row; // this thread's chunk of its first row, for sequence 0 and head 0
  bool inside;                // the chunk begins before head_dim

  __device__ TileRowCopy(const fdm_tensor &tensor, int64_t head_dim, int64_t first)
      : t(tensor),
        thread_row(static_cast<const uint16_t *>(tensor.data) +
                   (first + Roles::producer_thread() / 32 * kRows + threadIdx.x % 32 / Pair::kChunks) * t.stride[1] +
                   threadIdx.x % Pair::kChunks * 8),
        inside(int(threadIdx.x % Pair::kChunks) * 8 < head_dim) {}

  __device__ __forceinline__ const uint16_t *row_of(int64_t batch, int64_t head) const {
    return thread_row + batch * t.stride[0] + head * t.stride[2];
  }

  // Copies rows, from row_of() or a number of rows further, to a tile of a pair. Rows whose bit in `there` is clear,
  // and columns from head_dim on, become zeros.
  __device__ __forceinline__ void copy(const char *tile, int which, const uint16_t *row, uint32_t there) const {
    const int lane_row = threadIdx.x % 32 / Pair::kChunks, first_row = Roles::producer_thread() / 32 * kRows;
    const uint32_t base = ptx::shared_address(tile), rows = inside ? there >> lane_row : 0;
#pragma unroll(kRows / kStepRows <= 8 ? kRows / kStepRows : 4)
    for (int r = 0; r < kRows; r += kStepRows) {
      ptx::cp_async_16(Pair::chunk_address(base, which, first_row + r + lane_row, threadIdx.x % Pair::kChunks), row,
                       rows >> r & 1);
      row += kStepRows * t.stride[1];
    }
  }
};

constexpr uint16_t kBfloat16Inf = 0x7f80;

// The keys of 128 that a source drops, as the producer warps find them: a number for each key, -inf if it is dropped.
struct DroppedKeys {
  alignas(4) uint16_t numbers[kPairBiasTileSm90]; // bfloat16
  bool found[Roles::kProducerWarps];

  // A producer thread stores `number` for its key if that is kept. Returns the kept keys of its warp as bits.
  __device__ __forceinline__ uint32_t set(bool kept, uint16_t number = 0) {
    const int thread = Roles::producer_thread();
    const uint32_t all = __ballot_sync(0xffffffffu, kept);
    numbers[thread] = kept ? number : kBfloat16Inf | 0x8000;
    if (thread % 32 == 0) found[thread / 32] = all != ~0u;
    return all;
  }
  __device__ __forceinline__ bool any() const {
    bool some = false;
#pragma unroll
    for (int warp = 0; warp < Roles::kProducerWarps; ++warp) some |= found[warp];
    return some;
  }
  // Reads the numbers of this thread's two keys of tile n of 8.
  __device__ __forceinline__ void read(int n, float (&values)[2]) const {
    const uint32_t pair = reinterpret_cast<const uint32_t *>(numbers)[4 * n + threadIdx.x % 4];
    ptx::unpack<__nv_bfloat16>(pair, values[0], values[1]);
  }
};

} // namespace fdm::cuda
